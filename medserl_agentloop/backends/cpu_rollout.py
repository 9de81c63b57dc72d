"""Token-in token-out sampling on Transformers, for runs without an accelerator.

verl starts one CpuRolloutReplica per training rank; its server is a named Ray actor that
LLMServerClient asks to ``generate``. The training worker's ServerAdapter pushes the weights into it
after each step.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import ray
import torch
from transformers import AutoModelForCausalLM
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput
from verl.workers.rollout.utils import get_max_position_embeddings

from medserl_agentloop.backends import cpu_sampling
from medserl_agentloop.backends.role_adapters import adapter_states, with_adapters
from medserl_agentloop.core.config import ROLE_ADAPTERS
from medserl_agentloop.core.encoding import end_ids

logger = logging.getLogger(__name__)

NamedWeights = Iterable[tuple[str, torch.Tensor]]

# How long the first request of a batch waits for the others that verl's agent loops send at the
# same time.
GATHER_S = 0.01


def server_name(replica_rank: int) -> str:
    return f"cpu_hf_server_{replica_rank}"


Asked = tuple[cpu_sampling.SamplingRequest, asyncio.Future[TokenOutput]]


class CpuRolloutServer:
    """The server's methods, by the names verl calls them. Runs as a Ray actor; a plain object in
    tests.

    A request's random numbers depend on ``rollout.seed``, the replica, the weights' step, its name
    and prompt, and how often these have come, not on when it comes and which requests it shares a
    batch with: games race each other, and a run shall repeat itself all the same. With
    ``rollout.full_determinism`` the names of a run repeat, too.
    """

    def __init__(self, config: Any, model_config: Any, replica_rank: int = 0) -> None:
        self.config: RolloutConfig = omega_conf_to_dataclass(config)
        model_config = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        hf_config = model_config.hf_config
        longest = get_max_position_embeddings(hf_config)
        self.context_length = min(
            longest, self.config.max_model_len or longest
        )  # of a prompt and its completion
        waits_for_weights = "dummy" in self.config.load_format
        load: Any = (
            AutoModelForCausalLM.from_config
            if waits_for_weights
            else AutoModelForCausalLM.from_pretrained
        )
        self.model = load(
            hf_config if waits_for_weights else model_config.local_path,
            dtype=PrecisionType.to_dtype(self.config.dtype),
            attn_implementation="sdpa",
            trust_remote_code=model_config.trust_remote_code,
        ).eval()
        # the same model with the roles' adapters in it, from their first push on
        self.with_adapters: Any = None
        # verl has put the tokenizer's end into ``hf_config``, over that of the model's own config.
        own_config = replace(model_config, load_tokenizer=False, tokenizer=None).hf_config
        self.eos_token_ids = end_ids(hf_config, own_config, model_config.generation_config)
        self._tokenizer = model_config.tokenizer
        self.replica_rank = replica_rank
        # training step of the loaded weights; None until the first push
        self.global_steps: int | None = None
        self._seen_since_push: Counter[tuple[str, tuple[int, ...]]] = (
            Counter()
        )  # requests' names and prompts
        self._queue: asyncio.Queue[tuple[cpu_sampling.SamplingSettings, Asked]] = asyncio.Queue()
        self._model_lock = asyncio.Lock()  # weights never change in the middle of a completion
        self._serving: asyncio.Task[None] | None = None

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        **media: None,
    ) -> TokenOutput:
        """Sample one completion; a ValueError names the numbers of a request that cannot be
        served."""
        if self.global_steps is None:
            raise RuntimeError(
                f"rollout server {server_name(self.replica_rank)} has no weights yet: "
                "update_weights must run before generate"
            )
        prompt = [int(token) for token in prompt_ids]
        params = dict(sampling_params)
        max_tokens = self._token_budget(request_id, len(prompt), params)
        settings = cpu_sampling.SamplingSettings.from_params(params)
        answer: asyncio.Future[TokenOutput] = asyncio.get_running_loop().create_future()
        request = cpu_sampling.SamplingRequest(
            prompt, max_tokens, self._generator_for(request_id, tuple(prompt))
        )
        self._queue.put_nowait((settings, (request, answer)))
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        return await answer

    def _token_budget(self, request_id: str, prompt_length: int, params: dict[str, Any]) -> int:
        """Remove and return the budget in ``params``, or verl's default for servers."""
        limits = [params.pop(name, None) for name in ("max_new_tokens", "max_tokens")]
        response_length = self.config.response_length
        default = min(response_length, self.config.prompt_length + response_length - prompt_length)
        budget = int(next((limit for limit in limits if limit is not None), default))
        if prompt_length == 0 or budget <= 0 or prompt_length + budget > self.context_length:
            raise ValueError(
                f"request {request_id} has {prompt_length} prompt tokens and a budget of {budget} "
                "new ones. Both must "
                f"be at least 1, and the model's context holds {self.context_length}: shorten the "
                "prompt, or change "
                "max_tokens or actor_rollout_ref.rollout.response_length"
            )
        return budget

    def _generator_for(self, *asked: Any) -> torch.Generator:
        # The step is part of the seed so that a resumed run draws what the uninterrupted one would
        # have.
        seen = self._seen_since_push[asked]
        key = f"{self.config.seed}/{self.replica_rank}/{self.global_steps}/{seen}/{asked}"
        self._seen_since_push[asked] += 1
        return torch.Generator().manual_seed(random.Random(key).getrandbits(63))

    async def _serve(self) -> None:
        while True:
            waiting = [await self._queue.get()]
            await asyncio.sleep(GATHER_S)
            while not self._queue.empty():
                waiting.append(self._queue.get_nowait())
            groups: dict[cpu_sampling.SamplingSettings, list[Asked]] = {}
            for settings, asked in waiting:
                groups.setdefault(settings, []).append(asked)
            async with self._model_lock:
                for settings, group in groups.items():
                    for start in range(0, len(group), self.config.max_num_seqs):
                        await self._answer(
                            group[start : start + self.config.max_num_seqs], settings
                        )

    async def _answer(
        self, batch: Sequence[Asked], settings: cpu_sampling.SamplingSettings
    ) -> None:
        requests, answers = zip(*batch, strict=True)
        # Metrics code casts all three to int (trainer_base.py, min_global_steps).
        steps = dict.fromkeys(
            ("global_steps", "min_global_steps", "max_global_steps"), self.global_steps
        )
        try:
            completions = await asyncio.to_thread(self._sample, requests, settings)
        except Exception as error:
            logger.exception(
                "sampling failed; the error goes to all %d requests of the batch", len(batch)
            )
            for answer in answers:
                if not answer.done():
                    answer.set_exception(error)
            return
        for answer, done in zip(answers, completions, strict=True):
            if not answer.done():  # a caller may have given up
                answer.set_result(TokenOutput(**vars(done), extra_fields=dict(steps)))

    def _sample(
        self,
        requests: Sequence[cpu_sampling.SamplingRequest],
        settings: cpu_sampling.SamplingSettings,
    ) -> list[cpu_sampling.Completion]:
        base: AbstractContextManager[None] = nullcontext()
        if self.with_adapters is None:
            if settings.adapter is not None:
                raise ValueError(
                    f"adapter {settings.adapter} is asked for, and the server has none"
                )
        elif settings.adapter is None:
            base = self.with_adapters.disable_adapter()
        else:
            self.with_adapters.set_adapter(settings.adapter)
        with base:
            return cpu_sampling.sample_batch(
                self.model,
                requests,
                settings,
                eos_token_ids=self.eos_token_ids,
                tokenizer=self._tokenizer,
            )

    async def update_adapters(
        self,
        states: Mapping[str, Mapping[str, torch.Tensor]],
        config: Mapping[str, Any],
        global_steps: int | None,
    ) -> None:
        """Replace the adapters of all roles, once the completions under way are done; the base
        stays.
        """
        async with self._model_lock:
            self.with_adapters = with_adapters(self.with_adapters or self.model, config, states)
            self._pushed(global_steps)

    def _pushed(self, global_steps: int | None) -> None:
        self.global_steps = (self.global_steps or 0) if global_steps is None else int(global_steps)
        self._seen_since_push.clear()

    async def update_weights(
        self, state: Mapping[str, torch.Tensor], global_steps: int | None = None
    ) -> None:
        """Replace all weights once the completions under way are done; after a ValueError nothing
        was loaded.
        """
        own = self.model.state_dict()
        # Tied weights have two names for one tensor, and either name is enough.
        pushed = {own[name].data_ptr() for name in state if name in own}
        missing = sorted(name for name in own if own[name].data_ptr() not in pushed)
        unfit = sorted(
            name for name in state if name not in own or state[name].shape != own[name].shape
        )
        if missing or unfit:
            raise ValueError(
                f"the pushed weights do not fit the rollout model: missing are {missing[:3]}, "
                "unexpected or of another "
                f"shape {unfit[:3]}. Trainer and rollout must build the same architecture from "
                "actor_rollout_ref.model.path"
            )
        async with self._model_lock:
            with torch.no_grad():
                for name, tensor in state.items():
                    own[name].copy_(tensor)
            self._pushed(global_steps)

    # The life-cycle that verl drives on GPUs. Nothing shares an accelerator's memory here, and a
    # push waits for the completions under way, so there is nothing to free, to abort or to resume.

    async def _nothing(self, *args: Any, **kwargs: Any) -> None: ...

    wake_up = sleep = abort_all_requests = resume_generation = start_profile = stop_profile = (
        _nothing
    )
    clear_kv_cache = release_kv_cache = resume_kv_cache = _nothing


