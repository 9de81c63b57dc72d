"""Pushes the trained weights into verl's SGLang server where there is no CUDA.

verl's own adapter sends handles of CUDA memory, and sglang/srt/utils/patch_torch.py cannot make one of a CPU
tensor. A file in shared memory takes their place; everything else is verl's adapter.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from medserl_agentloop.backends import sglang_adapters
from medserl_agentloop.backends.cpu_rollout import NamedWeights, full_weights
from medserl_agentloop.core.config import ROLE_ADAPTERS


class ServerAdapter(sglang_adapters.ServerAdapter):
    """The same with a push of whole weights through a file. Trainer and server share a node."""

    async def update_weights(
        self,
        weights: NamedWeights,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **kwargs: Any,
    ) -> None:
        """Load ``weights`` into this rank's server and empty its prefix cache.

        Raises:
            ValueError: The weights come in another wire format than named tensors, or as a LoRA adapter.
            RuntimeError: The server could not load them; repeats what it said.
        """
        if ROLE_ADAPTERS in (kwargs.get("peft_config") or {}):
            await super().update_weights(weights, global_steps=global_steps, **kwargs)
            return
        await self._init_server_adapter()
        state = full_weights(self.config.name, weights, wire_format, **kwargs)
        if self._engine is None:  # another rank of this replica speaks to the server
            return
        with tempfile.TemporaryDirectory(
            dir=sglang_adapters.place_for(sum(tensor.nbytes for tensor in state.values()))
        ) as folder:
            save_file(state, Path(folder) / "model.safetensors")
            await self._load(folder)
        if global_steps is not None:
            await self.server_actor.set_global_steps.remote(global_steps)

    async def _load(self, folder: str, *, flush_cache: bool = True) -> None:
        """Have the server load the weights in ``folder``, and drop its prefix cache.

        The cache holds keys and values of the old policy: the few tokens of a chat template that all prompts share
        are enough to spoil the next step.
        """
        # load_format: the server was started with verl's default, "dummy", which would draw random weights.
        request = {"model_path": folder, "load_format": "auto", "flush_cache": flush_cache}
        await self._ask("update_weights_from_disk", request)
