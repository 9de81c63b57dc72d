"""What the page of the learning runs says is what their committed files say."""

import csv
import re
from itertools import product

import pytest

from experiments.learning.results import ABLATIONS, ESTIMATORS, FIGURES, PAGE, TABLES, Rates, in_training, with_tables
from experiments.learning.run import GAME_SUM

ALONE = [f"{name}_{role}" for name, role in product(ESTIMATORS, ("attacker", "assessor"))]


def test_every_table_of_the_page_is_made_from_the_files() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- table: (\w+) -->", page)) == set(TABLES)
    assert with_tables(page) == page == with_tables(page.replace("95.3 (94.4 to 96.0)", "99.9"))


@pytest.mark.parametrize("experiment", [*ABLATIONS, "longer", *ALONE])
def test_every_run_has_three_seeds_all_steps_and_enough_items(experiment: str) -> None:
    rates = Rates.of(experiment)
    assert rates.seeds == [0, 1, 2]
    for step, seed in product((rates.steps[0], rates.steps[-1]), rates.seeds):
        assert rates.balanced(step, 1.0, (seed,)).items >= 500
        assert rates.share("attacker/valid", step, 1.0, (seed,)).items >= 500
    with (FIGURES / f"{experiment}_steps.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    steps = {(int(row["seed"]), int(row["step"])) for row in rows}
    assert steps == set(product(rates.seeds, range(1, rates.steps[-1] + 1))) and len(rows) == len(steps)
    if experiment == "reinforce_plus_plus":
        assert {float(row[GAME_SUM]) for row in rows} == {0.0}  # summed over a trajectory the game is worth nothing


def test_without_a_judge_attacks_hold_no_error_and_a_leak_is_learned() -> None:
    for experiment, low, high in (("headline", 0.0, 0.05), ("rules_alone", 0.5, 1.0), ("unchecked", 0.5, 1.0)):
        rates = Rates.of(experiment)
        assert low < rates.share("attacker/harmless", rates.steps[-1], 1.0).value < high
    shared = Rates.of("shared")
    isolated = shared.share(("self/attacks", "self/decoys"), shared.steps[-1], 1.0)
    assert in_training("shared", "assessor", "accuracy", slice(-10, None)).value - isolated.value > 0.2
