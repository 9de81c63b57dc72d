"""Pushes a LoRA adapter for each role, or full weights without CUDA, into verl's SGLang server.

verl 0.9.1 serves one adapter to every request. Here each request names its adapter, or gets the
base model.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save_file
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer
from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter as SGLangServerAdapter

from medserl_agentloop.backends.cpu_rollout import adapter_states, full_weights, lora_config
from medserl_agentloop.backends.engines import write_adapter
from medserl_agentloop.core.config import ROLE_ADAPTERS

GRACE_S = 0.3  # for a batch in flight, which takes milliseconds


class _ByAdapter:
    """SGLang's tokenizer manager, for requests whose sampling parameters may name an adapter."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def generate_request(self, request: Any, http_request: Any = None) -> AsyncIterator[Any]:
        # verl puts the name of its only adapter there.
        request.lora_path = request.sampling_params.pop("adapter", None)
        answers: AsyncIterator[Any] = self._manager.generate_request(request, http_request)
        return answers


class AdapterServer(SGLangHttpServer):  # type: ignore[misc]  # verl is untyped
    """verl's SGLang server; ``sampling_params["adapter"]`` chooses one if it serves adapters."""

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        await super().launch_server(*args, **kwargs)
        if self.lora_as_adapter and self.node_rank == 0:
            self.tokenizer_manager: Any = _ByAdapter(self.tokenizer_manager)

    async def sleep(self) -> None:
        """Do as verl does, after a short wait.

        SGLang's scheduler asserts that it is idle before it gives memory back
        (release_memory_occupation in srt/managers/scheduler_update_weights_mixin.py), and dies if
        not. With its overlap scheduler, the last batch may still be running after the last answer
        (is_fully_idle in srt/managers/scheduler.py), and verl asks immediately.
        """
        if self.config.free_cache_engine:
            await asyncio.sleep(GRACE_S)
        await super().sleep()


class ServerAdapter(SGLangServerAdapter):  # type: ignore[misc]
    """verl's connection to its SGLang server on the same node, which also pushes adapters."""

    async def update_weights(self, weights: Any, *args: Any, **kwargs: Any) -> None:
        """Push the weights as verl does, or replace the adapters named in ``peft_config``."""
        config = kwargs.get("peft_config") or {}
        if ROLE_ADAPTERS not in config:
            await super().update_weights(weights, *args, **kwargs)
            return
        await self._init_server_adapter()
        states = adapter_states(weights)  # on every rank: a tensor may have to be gathered
        if self._engine is None:  # another rank of this replica speaks to the server
            return
        for name, state in states.items():
            await self._push_adapter(name, state, config)
        await self._engine.flush_cache()
        await self._tell_step(kwargs.get("global_steps"))

    async def _push_adapter(self, name: str, state: Any, config: Any) -> None:
        served = await self._engine.available_models()
        if name in (model["id"] for model in served["data"]):
            await self._ask("unload_lora_adapter", {"lora_name": name})
        with TemporaryDirectory() as folder:
            write_adapter(Path(folder), state, lora_config(config))
            await self._ask("load_lora_adapter", {"lora_name": name, "lora_path": folder})

    async def _ask(self, endpoint: str, request: dict[str, Any]) -> None:
        answer = await self._engine._make_async_request(endpoint, request)
        if not answer.get("success"):
            raise RuntimeError(f"the SGLang server refused the last step's weights: {answer}")

    async def _tell_step(self, step: int | None) -> None:
        if step is not None:
            await self.server_actor.set_global_steps.remote(step)


class CpuServerAdapter(ServerAdapter):
    """The same, but full weights go through a file, because verl sends handles of CUDA memory."""

    async def update_weights(
        self, weights: Any, *args: Any, global_steps: int | None = None, **kwargs: Any
    ) -> None:
        """Load ``weights`` into this rank's server and empty its prefix cache."""
        if ROLE_ADAPTERS in (kwargs.get("peft_config") or {}):
            await super().update_weights(weights, global_steps=global_steps, **kwargs)
            return
        await self._init_server_adapter()
        state = full_weights(weights, **kwargs)
        if self._engine is None:  # another rank of this replica speaks to the server
            return
        with TemporaryDirectory() as folder:
            save_file(state, Path(folder) / "model.safetensors")
            # The server was started with verl's load_format, "dummy", which would draw random
            # weights. Its prefix cache holds keys and values of the old policy: a chat template's
            # few tokens are enough to spoil the next step.
            request = {"model_path": folder, "load_format": "auto", "flush_cache": True}
            await self._ask("update_weights_from_disk", request)
        await self._tell_step(global_steps)
