"""What the pages say of the learning runs is what their committed files say."""

import re
from itertools import product

import pandas as pd
import pytest

from experiments.learning.results import ABLATIONS, ESTIMATORS, FIGURES, PAGES, TABLES, Rates, in_training, with_tables
from experiments.learning.run import GAME_SUM

ALONE = [f"{name}_{role}" for name, role in product(ESTIMATORS, ("attacker", "assessor"))]


def test_every_table_of_the_pages_is_made_from_the_files() -> None:
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    assert set(re.findall(r"<!-- table: (\w+) -->", "".join(pages))) == set(TABLES)
    for page in pages:
        assert with_tables(page) == page == with_tables(page.replace("95.3 (94.4 to 96.0)", "99.9"))


def test_both_roles_of_the_quickstart_gain_outside_the_intervals_with_every_seed() -> None:
    rates = Rates.of("quickstart")
    first, last = rates.steps[0], rates.steps[-1]
    for seed in rates.seeds:
        missed, missed_later = (rates.share("attacker/undetected", step, 1.0, (seed,)) for step in (first, last))
        assert missed.interval[1] < missed_later.interval[0]
        found = rates.share("assessor/frozen_attacks", last, 1.0, (seed,))
        assert missed.complement.interval[1] < found.interval[0]
        right, right_later = (rates.share("assessor/clean", step, 1.0, (seed,)) for step in (first, last))
        assert right.interval[1] < right_later.interval[0], "it does not find more by suspecting everything"


@pytest.mark.parametrize("experiment", ["quickstart", *ABLATIONS, "longer", *ALONE])
def test_every_run_has_three_seeds_all_steps_and_enough_items(experiment: str) -> None:
    rates, steps = Rates.of(experiment), pd.read_csv(FIGURES / f"{experiment}_steps.csv")
    assert rates.seeds == [0, 1, 2]
    for step, seed in product((rates.steps[0], rates.steps[-1]), rates.seeds):
        assert rates.balanced(step, 1.0, (seed,)).items >= 500
        assert rates.share("attacker/valid", step, 1.0, (seed,)).items >= 500
    assert sorted(zip(steps.seed, steps.step, strict=True)) == [*product(rates.seeds, range(1, rates.steps[-1] + 1))]
    if experiment == "reinforce_plus_plus":
        assert set(steps[GAME_SUM]) == {0.0}  # summed over a trajectory the game is worth nothing


def test_without_a_judge_attacks_hold_no_error_and_a_leak_is_learned() -> None:
    for experiment, low, high in (("headline", 0.0, 0.05), ("rules_alone", 0.5, 1.0), ("unchecked", 0.5, 1.0)):
        rates = Rates.of(experiment)
        assert low < rates.share("attacker/harmless", rates.steps[-1], 1.0).value < high
    shared = Rates.of("shared")
    isolated = shared.share(("self/attacks", "self/decoys"), shared.steps[-1], 1.0)
    assert in_training("shared", "assessor", "accuracy", slice(-10, None)).value - isolated.value > 0.2
