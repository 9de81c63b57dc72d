"""The wait for a run's games, with a check of the run while it waits.

The base recipe names it in ``trainer.v1.sampler.custom_sampler``; the trainer sets what is checked (``core.liveness``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

POLL_INTERVAL_S = 0.1
"""verl's own buffer looks at its queue every 2 s, which is most of a tiny model's step."""

CHECK_INTERVAL_S = 5.0


class SelfPlayReplayBuffer(ReplayBuffer):  # type: ignore[misc]  # verl is untyped
    """verl's replay buffer of synchronous training, with a check of the run while it waits for games.

    verl does not tell custom samplers about ``algorithm.filter_groups`` and
    ``trainer.v1.sampler.sync_refill_failed_groups`` (trainer_base.py, _build_replay_buffer), so neither has an effect
    with this buffer. ``check``, which the trainer sets, is called at most every 5 s; it raises to end the run.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, poll_interval=POLL_INTERVAL_S)
        self.check: Callable[[], None] = lambda: None
        self._next_check = 0.0

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        if time.monotonic() >= self._next_check:
            self.check()
            self._next_check = time.monotonic() + CHECK_INTERVAL_S
        result: float = super()._wait_for_next_poll(partition_id, last_debug_time)
        return result


class SelfPlayReplayBufferAsync(SelfPlayReplayBuffer, ReplayBufferAsync):  # type: ignore[misc]
    """The same for asynchronous training."""
