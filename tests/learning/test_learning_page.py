"""What the documentation says of the learning runs is what their committed files say."""

import csv
import re
from itertools import product

import pytest

from experiments.learning.results import (
    ABLATIONS,
    ESTIMATORS,
    FIGURES,
    PAGE,
    TABLES,
    Rates,
    in_training,
    with_tables,
)
from experiments.learning.run import GAME_SUM

EXPERIMENTS = [
    *ABLATIONS,
    "longer",
    *(f"{name}_{role}" for name, role in product(ESTIMATORS, ("attacker", "assessor"))),
]
NOBODY_READS = ("rules_alone", "unchecked")


def test_every_table_of_the_page_is_made_from_the_files() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- table: (\w+) -->", page)) == set(TABLES)
    assert with_tables(page) == page


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_run_has_three_seeds_and_enough_items(experiment: str) -> None:
    rates = Rates.of(experiment)
    assert rates.seeds == [0, 1, 2]
    for step, seed in product((rates.steps[0], rates.steps[-1]), rates.seeds):
        assert rates.balanced(step, 1.0, (seed,)).items >= 500
        assert rates.share("attacker/valid", step, 1.0, (seed,)).items >= 500
    if experiment not in NOBODY_READS:  # where hardly an attack is valid: see below
        assert rates.share("attacker/undetected", rates.steps[-1], 1.0).items >= 500


@pytest.mark.parametrize("experiment", NOBODY_READS)
def test_where_nobody_reads_the_notes_the_attacks_hold_no_error(experiment: str) -> None:
    checked, unread = Rates.of("headline"), Rates.of(experiment)
    assert checked.share("attacker/harmless", checked.steps[-1], 1.0).value < 0.05
    assert unread.share("attacker/harmless", unread.steps[-1], 1.0).value > 0.5


def test_the_leak_is_what_the_shared_context_teaches() -> None:
    step = Rates.of("shared").steps[-1]
    in_context = in_training("shared", "assessor", "accuracy", slice(-10, None))
    isolated = Rates.of("shared").share(("self/attacks", "self/decoys"), step, 1.0)
    assert in_context.value - isolated.value > 0.2


def test_summed_over_a_trajectory_the_game_is_worth_nothing() -> None:
    with (FIGURES / "reinforce_plus_plus_steps.csv").open(encoding="utf-8", newline="") as file:
        assert {float(row[GAME_SUM]) for row in csv.DictReader(file)} == {0.0}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_no_run_is_missing_a_step(experiment: str) -> None:
    lines = (FIGURES / f"{experiment}_steps.csv").read_text(encoding="utf-8").splitlines()[1:]
    steps: dict[str, list[int]] = {}
    for line in lines:
        seed, step, *_ = line.split(",")
        steps.setdefault(seed, []).append(int(step))
    last = Rates.of(experiment).steps[-1]
    assert steps == {seed: list(range(1, last + 1)) for seed in ("0", "1", "2")}