class CpuRolloutReplica(RolloutReplica):  # type: ignore[misc]
    """One server process for one training rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.world_size != 1:
            raise ValueError(
                "rollout cpu_hf runs a replica in one process, and the configured parallel sizes "
                "need "
                f"{self.world_size}: set tensor_model_parallel_size, data_parallel_size and "
                "pipeline_model_parallel_size of actor_rollout_ref.rollout to 1"
            )
        if self.is_reward_model or self.is_teacher_model:
            raise ValueError("rollout cpu_hf serves the policy only, not reward or teacher models")

    async def launch_servers(self) -> None:
        name = server_name(self.replica_rank)
        actor_class: Any = ray.remote(num_cpus=0)(CpuRolloutServer)
        self._server_handle = actor_class.options(
            name=name, max_concurrency=self.max_concurrency
        ).remote(self.config, self.model_config, self.replica_rank)
        self._server_address = name
        self.servers = [self._server_handle]


class ServerAdapter(BaseRollout):  # type: ignore[misc]
    """Sends the trained weights to the server of replica ``replica_rank``; -1 means that of this
    worker's rank.
    """

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(
        self,
        weights: NamedWeights,
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        server = ray.get_actor(server_name(self.replica_rank))
        config = kwargs.get("peft_config") or {}
        if ROLE_ADAPTERS in config:
            await server.update_adapters.remote(adapter_states(weights), config, global_steps)
        else:
            state = full_weights(self.config.name, weights, wire_format, **kwargs)
            await server.update_weights.remote(state, global_steps)


def full_weights(
    rollout: str,
    weights: NamedWeights,
    wire_format: str,
    peft_config: Any = None,
    base_sync_done: bool = True,
) -> dict[str, torch.Tensor]:
    """Gather the weights that verl pushes to ``rollout`` as whole tensors in host memory, each with
    its own storage.

    Before the first push of adapters (``base_sync_done=False``) that is the base model, by its own
    names. Every training rank must do it: there is a collective inside the iterator
    (``full_tensor()``).
    """
    if wire_format != "named_tensors":
        raise ValueError(
            f"rollout {rollout} got weights as {wire_format!r} and reads only 'named_tensors': "
            "set actor_rollout_ref.rollout.checkpoint_engine.backend=naive"
        )
    if peft_config is not None and base_sync_done:
        raise ValueError(
            f"rollout {rollout} loads full weights and got a LoRA adapter: "
            "set actor_rollout_ref.model.lora.merge=True or train without LoRA"
        )
    # The clone cuts a tensor loose from a larger storage, which Ray would otherwise send along and
    # which safetensors refuses to write twice (tied weights).
    return {
        name.replace(".base_layer.", "."): tensor.detach().cpu().contiguous().clone()
        for name, tensor in weights
    }
