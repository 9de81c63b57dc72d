"""The replay buffer that the recipes name: verl builds it, and it looks after the run while it waits."""

from types import SimpleNamespace
from typing import Any

import pytest
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from medserl_agentloop.core import trainer as core_trainer
from medserl_agentloop.core.trainer import SelfPlayReplayBuffer
from medserl_agentloop.testing.tiny import compose_run


def built_by_verl() -> Any:
    """What verl's own builder makes of a recipe, with the trainer reduced to what the builder reads."""
    trainer = SimpleNamespace(
        config=compose_run("+recipes=core"), trainer_mode="sync", _add_prompts_to_generate=lambda count: None
    )
    return PPOTrainer._build_replay_buffer(trainer)


def test_verl_builds_the_buffer_of_the_recipes_and_it_polls_often() -> None:
    buffer = built_by_verl()
    assert type(buffer) is SelfPlayReplayBuffer
    assert isinstance(buffer, ReplayBuffer)
    assert 0.05 <= buffer.poll_interval <= 0.1


def test_a_wait_for_games_ends_where_the_check_finds_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_trainer, "CHECK_INTERVAL_S", 0.25)
    buffer = built_by_verl()
    polls: list[str] = []
    monkeypatch.setattr(buffer, "_sync_metadata_from_transfer_queue", lambda: polls.append("poll"))  # no game ends
    findings = iter([None, RuntimeError("agent-loop worker 0 died")])

    def check() -> None:
        polls.append("check")
        if error := next(findings):
            raise error

    buffer.check = check
    with pytest.raises(RuntimeError, match="agent-loop worker 0 died"):
        buffer.sample(global_steps=1, partition_id="train", batch_size=1)
    assert polls[:2] == ["poll", "check"] and polls[-1] == "check"
    assert polls.count("poll") > polls.count("check") == 2
