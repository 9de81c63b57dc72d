"""A run with an adapter for each role: a killed worker ends it, and it is resumed."""

import re
from pathlib import Path

import psutil
import pytest
import torch
from real_runs import ADAPTERS, AGREEMENT, CERTIFIED, GAMES_PER_STEP, Run
from safetensors.torch import load_file

from medserl_agentloop.core.config import ADAPTERS_FOLDER
from medserl_agentloop.core.step_file import GAMES_FILE
from medserl_agentloop.games.medical.case import Role
from medserl_agentloop.games.medical.records import read_games

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


def kill(run: Run, ray_class: str) -> int:
    """SIGKILL to the run's only process of a Ray class; returns its pid."""
    processes = psutil.Process(run.process.pid).children(recursive=True)
    [victim] = [process for process in processes if process.name().startswith(f"ray::{ray_class}")]
    victim.kill()
    return victim.pid


def adapter(run: Run, step: int, role: str) -> dict[str, torch.Tensor]:
    folder = run.folder / "run" / f"global_step_{step}" / "actor" / ADAPTERS_FOLDER / role
    return load_file(folder / "adapter_model.safetensors")


def test_a_run_with_adapters_survives_a_killed_worker(
    tmp_path: Path, data: tuple[str, ...]
) -> None:
    first = Run(tmp_path, *data, *ADAPTERS, "trainer.total_training_steps=50")
    try:
        first.wait_for_checkpoint(2)
        pid = kill(first, "AgentLoopWorkerTQ")
        assert first.wait_for_end() > 0
    finally:
        first.kill()
    [line] = {line for line in first.lines() if " died " in line}
    worker = rf"class AgentLoopWorkerTQ, named agent_loop_worker_0\w*, pid {pid}"
    assert re.match(rf"agent-loop worker 0 died \({worker}.*\) in step \d+", line)
    reached = first.reached
    last = reached + 2
    # or the checkpoint that it resumes from would be removed
    resumed = (f"trainer.total_training_steps={last}", "trainer.max_actor_ckpt_to_keep=10")
    second = Run(tmp_path, *data, *ADAPTERS, *resumed)
    second.wait()

    assert any(CERTIFIED in line and "holds" in line for line in first.lines())
    assert not any(
        line.startswith("alarm rollout_mismatch") for run in (first, second) for line in run.lines()
    )
    steps = range(1, last + 1)
    assert [step["step"] for step in second.metrics] == list(steps)
    assert second.steps_of_games() == dict.fromkeys(steps, GAMES_PER_STEP)
    games = list(read_games(tmp_path / "run" / GAMES_FILE))
    assert len({(game.uid, game.session) for game in games}) == len(games)
    assert all(game.void is None and game.policy_version == game.step - 1 for game in games)
    assert {game.attack is None for game in games} == {True, False}

    # Where the rewards of a step are equal, all advantages are 0, and so is the gradient.
    learned = [
        step
        for step in second.metrics
        if any(f"selfplay/{role}/signal_share" in step for role in Role)
    ]
    assert learned and all(step["actor/grad_norm"] > 0 for step in learned)
    assert all(step["training/rollout_probs_diff_max"] < AGREEMENT for step in second.metrics)
    before, after = (
        {role: adapter(second, at, role) for role in ("attacker", "assessor")}
        for at in (reached, last)
    )
    for role, tensors in before.items():
        assert any(tensor.abs().max() > 0 for name, tensor in tensors.items() if "lora_B" in name)
        assert not all(torch.equal(tensor, after[role][name]) for name, tensor in tensors.items())
