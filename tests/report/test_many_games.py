"""What a command holds in memory does not follow the number of games; the games of a long run do not fit."""

import random
import shutil
import tracemalloc
from pathlib import Path

import pandas as pd
import pytest
from game.builders import paid
from invoking import invoke

from medserl_agentloop import report
from medserl_agentloop.core.step_file import GAMES_FILE, StepFile
from medserl_agentloop.games.medical.records import MedicalRecord, Outcome
from medserl_agentloop.report import games, page

FEW, MANY = 100, 1000
TEXT = "word " * 2000  # as long as a turn's reasoning


def record(number: int) -> MedicalRecord:
    outcome, changes = list(Outcome)[number % len(Outcome)], {"profile": "medserl", "scheme": "medserl"}
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
@pytest.mark.parametrize("command", ["show", "report", "compare", "resume"])
def test_ten_times_the_games_take_little_more_memory(runs: list[Path], tmp_path: Path, command: str) -> None:
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
    assert peaks[2] < 1.5 * peaks[1], peaks


@pytest.mark.parametrize("mixed", [False, True])
def test_frames_made_in_parts_are_those_made_at_once(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mixed: bool
) -> None:
    lines = (runs[0] / GAMES_FILE).read_bytes().splitlines(keepends=True)
    if mixed:  # files of several runs put together
        random.Random(0).shuffle(lines)
    (tmp_path / GAMES_FILE).write_bytes(b"".join(lines))
    in_parts = games(tmp_path)
    monkeypatch.setattr(report, "PART", 10**9)
    pd.testing.assert_frame_equal(in_parts, games(tmp_path), check_like=True)
