"""Real runs of every estimator and mode, of a resumed one with state, and of one without a judge."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_main_ppo import GAMES_PER_STEP, Run, data

from medserl_agentloop.game.records import JUDGE_FAILED
from medserl_agentloop.game.types import Role
from medserl_agentloop.training.run_state import STATE_FILE
from medserl_agentloop.training.step_file import GAMES_FILE, read_games

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["data"]  # a fixture

NO_CHECKPOINT = "trainer.save_freq=-1"
REFERENCE_POLICY = ("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.0")


# role_reinforce_pp and role_grpo run in test_main_ppo.py, role_rae below.
@pytest.mark.parametrize(
    ("estimator", "trained", "overrides"),
    [
        ("role_rloo", {Role.ATTACKER}, ("selfplay.anchor.assessor=0.1", *REFERENCE_POLICY)),
        ("role_gae", {Role.ATTACKER, Role.ASSESSOR}, ("algorithm.lam=0.95", "algorithm.use_kl_in_reward=True")),
    ],
)
def test_an_estimator_trains_three_steps(
    tmp_path: Path, data: tuple[str, ...], estimator: str, trained: set[Role], overrides: tuple[str, ...]
) -> None:
    mode = "both" if len(trained) == 2 else next(iter(trained)).value
    run = Run(
        tmp_path,
        *data,
        f"algorithm.adv_estimator={estimator}",
        f"selfplay.train={mode}",
        "trainer.total_training_steps=3",
        NO_CHECKPOINT,
        *overrides,
    )
    run.wait()
    steps = run.metrics
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 1e-5
        for role in Role:
            assert (step[f"selfplay/{role.value}/trained_tokens"] > 0) == (role in trained)
    assert max(step["actor/grad_norm"] for step in steps) > 0
    if estimator == "role_gae":
        assert all(step["critic/grad_norm"] > 0 for step in steps)
    else:  # from the second step on the policy differs from the reference
        assert steps[-1]["actor/anchor_kl_loss"] > 0


def test_baselines_and_alarms_of_a_killed_run_go_on_as_in_one_that_was_never_killed(
    tmp_path: Path, data: tuple[str, ...]
) -> None:
    states: dict[str, Any] = {}
    baselines: dict[str, list[dict[str, float]]] = {}
    for name in ("whole", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        overrides = (*data, "algorithm.adv_estimator=role_rae", "trainer.total_training_steps=6")
        run = Run(folder, *overrides)
        if name == "killed":
            run.kill_after_step(3)
            run = Run(folder, *overrides)
        run.wait()
        states[name] = json.loads((folder / "run" / "global_step_6" / STATE_FILE).read_text())
        baselines[name] = [{k: v for k, v in step.items() if "/baseline/" in k} for step in run.metrics]
    assert [len(step) > 0 for step in baselines["whole"]] == [True] * 6
    for whole, killed in zip(baselines["whole"], baselines["killed"], strict=True):
        assert killed == pytest.approx(whole, abs=1e-6)
    for role in Role:
        expected = states["whole"]["baselines"][role.value]
        assert states["killed"]["baselines"][role.value] == pytest.approx(expected, abs=1e-6)
    assert states["killed"]["alarms"]["streaks"] == states["whole"]["alarms"]["streaks"]


def test_a_run_whose_judge_is_down_goes_on_and_invents_nothing(tmp_path: Path, data: tuple[str, ...]) -> None:
    """With only the attacker trained, every game that could be trained on is void."""
    run = Run(
        tmp_path,
        *data,
        "selfplay.judge=http",
        "selfplay.judge_server.url=http://127.0.0.1:9",
        "selfplay.judge_server.retries=0",
        "selfplay.train=attacker",
        "trainer.total_training_steps=2",
        NO_CHECKPOINT,
    )
    run.wait()
    games = list(read_games(tmp_path / "run" / GAMES_FILE))
    assert len(games) == 2 * GAMES_PER_STEP
    asked = [g for g in games if g.attack is not None and g.attack.invalid is None]
    assert asked
    assert all(g.void is not None and g.void.startswith(JUDGE_FAILED) and not g.rewards for g in asked)
    assert all(g.void is None for g in games if g not in asked)
    assert any("the judge's server does not answer" in line for line in run.lines())
    for step in run.metrics:
        assert step["selfplay/judge/failure_rate"] == 1.0
