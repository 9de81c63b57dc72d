"""verl's replay buffers with a short poll; verl's trainer builds one where a recipe names it.

Set ``trainer.v1.sampler.custom_sampler.path=pkg://medserl_agentloop.backends.replay_buffer`` and
``.name=FastReplayBuffer``. The stock buffer looks every 2 s, which is most of a tiny model's step.
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

POLL_INTERVAL_S = 0.1


class FastReplayBuffer(ReplayBuffer):  # type: ignore[misc]
    """ReplayBuffer that polls every 0.1 s, for ``trainer_mode`` "sync".

    verl does not tell custom samplers about ``algorithm.filter_groups`` and
    ``trainer.v1.sampler.sync_refill_failed_groups`` (trainer_base.py, _build_replay_buffer), so neither
    has an effect with this buffer.

    Args:
        poll_interval: seconds between two looks at the queue.
        kwargs: what verl gives every custom sampler.
    """

    def __init__(self, *, poll_interval: float = POLL_INTERVAL_S, **kwargs: Any) -> None:
        mode = kwargs["trainer_mode"]
        if mode != "sync":
            raise ValueError(
                f"FastReplayBuffer samples for trainer mode 'sync', and this run's mode is {mode!r}: "
                "set trainer.v1.sampler.custom_sampler.name=FastReplayBufferAsync"
            )
        super().__init__(poll_interval=poll_interval, **kwargs)


class FastReplayBufferAsync(ReplayBufferAsync):  # type: ignore[misc]
    """ReplayBufferAsync that polls every 0.1 s, for verl's asynchronous trainer modes.

    The remark on filters at FastReplayBuffer holds here too.
    """

    def __init__(self, *, poll_interval: float = POLL_INTERVAL_S, **kwargs: Any) -> None:
        mode = kwargs["trainer_mode"]
        if mode == "sync":
            raise ValueError(
                "FastReplayBufferAsync samples for the asynchronous trainer modes, and this run's mode is "
                "'sync': set trainer.v1.sampler.custom_sampler.name=FastReplayBuffer"
            )
        super().__init__(poll_interval=poll_interval, **kwargs)
