"""A real run with a critic and a merged LoRA adapter, in the shared context.

Of the other estimators role_rae runs in test_main_ppo.py, role_grpo in test_main_ppo_waiting.py, role_rloo in
test_main_ppo_certificate.py and role_reinforce_pp in the remaining ones. The run is logged to W&B offline.
"""

from pathlib import Path

import pytest
from real_runs import AGREEMENT, GAMES_PER_STEP, NO_CHECKPOINT, Run

from medserl_agentloop.games.medical.types import Role

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


def test_role_gae_trains_both_roles_and_the_critic_in_the_shared_context(
    tmp_path: Path, data: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = Run(
        tmp_path,
        *data,
        "selfplay.context=shared",
        "algorithm.adv_estimator=role_gae",
        "algorithm.lam=0.95",
        "algorithm.use_kl_in_reward=True",
        *(f"actor_rollout_ref.model.{of}" for of in ("lora_rank=4", "target_modules=all-linear", "lora.merge=True")),
        "trainer.total_training_steps=2",
        "trainer.logger=[console,wandb]",
        NO_CHECKPOINT,
    )
    run.wait()
    assert "wandb sync" in run.log.read_text() and "Traceback" not in run.log.read_text()
    assert run.steps_of_games() == dict.fromkeys((1, 2), GAMES_PER_STEP)
    steps = run.metrics
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < AGREEMENT
        assert all(step[f"selfplay/{role.value}/trained_tokens"] > 0 for role in Role)
        assert step["critic/grad_norm"] > 0
    assert max(step["actor/grad_norm"] for step in steps) > 0
