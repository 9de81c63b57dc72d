"""The simulation of where the rewards lead: its directions, its files, and the matrix of payoffs."""

import io

import pandas as pd
import pytest
from pydantic import ValidationError

from experiments.incentives import payoffs, simulate
from experiments.incentives.assumptions import Assumptions
from experiments.incentives.payoffs import matrix
from experiments.incentives.simulate import ALL, EARLIER, FIGURES, Table, as_csv, as_markdown
from experiments.pages import with_table

ASSUMED = Assumptions()
NEUTRAL_GATE, PAID_GATE = "neutral decoys, gate", "decoys paid for suspicion, gate"
DIRECTIONS = [  # judge, setting, column, at least, at most
    *((judge, EARLIER, "edited, nothing seen", 0.8, 1.0) for judge in ("labels", "errs", "pair", "perfect")),
    *((judge, EARLIER, "shortcut", 0.4, 1.0) for judge in ("labels", "errs", "pair", "perfect")),
    *((judge, EARLIER, "F1", 0.0, 0.62) for judge in ("labels", "errs", "pair", "perfect")),
    *((judge, EARLIER, "unknowable", 0.8, 1.0) for judge in ("labels", "errs", "perfect")),
    ("perfect", "blind gate", "unknowable", 0.0, 0.1),
    ("pair", NEUTRAL_GATE, "unknowable", 0.0, 0.1),
    ("pair", EARLIER, "subtle", 0.0, 0.1),
    ("pair", "blind gate", "blatant", 0.8, 1.0),
    ("pair", "blind gate, milder failed_attack", "subtle", 0.8, 1.0),
    ("pair", "milder failed_attack", "unknowable", 0.9, 1.0),
    ("pair", EARLIER, "elsewhere", 0.8, 1.0),
    ("pair", "edit must touch the error", "elsewhere", 0.0, 0.1),
    ("perfect", "neutral decoys, learnable reward", "unknowable", 0.8, 1.0),
    ("perfect", "all four, learnable reward", "subtle", 0.8, 1.0),
    *((judge, PAID_GATE, "odd decoys", 0.8, 1.0) for judge in ("pair", "perfect")),
    *((judge, PAID_GATE, "edited, error seen", 0.0, 0.8) for judge in ("pair", "perfect")),
    *((judge, NEUTRAL_GATE, "odd decoys", 0.0, 0.2) for judge in ("pair", "perfect")),
    *((judge, NEUTRAL_GATE, "edited, error seen", 0.9, 1.0) for judge in ("pair", "perfect")),
    *((judge, ALL, "subtle", 0.8, 1.0) for judge in ("pair", "perfect")),
    *((judge, ALL, "edited, nothing seen", 0.0, 0.1) for judge in ("pair", "perfect")),
    *((judge, ALL, "shortcut", -1.0, 0.1) for judge in ("pair", "perfect")),
    *((judge, ALL, "F1", 0.61, 1.0) for judge in ("pair", "perfect")),
]


@pytest.fixture(scope="module")
def tables() -> dict[str, Table]:
    return simulate.tables(ASSUMED)


def test_the_simulation_leads_where_the_page_says(tables: dict[str, Table]) -> None:
    rows = {(row["judge"], row["setting"]): row for row in tables["dynamics"]}
    wrong = [line for line in DIRECTIONS if not line[3] <= rows[line[0], line[1]][line[2]] <= line[4]]
    assert wrong == []


@pytest.mark.parametrize("name", ["dynamics", "gate", "validity", "assessments", "robustness"])
def test_the_page_shows_the_committed_tables_which_are_what_the_code_makes(tables: dict[str, Table], name: str) -> None:
    page, file = simulate.PAGE.read_text(encoding="utf-8"), FIGURES / f"{name}.csv"
    rows = pd.read_csv(file, dtype=str, keep_default_na=False).to_dict("records")
    assert with_table(page, name, as_markdown(rows)) == page
    if name != "robustness":  # half a minute
        made = pd.read_csv(io.StringIO(as_csv(tables[name])))
        pd.testing.assert_frame_equal(pd.read_csv(file), made, rtol=0, atol=0.03)  # another numpy may round otherwise


def test_other_assumptions_are_taken_by_their_key_and_leave_the_files_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert ASSUMED.changed(["subtle.blind=0.3", "steps=20"]).subtle.blind == 0.3
    with pytest.raises(ValidationError, match=r"subtle\.blnd"):
        ASSUMED.changed(["subtle.blnd=0.3"])
    before = simulate.PAGE.stat().st_mtime_ns
    simulate.main(["steps=10", "games=100"])
    assert "| pair | all four changes |" in capsys.readouterr().out
    assert before == simulate.PAGE.stat().st_mtime_ns


def test_the_page_shows_the_payoffs_of_today() -> None:
    page = payoffs.PAGE.read_text(encoding="utf-8")
    assert "| unknowable (`right lower` → `left lower`) |" in page
    assert with_table(page, "payoffs", matrix()) == page, "run python -m experiments.incentives.payoffs"
