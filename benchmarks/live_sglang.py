"""verl's own SGLang server in the calling process, without Ray and without a trainer.

For tests and benchmarks that need the real engine under the agent loop. Takes the place of the
server client.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import psutil
from omegaconf import DictConfig, OmegaConf
from verl.workers.rollout.replica import RolloutMode, TokenOutput

from medserl_agentloop.backends import sglang_cpu

T = TypeVar("T")


class LiveSGLang:
    """A running server with the weights of the run's model. Close it when done.

    Everything asynchronous about it happens on a loop of its own, in a thread; :meth:`generate` may
    be awaited on any loop, as the server client's.

    Args:
        run: A composed run; its rollout and model nodes are what the server is built from.
    """

    def __init__(self, run: DictConfig) -> None:
        self._environment = dict(
            os.environ
        )  # verl and SGLang write to it, and other runs would inherit that
        os.environ[sglang_cpu.SWITCH] = "1"
        sglang_cpu.register()
        from medserl_agentloop.backends.sglang_adapters import AdapterServer

        run = run.copy()
        OmegaConf.resolve(run)
        rollout = run.actor_rollout_ref.rollout
        rollout.load_format = "auto"  # verl's default waits for a push
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.server = AdapterServer(
            config=rollout,
            model_config=run.actor_rollout_ref.model,
            rollout_mode=RolloutMode.STANDALONE,
            workers=[],
            replica_rank=0,
            node_rank=0,
            nnodes=1,
            cuda_visible_devices="",
            base_gpu_id=0,
        )
        self.call(self.server.launch_server())
        self._meta: dict[str, dict[str, Any]] = {}
        self._generate_request = self.server.tokenizer_manager.generate_request
        self.server.tokenizer_manager.generate_request = self._noting_meta_info

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any],
        **kwargs: Any,
    ) -> TokenOutput:
        """As verl's server client, with the engine's ``cached_tokens`` and ``prompt_tokens`` in
        ``extra_fields``.
        """
        work = self.server.generate(list(prompt_ids), dict(sampling_params), request_id, **kwargs)
        output = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        meta = self._meta.pop(request_id, {})
        output.extra_fields.update(
            {name: meta.get(name) for name in ("cached_tokens", "prompt_tokens")}
        )
        return output

    async def _noting_meta_info(self, request: Any, http_request: Any = None) -> Any:
        # verl's generate() drops what the engine says about a request.
        async for answer in self._generate_request(request, http_request):
            self._meta[request.rid] = answer["meta_info"]
            yield answer

    def empty_prefix_cache(self) -> None:
        """Forget all prompts seen so far."""
        self.call(self.server.clear_kv_cache())

    def abort_all(self) -> None:
        """Abort what is being generated, as verl does, and be ready for more."""
        self.call(self.server.abort_all_requests())
        self.call(self.server.resume_generation())

    def close(self) -> None:
        """End the engine's processes. Call it from the main thread."""
        # SGLang's watchdog, which verl keeps no handle of, would end this process too.
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        for child in psutil.Process().children(recursive=True):
            if child.name().startswith("sglang::"):
                child.kill()
        manager = self.server.tokenizer_manager
        for connection in (manager.send_to_scheduler, manager.recv_from_detokenizer):
            # A message that the dead engine never took would keep zmq, and so this process, from
            # ending.
            self._loop.call_soon_threadsafe(setattr, connection, "linger", 0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        os.environ.clear()
        os.environ.update(self._environment)
