"""Pushes the trained weights into the CPU rollout server.

verl builds one ServerAdapter in every training worker and calls ``update_weights`` after each step.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Iterable
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout

from medserl_agentloop.backends.cpu_rollout import server_name

NamedWeights = Iterable[tuple[str, torch.Tensor]] | AsyncIterable[tuple[str, torch.Tensor]]


class ServerAdapter(BaseRollout):  # type: ignore[misc]
    """Sends full tensors to the server of the same replica. One training rank feeds one server.

    Args:
        config: verl's rollout node.
        model_config: verl's model node.
        device_mesh: unused; a replica is one process.
        replica_rank: the server to feed; -1 means the server with this worker's rank.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """Host memory is not handed back between the phases of a step."""

    async def update_weights(
        self,
        weights: NamedWeights,
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Collect ``weights`` and load them into this rank's server.

        Raises:
            ValueError: The weights come in another wire format than named tensors, or as a LoRA adapter.
        """
        state = await full_weights(self.config.name, weights, wire_format, kwargs.get("peft_config"))
        server = ray.get_actor(server_name(self.replica_rank))
        await server.update_weights.remote(state, global_steps)


async def full_weights(
    rollout: str, weights: NamedWeights, wire_format: str, peft_config: Any
) -> dict[str, torch.Tensor]:
    """Gather what verl pushes as whole tensors in host memory, each with a storage of its own.

    Every training rank must do it: there is a collective inside the iterator (``full_tensor()``).

    Args:
        rollout: name of the rollout, for messages.

    Raises:
        ValueError: The weights come in another wire format than named tensors, or as a LoRA adapter.
    """
    if wire_format != "named_tensors":
        raise ValueError(
            f"rollout {rollout} got weights as {wire_format!r} and reads only 'named_tensors': "
            "set actor_rollout_ref.rollout.checkpoint_engine.backend=naive"
        )
    if peft_config is not None:
        raise ValueError(
            f"rollout {rollout} loads full weights and got a LoRA adapter: "
            "set actor_rollout_ref.model.lora.merge=True or train without LoRA"
        )
    state: dict[str, torch.Tensor] = {}
    # The clone cuts a tensor loose from a larger storage, which Ray would otherwise send along and which
    # safetensors refuses to write twice (tied weights).
    if isinstance(weights, AsyncIterable):
        async for name, tensor in weights:
            state[name] = tensor.detach().cpu().contiguous().clone()
    else:
        for name, tensor in weights:
            state[name] = tensor.detach().cpu().contiguous().clone()
    return state
