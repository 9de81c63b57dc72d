"""What the pages of the experiments say is what their committed files say, and what the code makes of them."""

import io
import re

import pandas as pd
import pytest

from experiments.incentives import payoffs, simulate
from experiments.incentives.assumptions import Assumptions
from experiments.incentives.payoffs import matrix
from experiments.incentives.simulate import FIGURES, Table, as_csv, as_markdown
from experiments.learning.results import PAGES, TABLES, Rates, markdown, with_tables
from experiments.pages import with_table
from experiments.shortcuts import run as shortcuts

ASSUMED = Assumptions()


@pytest.fixture(scope="module")
def tables() -> dict[str, Table]:
    return simulate.tables(ASSUMED)


@pytest.mark.parametrize("name", ["dynamics", "gate", "validity", "assessments", "robustness"])
def test_the_page_shows_the_committed_tables_which_are_what_the_code_makes(tables: dict[str, Table], name: str) -> None:
    page, file = simulate.PAGE.read_text(encoding="utf-8"), FIGURES / f"{name}.csv"
    rows = pd.read_csv(file, dtype=str, keep_default_na=False).to_dict("records")
    assert with_table(page, name, as_markdown(rows)) == page
    if name != "robustness":  # half a minute
        made = pd.read_csv(io.StringIO(as_csv(tables[name])))
        pd.testing.assert_frame_equal(pd.read_csv(file), made, rtol=0, atol=0.03)  # another numpy may round otherwise


def test_the_page_shows_the_payoffs_of_today() -> None:
    page = payoffs.PAGE.read_text(encoding="utf-8")
    assert "| unknowable (`right lower` → `left lower`) |" in page
    assert with_table(page, "payoffs", matrix()) == page, "run python -m experiments.incentives.payoffs"


def test_every_table_of_the_pages_is_made_from_the_files() -> None:
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    assert set(re.findall(r"<!-- table: (\w+) -->", "".join(pages))) == set(TABLES)
    for page in pages:
        assert with_tables(page) == page == with_tables(page.replace("95.3 (94.4 to 96.0)", "99.9"))


def test_quickstart_roles_gain_outside_the_intervals_with_every_seed() -> None:
    rates = Rates.of("quickstart")
    first, last = rates.steps[0], rates.steps[-1]
    for seed in rates.seeds:
        missed, missed_later = (rates.share("attacker/undetected", step, 1.0, (seed,)) for step in (first, last))
        assert missed.interval[1] < missed_later.interval[0]
        found = rates.share("assessor/frozen_attacks", last, 1.0, (seed,))
        assert missed.complement.interval[1] < found.interval[0]
        right, right_later = (rates.share("assessor/clean", step, 1.0, (seed,)) for step in (first, last))
        assert right.interval[1] < right_later.interval[0], "it does not find more by suspecting everything"


# --- the harder toy clinic: what attacks did, who calls it what ---


def test_the_page_holds_the_table_of_the_committed_counts() -> None:
    page = shortcuts.PAGE.read_text(encoding="utf-8")
    for name, arms in shortcuts.TABLES.items():
        assert with_table(page, name, markdown(shortcuts.arms_table(arms))) == page
    assert re.search("`decoys_gate` | [123] ", page)
