"""``medserl quickstart``: its data, and what it skips; the run itself is test_newcomer.py's."""

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from game.builders import paid
from invoking import invoke

from medserl_agentloop.core.step_file import CONFIG_FILE, GAMES_FILE, LATEST, StepFile
from medserl_agentloop.games.medical.records import Outcome
from medserl_agentloop.testing import compose_run
from medserl_agentloop.tools import quickstart


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "TRAIN_CASES", 40)
    return tmp_path


def test_the_data_are_those_that_the_recipe_names(folder: Path, capsys: Any) -> None:
    quickstart.write_data()
    data = compose_run("+recipes=quickstart").data
    assert Path(data.train_files).exists() and quickstart.NEW_GAMES.exists()
    new = pd.read_parquet(data.val_files)
    assert dict(new["data_source"].value_counts()) == {
        "toy_eval/vanilla_harmful": 100,
        "toy_eval/vanilla_benign": 100,
    }
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2
    before = Path(data.train_files).stat().st_mtime_ns
    quickstart.write_data()
    assert Path(data.train_files).stat().st_mtime_ns == before, "what is there is not made again"


def test_a_finished_run_is_not_trained_again_and_an_interrupted_one_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str]) -> Any:
        commands.append(command)
        return type("Done", (), {"returncode": 7})

    monkeypatch.setattr(quickstart.subprocess, "run", run)
    folder = Path("runs/quickstart")
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(json.dumps({"trainer": {"total_training_steps": 16}}))
    StepFile(folder / GAMES_FILE).append([paid(Outcome.MISSED_ERROR, step=16).to_json()])

    (folder / LATEST).write_text("12")
    assert invoke("quickstart").exit_code == 7, "the run's own exit code"
    assert commands[0][:3] == [sys.executable, "-m", "verl.trainer.main_ppo"]
    assert "trainer.default_local_dir=runs/quickstart" in commands[0]

    (folder / LATEST).write_text("16")
    done = invoke("quickstart")
    assert done.exit_code == 0 and len(commands) == 1
    assert (folder / "report.html").exists()
