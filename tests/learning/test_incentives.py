"""The simulation of where the rewards lead: its directions, its files, and the matrix of payoffs."""

import csv
import io
from itertools import chain

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
    ("perfect", EARLIER, "unknowable", 0.8, 1.0),
    ("errs", EARLIER, "unknowable", 0.8, 1.0),
    ("labels", EARLIER, "unknowable", 0.8, 1.0),
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


def stored(name: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO((FIGURES / f"{name}.csv").read_text(encoding="utf-8"))))


@pytest.mark.parametrize("name", ["dynamics", "gate", "validity", "assessments", "robustness"])
def test_the_page_shows_the_committed_tables_which_are_what_the_code_makes(tables: dict[str, Table], name: str) -> None:
    header, *rows = kept = stored(name)
    page = simulate.PAGE.read_text(encoding="utf-8")
    assert with_table(page, name, as_markdown([dict(zip(header, row, strict=True)) for row in rows])) == page
    if name == "robustness":  # half a minute
        return
    made = list(csv.reader(io.StringIO(as_csv(tables[name]))))
    assert [len(line) for line in kept] == [len(line) for line in made]
    for old, new in zip(chain(*kept), chain(*made), strict=True):
        try:
            assert float(old) == pytest.approx(float(new), abs=0.03)  # another numpy may round otherwise
        except ValueError:
            assert old == new, "run python -m experiments.incentives.simulate"


def test_other_assumptions_are_taken_by_their_key_and_leave_the_files_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert ASSUMED.changed(["subtle.blind=0.3", "steps=20"]).subtle.blind == 0.3
    with pytest.raises(ValidationError, match=r"subtle\.blnd"):
        ASSUMED.changed(["subtle.blnd=0.3"])
    before = {path: path.stat().st_mtime_ns for path in (simulate.PAGE, *FIGURES.iterdir())}
    simulate.main(["steps=10", "games=100"])
    assert "| pair | all four changes |" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in (simulate.PAGE, *FIGURES.iterdir())}


def test_the_page_shows_the_payoffs_of_today() -> None:
    page = payoffs.PAGE.read_text(encoding="utf-8")
    assert "| unknowable (`right lower` → `left lower`) |" in page
    assert with_table(page, "payoffs", matrix()) == page, "run python -m experiments.incentives.payoffs"
