"""A real run that watches itself: it stops where it is told to, with nothing of the step lost."""

import json
import re
from pathlib import Path

import pytest
from test_main_ppo import Run, data

from medserl_agentloop.training.step_file import METRICS_FILE, StepFile

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
__all__ = ["data"]  # a fixture


def test_a_run_with_an_alarm_stops_after_the_step_is_saved_and_logged(
    data: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = Run(
        tmp_path,
        *data,
        "trainer.total_training_steps=3",
        "trainer.logger=[console,wandb]",
        "selfplay.on_alarm=stop",
        "selfplay.alarms.patience=1",
        "selfplay.alarms.probs_diff=1e-12",  # float32 noise is above it
        "selfplay.alarms.no_signal=null",
    )
    assert run.process.wait(timeout=400) != 0
    log = run.log.read_text()
    assert "HealthError: stopped after step 1 (selfplay.on_alarm=stop). rollout_mismatch: training/rollout" in log
    assert "start the same command with selfplay.on_alarm=warn" in re.sub(r"\s+", " ", log)
    assert sum(line.startswith("alarm rollout_mismatch: ") for line in run.lines()) == 1

    (step,) = StepFile(tmp_path / "run" / METRICS_FILE).read()
    assert step["selfplay/alarm/rollout_mismatch"] == 1.0
    assert step["selfplay/lost_rate"] == 0.0
    assert (tmp_path / "run" / "global_step_1" / "actor").is_dir()
    (path,) = tmp_path.glob("wandb/offline-run-*/files/media/table/selfplay/games_table_*.json")
    assert len(json.loads(path.read_text())["data"]) == 8
