"""The frames of a run hold what its records hold; what a command holds in memory does not follow
their number.
"""

import ast
import re
import shutil
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pytest
from game.builders import ERROR_NOTE, ERROR_SENTENCE, paid
from invoking import invoke

from medserl_agentloop import report
from medserl_agentloop.core.step_file import GAMES_FILE, METRICS_FILE, StepFile
from medserl_agentloop.evaluation.score import read_reference
from medserl_agentloop.games.medical.case import Category, Label
from medserl_agentloop.games.medical.records import GAMES, MedicalRecord, Outcome
from medserl_agentloop.report import games, page

ROOT = Path(__file__).parents[2]

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
RECORDS = [
    paid(Outcome.MISSED_ERROR, step=1, uid="group", finished=NOON, seconds=[2.5, 0.5]),
    paid(Outcome.CORRECT_DETECTION, step=1, uid="group", session=1),
    paid(Outcome.INVALID_ATTACK, step=2, uid="group"),
    paid(Outcome.UNREADABLE, step=2, uid="other"),
    paid(Outcome.VOID, step=3, uid="group"),
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run, where the examples of the page look for it."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/quickstart")
    StepFile(folder / GAMES_FILE).append(record.to_json() for record in RECORDS)
    numbers = [{"step": 1, "actor/grad_norm": 0.5}, {"step": 2, "selfplay/alarm/x": 1.0}]
    StepFile(folder / METRICS_FILE).append(numbers)
    return folder


def test_a_game_is_a_row_with_the_columns_of_the_schema(run: Path) -> None:
    frame = games(run)
    own = frame.loc[:, ~frame.columns.str.startswith("reward/")].dtypes.astype(str)
    assert dict(own) == {name: column.dtype for name, column in GAMES.items()}
    assert list(frame["outcome"]) == [record.outcome.value for record in RECORDS]
    assert list(frame["right"].astype(object)) == [False, True, pd.NA, pd.NA, pd.NA]
    assert list(frame["assessor_readable"].astype(object)) == [True, True, pd.NA, False, True]
    assert list(frame["finished"][:2].astype(object)) == [NOON, pd.NaT]
    assert list(frame["signal"]) == [True, True, False, False, False]
    for role in ("attacker", "assessor"):
        # The components add up to the reward, and are missing where it is.
        total = frame.filter(like=f"reward/{role}/").sum(axis=1, min_count=1)
        pd.testing.assert_series_equal(total, frame[f"{role}_reward"], check_names=False)


@pytest.mark.parametrize("category", Category)
def test_the_error_type_is_that_of_an_error_that_the_game_began_with(
    tmp_path: Path, category: Category
) -> None:
    record = paid(Outcome.VOID, step=1, category=category, facts={"error_type": "diagnosis"})
    StepFile(tmp_path / GAMES_FILE).append([record.to_json()])
    assert games(tmp_path)["error_type"].notna().all() == (category.seed_label is Label.HARMFUL)


def example(words: str) -> str:
    """The one block of Python on the page that has these words."""
    text = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (code,) = (block for block in blocks if words in block)
    return str(code)


@pytest.mark.usefixtures("run")
def test_the_questions_of_the_page_are_answered() -> None:
    code = example("Which attacks fool the assessor twice?")
    questions = [ast.parse(block).body[-1] for block in code.split("\n\n") if "[" in block]
    names: dict[str, object] = {}
    exec(code, names)
    answers = [eval(ast.unparse(question), names) for question in questions]
    assert [len(answer) > 0 for answer in answers] == [True, False]  # no case fooled it twice here


def test_undetected_errors_are_written_as_notes_of_medec(run: Path) -> None:
    note = ERROR_NOTE.replace(" Discharge", "\n\ud800 Discharge")
    wrong = {"attack": {"note": note}, "error_sentences": [ERROR_SENTENCE]}
    missed = paid(Outcome.MISSED_ERROR, step=4, **wrong)
    StepFile(run / GAMES_FILE).append(missed.to_json() for _ in range(2))
    exec(example("undetected.csv"), {})
    (row,) = read_reference([Path("undetected.csv")]).notes
    assert row.flag and row.sentences[row.sentence_id] == ERROR_SENTENCE


# --- the games of a long run, which do not fit into memory ---


FEW, MANY = 100, 1000
TEXT = "word " * 2000  # as long as a turn's reasoning


def record(number: int) -> MedicalRecord:
    outcome = list(Outcome)[number % len(Outcome)]
    changes = {"profile": "medserl", "scheme": "medserl"}
    place = {"step": number // 8, "uid": str(number // 4), "session": number % 4}
    return paid(outcome, assessment={"reasoning": TEXT}, **place, **changes)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folders = [tmp_path_factory.mktemp(str(count)) for count in (FEW, MANY)]
    for folder, count in zip(folders, (FEW, MANY), strict=True):
        StepFile(folder / GAMES_FILE).append(record(number).to_json() for number in range(count))
    return folders


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "PART", 50)
    monkeypatch.setattr(page, "MOST_GAMES", 50)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["report", "compare", "resume"])
def test_ten_times_the_games_take_little_more_memory(
    runs: list[Path], tmp_path: Path, command: str
) -> None:
    peaks = []
    for run in (runs[0], *runs):  # the first pays for what is imported and cached
        copy = shutil.copy(run / GAMES_FILE, tmp_path)
        tracemalloc.start()
        if command == "resume":
            assert StepFile(copy).cut_after(3) in (FEW - 32, MANY - 32)
        else:
            done = invoke(command, run, *([run] if command == "compare" else []))
            assert done.exit_code == 0, done.output
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 2 * peaks[1], peaks  # the texts are 10 times as many, and 12 MB


def test_frames_made_in_parts_are_those_made_at_once(
    runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_parts = games(runs[0])
    monkeypatch.setattr(report, "PART", 10**9)
    pd.testing.assert_frame_equal(in_parts, games(runs[0]), check_like=True)
