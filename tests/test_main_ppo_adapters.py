"""A real run with a LoRA adapter for each role, killed and resumed with one of the roles alone."""

from pathlib import Path

import pytest
import torch
from real_runs import AGREEMENT, GAMES_PER_STEP, Run
from safetensors.torch import load_file

from medserl_agentloop.backends.role_adapters import ADAPTERS_FOLDER

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

ADAPTERS = (
    "selfplay.adapters=per_role",
    "actor_rollout_ref.actor.use_kl_loss=True",  # verl's reference pass switches the adapters off and on
    *(f"actor_rollout_ref.model.{of}" for of in ("lora_rank=4", "lora_alpha=8", "target_modules=all-linear")),
)


def adapter(run: Run, step: int, role: str) -> dict[str, torch.Tensor]:
    folder = run.folder / "run" / f"global_step_{step}" / "actor" / ADAPTERS_FOLDER / role
    return load_file(folder / "adapter_model.safetensors")


def test_adapters_reach_the_rollout_in_every_step_and_an_untrained_one_stays_as_it_was(
    tmp_path: Path, data: tuple[str, ...]
) -> None:
    first = Run(tmp_path, *data, *ADAPTERS, "trainer.total_training_steps=50")
    try:
        first.wait_for_checkpoint(1)
    finally:
        first.kill()
    reached = first.reached
    second = Run(tmp_path, *data, *ADAPTERS, "selfplay.train=attacker", f"trainer.total_training_steps={reached + 1}")
    second.wait()

    assert any("certificate: isolation of actor" in line and "holds" in line for line in first.lines())
    steps = range(1, reached + 2)
    assert second.steps_of_games() == dict.fromkeys(steps, GAMES_PER_STEP)
    assert [step["step"] for step in second.metrics] == list(steps)
    for step in second.metrics:
        assert step["training/rollout_probs_diff_max"] < AGREEMENT
        assert step["actor/grad_norm"] > 0
    before, after = ({role: adapter(second, step, role) for role in ("attacker", "assessor")} for step in steps[-2:])
    assert all(torch.equal(tensor, after["assessor"][name]) for name, tensor in before["assessor"].items())
    assert any(tensor.abs().max() > 0 for name, tensor in before["assessor"].items() if "lora_B" in name)
    assert not all(torch.equal(tensor, after["attacker"][name]) for name, tensor in before["attacker"].items())
