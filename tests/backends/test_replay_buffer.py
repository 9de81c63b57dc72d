"""The fast replay buffers satisfy verl's contract for custom samplers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from medserl_agentloop.backends.replay_buffer import FastReplayBuffer, FastReplayBufferAsync


def build_as_verl_does(trainer_mode: str, name: str) -> Any:
    """Call verl's own builder with the trainer reduced to what the builder reads."""
    sampler = {
        "max_off_policy_threshold": 8,
        "max_off_policy_strategy": "drop",
        "sampler_kwargs": {},
        "custom_sampler": {"path": "pkg://medserl_agentloop.backends.replay_buffer", "name": name},
    }
    config = OmegaConf.create({"trainer": {"v1": {"sampler": sampler}}})
    trainer = SimpleNamespace(config=config, trainer_mode=trainer_mode, _add_prompts_to_generate=lambda count: None)
    return PPOTrainer._build_replay_buffer(trainer)


@pytest.mark.parametrize(
    ("trainer_mode", "buffer_class", "stock_class"),
    [
        ("sync", FastReplayBuffer, ReplayBuffer),
        ("colocate_async", FastReplayBufferAsync, ReplayBufferAsync),
    ],
)
def test_verl_builds_the_buffer_and_it_polls_often(trainer_mode: str, buffer_class: type, stock_class: type) -> None:
    buffer = build_as_verl_does(trainer_mode, buffer_class.__name__)
    assert type(buffer) is buffer_class
    assert isinstance(buffer, stock_class)
    assert 0.05 <= buffer.poll_interval <= 0.1


@pytest.mark.parametrize(
    ("trainer_mode", "wrong", "right"),
    [
        ("colocate_async", "FastReplayBuffer", "FastReplayBufferAsync"),
        ("sync", "FastReplayBufferAsync", "FastReplayBuffer"),
    ],
)
def test_a_buffer_of_the_other_trainer_mode_is_refused(trainer_mode: str, wrong: str, right: str) -> None:
    with pytest.raises(ValueError, match=f"custom_sampler.name={right}$"):
        build_as_verl_does(trainer_mode, wrong)
