"""Which engine can look for which stop strings. Called by the trainer when the data is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from medserl_agentloop.core.config import ConfigError


def check_stop_strings(strings: Sequence[str], rollout: Any) -> None:
    """Refuse stop strings that the run's engine could not look for.

    Args:
        strings: Stop strings of the profile that are more than one token each.
        rollout: verl's rollout node.

    Raises:
        ConfigError: Names them and what to set.
    """
    if strings and rollout.name == "sglang" and rollout.get("skip_tokenizer_init", False):
        raise ConfigError(
            f"the profile's stop strings {', '.join(map(repr, strings))} are more than one token each, and SGLang "
            "looks for such strings only with actor_rollout_ref.rollout.skip_tokenizer_init=False. Set that, or "
            "take them out of profile.yaml."
        )
