"""A real run with an adapter for each role, without a judge: it invents nothing, and stops where it
is told to.
"""

import json
import re

import pytest
from fastapi import FastAPI
from real_runs import ADAPTERS, AGREEMENT, CERTIFIED, GAMES_PER_STEP, Run
from serving import serving

from medserl_agentloop.core.step_file import GAMES_FILE
from medserl_agentloop.games.medical.records import JUDGE_FAILED, read_games

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def run(data: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Run:
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        serving(FastAPI()) as judge,
    ):  # which knows no question
        monkeypatch.setenv("WANDB_MODE", "offline")
        run = Run(
            tmp_path_factory.mktemp("health"),
            *data,
            *ADAPTERS,
            "selfplay.judge=http",
            f"selfplay.judge_server.url={judge}",
            "selfplay.judge_server.retries=0",
            "trainer.total_training_steps=4",
            "trainer.logger=[console,wandb]",
            "selfplay.on_alarm=stop",
            "selfplay.alarms.patience=2",
            "selfplay.alarms.limits.rollout_mismatch=1e-12",  # float32 noise is above it
            "selfplay.alarms.limits={attacker_no_signal: null, void_games: null}",
        )
        run.wait_for_end()
    return run


def test_a_run_whose_judge_is_down_goes_on_and_invents_nothing(run: Run) -> None:
    assert "Error in _run_prompt" not in run.train_log.read_text()
    games = list(read_games(run.folder / "run" / GAMES_FILE))
    assert len(games) == 2 * GAMES_PER_STEP
    asked = [g for g in games if g.attack is not None and g.attack.invalid is None]
    assert asked
    assert all(
        g.void is not None and g.void.startswith(JUDGE_FAILED) and not g.rewards for g in asked
    )
    assert all(g.void is None for g in games if g not in asked)
    assert any("the judge does not answer" in line for line in run.lines())
    for step in run.metrics:
        assert step["selfplay/judge/failure_rate"] == 1.0


def test_adapters_reach_the_rollout_in_every_step(run: Run) -> None:
    assert any(CERTIFIED in line and "holds" in line for line in run.lines())
    for step in run.metrics:
        assert step["training/rollout_probs_diff_max"] < AGREEMENT
        assert step["actor/grad_norm"] > 0


def test_a_run_with_an_alarm_stops_after_the_step_is_saved_and_logged(run: Run) -> None:
    assert run.process.returncode != 0
    log = run.log.read_text()
    assert "Traceback (most recent call last)" in log and "ray init kwargs" not in log
    assert "ray init kwargs" in run.train_log.read_text()
    assert (
        "HealthError: stopped after step 2 (selfplay.on_alarm=stop). rollout_mismatch: "
        "training/rollout" in log
    )
    assert "start the same command with selfplay.on_alarm=warn" in re.sub(r"\s+", " ", log)
    assert sum(line.startswith("alarm rollout_mismatch: ") for line in run.lines()) == 1

    first, second = run.metrics
    assert (
        "selfplay/alarm/rollout_mismatch" not in first
        and second["selfplay/alarm/rollout_mismatch"] == 1.0
    )
    assert second["selfplay/lost_rate"] == 0.0
    assert (run.folder / "run" / "global_step_2" / "actor").is_dir()
    tables = list(
        run.folder.glob("run/wandb/offline-run-*/files/media/table/selfplay/games_table_*.json")
    )
    assert [len(json.loads(table.read_text())["data"]) for table in tables] == [8, 8]
