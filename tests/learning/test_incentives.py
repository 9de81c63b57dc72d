"""The pages of the experiments agree with their committed files and with the code."""

import io
import re

import pandas as pd
import pytest

from experiments import pages
from experiments.incentives import simulate
from experiments.incentives.assumptions import Assumptions
from experiments.incentives.simulate import FIGURES, Table, as_csv
from experiments.learning.results import ROOT, Rates

ASSUMED = Assumptions()


@pytest.fixture(scope="module")
def tables() -> dict[str, Table]:
    return simulate.tables(ASSUMED)


@pytest.mark.parametrize("name", ["dynamics", "gate"])  # robustness takes half a minute
def test_the_committed_tables_are_what_the_code_makes(tables: dict[str, Table], name: str) -> None:
    made = pd.read_csv(io.StringIO(as_csv(tables[name])))
    file = pd.read_csv(FIGURES / f"{name}.csv")
    pd.testing.assert_frame_equal(
        file, made, rtol=0, atol=0.03
    )  # another numpy may round otherwise


def test_every_table_of_the_pages_is_made_from_the_files() -> None:
    made = [*pages.tables()]
    for page, name, table in made:
        assert f"<!-- table: {name} -->\n{table}\n<!-- end -->" in page.read_text(
            encoding="utf-8"
        ), (page, name)
    every = {*ROOT.glob("experiments/*/README.md"), *(page for page, *_ in made)}
    marked = [
        name
        for page in every
        for name in re.findall(r"<!-- table: (\w+) -->", page.read_text(encoding="utf-8"))
    ]
    assert sorted(marked) == sorted(name for _, name, _ in made)


def test_quickstart_roles_gain_outside_the_intervals_with_every_seed() -> None:
    rates = Rates.of("quickstart")
    first, last = rates.steps[0], rates.steps[-1]
    for seed in rates.seeds:
        missed, missed_later = (
            rates.share("attacker/undetected", step, 1.0, (seed,)) for step in (first, last)
        )
        assert missed.interval[1] < missed_later.interval[0]
        found = rates.share("assessor/frozen_attacks", last, 1.0, (seed,))
        assert missed.complement.interval[1] < found.interval[0]
        right, right_later = (
            rates.share("assessor/clean", step, 1.0, (seed,)) for step in (first, last)
        )
        assert right.interval[1] < right_later.interval[0], (
            "it does not find more by suspecting everything"
        )
