"""Real runs of verl's own entry point: one that is killed and resumed, and one that is not."""

import json
from pathlib import Path
from typing import Any

import pytest
from real_runs import AGREEMENT, GAMES_PER_STEP, Run

from medserl_agentloop.core.step_file import GAMES_FILE, STATE_FILE
from medserl_agentloop.games.medical.records import read_games
from medserl_agentloop.games.medical.types import Role

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KILLED_AFTER, LAST = 2, 4


def test_a_killed_run_goes_on_as_one_that_was_never_killed_and_holds_every_step_once(
    tmp_path: Path, data: tuple[str, ...]
) -> None:
    overrides = (*data, "algorithm.adv_estimator=role_rae", f"trainer.total_training_steps={LAST}")
    folders = {name: tmp_path / name for name in ("whole", "killed")}
    for folder in folders.values():
        folder.mkdir()
    whole = Run(folders["whole"], *overrides)
    whole.copy_after_step(KILLED_AFTER, folders["killed"])
    whole.wait()

    with (folders["killed"] / "run" / GAMES_FILE).open("a") as games:  # a kill between writing games and checkpointing
        games.write(json.dumps({"step": LAST + 1}) + "\n" + '{"step": ')
    killed = Run(folders["killed"], *overrides)
    reached = killed.reached
    killed.wait()

    assert KILLED_AFTER <= reached < LAST
    assert any(line.startswith(f"resuming after step {reached} of {LAST}: ") for line in killed.lines())
    assert any("plays all of its 288 rows" in line for line in killed.lines())
    assert sum(line.startswith("judge labels: nobody reads") for line in killed.lines()) == 1
    for run in (whole, killed):
        assert run.steps_of_games() == dict.fromkeys(range(1, LAST + 1), GAMES_PER_STEP)
        assert [m["step"] for m in run.metrics] == list(range(1, LAST + 1))
        for step in run.metrics:
            assert step["actor/grad_norm"] > 0
            assert step["training/rollout_probs_diff_max"] < AGREEMENT
            assert step["selfplay/assessor/parse_rate"] >= 0.5
            assert step["selfplay/judge/unread_rate"] > 0.5
    rewards: dict[Role, set[float | None]] = {
        role: {g.reward(role) for g in read_games(folders["killed"] / "run" / GAMES_FILE)} for role in Role
    }
    assert all(len(values - {None}) > 1 for values in rewards.values())

    baselines = [
        [{k: v for k, v in step.items() if "/baseline/" in k} for step in run.metrics] for run in (whole, killed)
    ]
    for of_whole, of_killed in zip(*baselines, strict=True):
        assert of_whole and of_killed == pytest.approx(of_whole, abs=1e-6)
    states: dict[str, Any] = {
        name: json.loads((folder / "run" / f"global_step_{LAST}" / STATE_FILE).read_text())
        for name, folder in folders.items()
    }
    for role in Role:
        expected = states["whole"]["baselines"][role.value]
        assert states["killed"]["baselines"][role.value] == pytest.approx(expected, abs=1e-6)
    assert states["killed"]["alarms"]["streaks"] == states["whole"]["alarms"]["streaks"]
