"""Can this run's SGLang start on the CPU, give every turn its tokens, and look for the game's stop strings?

The plugin asks before Ray starts, for the recipes that run on the CPU; the trainer asks about the stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from omegaconf import DictConfig

from medserl_agentloop.backends import sglang_cpu
from medserl_agentloop.core.config import ConfigError, SelfPlayConfig

RESERVED = 2
"""Positions of the context that SGLang never fills (max_req_len in sglang/srt/managers/tp_worker.py)."""


def check_run(config: DictConfig) -> None:
    """Refuse a run of a CPU recipe whose SGLang could not start, or would cut turns short in silence."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "sglang":
        return
    if torch.cuda.is_available():
        raise ConfigError(
            "this recipe runs SGLang on the CPU, and there is a GPU, for which verl has an SGLang rollout of its "
            "own. Take a recipe without trainer.device=cpu, such as qwen3_4b, or hide the GPU with "
            "CUDA_VISIBLE_DEVICES=-1 in front of the command."
        )
    if not sglang_cpu.is_installed():
        raise ConfigError(
            "actor_rollout_ref.rollout.name=sglang, and SGLang is not installed here. Run `make sglang-env` and use "
            ".venv-sglang/bin/python, or: pip install --no-deps --requirement constraints-sglang.txt"
        )
    needed = longest_context(config) + RESERVED
    for key, limit in (
        ("max_model_len", rollout.max_model_len),
        ("engine_kwargs.sglang.max_total_tokens", rollout.engine_kwargs.sglang.get("max_total_tokens")),
    ):
        # The engine lowers a request's budget to what is left of either, and reports an ordinary "length".
        if limit is not None and limit < needed:
            raise ConfigError(
                f"a turn may need {needed} tokens with its prompt, and actor_rollout_ref.rollout.{key}={limit}: "
                f"SGLang would cut it without a word. Set it to at least {needed}, or lower "
                "data.max_prompt_length, data.max_response_length or the game's token budget (selfplay.budget)."
            )


def longest_context(config: DictConfig) -> int:
    """Most tokens that a prompt and its turn may have together, whatever the notes are."""
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    selfplay = SelfPlayConfig.from_run(config)
    if selfplay.context == "shared":
        return int(prompt + response)
    # verl counts all prompts but the first as response.
    return int(max(prompt + min(selfplay.longest_turn(prompt) or response, response), response))


def check_stop_strings(strings: Sequence[str], rollout: Any) -> None:
    """Refuse stop strings, of more than one token each, that the engine of verl's rollout node could not look for."""
    if strings and rollout.name == "sglang" and rollout.get("skip_tokenizer_init", False):
        raise ConfigError(
            f"the profile's stop strings {', '.join(map(repr, strings))} are more than one token each, and SGLang "
            "looks for such strings only with actor_rollout_ref.rollout.skip_tokenizer_init=False. Set that, or "
            "take them out of profile.yaml."
        )
