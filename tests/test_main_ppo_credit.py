"""A real run with a critic. Of the other estimators role_rae and role_grpo run in test_main_ppo.py, role_rloo in
test_main_ppo_certificate.py and role_reinforce_pp in the remaining ones."""

from pathlib import Path

import pytest
from real_runs import NO_CHECKPOINT, Run

from medserl_agentloop.games.medical.types import Role

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_role_gae_trains_both_roles_and_the_critic(tmp_path: Path, data: tuple[str, ...]) -> None:
    run = Run(
        tmp_path,
        *data,
        "algorithm.adv_estimator=role_gae",
        "algorithm.lam=0.95",
        "algorithm.use_kl_in_reward=True",
        "trainer.total_training_steps=2",
        NO_CHECKPOINT,
    )
    run.wait()
    steps = run.metrics
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 1e-5
        assert all(step[f"selfplay/{role.value}/trained_tokens"] > 0 for role in Role)
        assert step["critic/grad_norm"] > 0
    assert max(step["actor/grad_norm"] for step in steps) > 0
