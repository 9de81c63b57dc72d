"""Token-in, token-out rollouts with Transformers, for runs without an accelerator.

verl starts one CpuRolloutReplica per training rank; its server is a named Ray actor that
LLMServerClient asks to ``generate``. The training worker's ServerAdapter pushes the weights into it
after each step.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput
from verl.workers.rollout.utils import get_max_position_embeddings

from medserl_agentloop.backends.cpu_sampling import Sampler, SamplingRequest, SamplingSettings
from medserl_agentloop.backends.engines import load_adapter
from medserl_agentloop.core.config import ROLE_ADAPTERS
from medserl_agentloop.core.encoding import end_ids

NamedWeights = Iterable[tuple[str, torch.Tensor]]
Weights = Mapping[str, torch.Tensor]


def server_name(replica_rank: int) -> str:
    return f"cpu_hf_server_{replica_rank}"


class CpuRolloutServer:
    """The server's methods, by the names verl calls them; a Ray actor, or a plain object in tests.

    A request's random numbers depend on ``rollout.seed``, the replica, the weights' step, its name
    and prompt, and how often these occurred, not on its timing or batch: games race each other, but
    a run must be repeatable. With ``rollout.full_determinism`` a run's request names also repeat.
    """

    def __init__(self, config: Any, model_config: Any, replica_rank: int = 0) -> None:
        self.config: RolloutConfig = omega_conf_to_dataclass(config)
        model_config = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        hf_config, source = model_config.hf_config, model_config.local_path
        load: Any = AutoModelForCausalLM.from_pretrained
        if "dummy" in self.config.load_format:  # it waits for the first push
            load, source = AutoModelForCausalLM.from_config, hf_config
        model = load(
            source,
            dtype=PrecisionType.to_dtype(self.config.dtype),
            attn_implementation="sdpa",
            trust_remote_code=model_config.trust_remote_code,
        ).eval()
        # verl has overwritten the end token in ``hf_config`` with the tokenizer's.
        own_config = replace(model_config, load_tokenizer=False, tokenizer=None).hf_config
        ends = end_ids(hf_config, own_config, model_config.generation_config)
        self.sampler = Sampler(model, model_config.tokenizer, ends, self.config.max_num_seqs)
        longest = get_max_position_embeddings(hf_config)
        self.context_length = min(longest, self.config.max_model_len or longest)
        self.replica_rank = replica_rank
        self.global_steps: int | None = None  # of the loaded weights; None until the first push
        self._seen_since_push: Counter[tuple[str, tuple[int, ...]]] = Counter()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        **media: None,
    ) -> TokenOutput:
        """Sample one completion; ValueError for a request that cannot be served."""
        if (step := self.global_steps) is None:
            raise RuntimeError(
                f"{server_name(self.replica_rank)} has no weights yet: call update_weights first"
            )
        prompt, params = [int(token) for token in prompt_ids], dict(sampling_params)
        max_tokens = self._token_budget(request_id, len(prompt), params)
        settings = SamplingSettings.from_params(params)
        draws = self._generator_for(request_id, tuple(prompt))
        done = await self.sampler.sample(SamplingRequest(prompt, max_tokens, draws), settings)
        # Metrics code casts all three to int (trainer_base.py, min_global_steps).
        steps = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), step)
        return TokenOutput(**vars(done), extra_fields=steps)

    def _token_budget(self, request_id: str, prompt_length: int, params: dict[str, Any]) -> int:
        """Remove and return the budget in ``params``; ``rollout.response_length`` if none."""
        limits = [params.pop(name, None) for name in ("max_new_tokens", "max_tokens")]
        budget = next((int(n) for n in limits if n is not None), self.config.response_length)
        if prompt_length == 0 or budget <= 0 or prompt_length + budget > self.context_length:
            raise ValueError(
                f"request {request_id} has {prompt_length} prompt tokens and a budget of {budget}: "
                f"both must be at least 1, and the model's context holds {self.context_length}"
            )
        return budget

    def _generator_for(self, *asked: Any) -> torch.Generator:
        # With the step, a resumed run draws what the uninterrupted one would have.
        seen = self._seen_since_push[asked]
        key = f"{self.config.seed}/{self.replica_rank}/{self.global_steps}/{seen}/{asked}"
        self._seen_since_push[asked] += 1
        return torch.Generator().manual_seed(random.Random(key).getrandbits(63))

    async def update_weights(self, state: Weights, global_steps: int | None = None) -> None:
        """Replace all weights; torch's RuntimeError names mismatches."""
        self.sampler.model.load_state_dict(state)
        self._pushed(global_steps)

    async def update_adapters(
        self, states: Mapping[str, Weights], config: Mapping[str, Any], global_steps: int | None
    ) -> None:
        """Replace the adapters of all roles; the base stays."""
        for name, state in states.items():
            adapters = getattr(self.sampler.model, "peft_config", None)
            if adapters is None:
                model = get_peft_model(self.sampler.model, lora_config(config), adapter_name=name)
                self.sampler.model = model.eval()
            elif name not in adapters:
                self.sampler.model.add_adapter(name, lora_config(config))
            load_adapter(self.sampler.model, state, name)
        self._pushed(global_steps)

    def _pushed(self, global_steps: int | None) -> None:
        self.global_steps = (self.global_steps or 0) if global_steps is None else int(global_steps)
        self._seen_since_push.clear()

    async def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """Nothing shares an accelerator's memory: there is nothing to free, abort or resume."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = _nothing
    abort_all_requests = resume_generation = start_profile = stop_profile = _nothing


class CpuRolloutReplica(RolloutReplica):  # type: ignore[misc]
    """One server process for one training rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.world_size != 1 or self.is_reward_model or self.is_teacher_model:
            raise ValueError(
                "rollout cpu_hf serves only the policy, in one process: set "
                "tensor_model_parallel_size, data_parallel_size and pipeline_model_parallel_size "
                "of actor_rollout_ref.rollout to 1"
            )

    async def launch_servers(self) -> None:
        name = server_name(self.replica_rank)
        actor_class: Any = ray.remote(num_cpus=0)(CpuRolloutServer)
        self._server_handle = actor_class.options(
            name=name, max_concurrency=self.max_concurrency
        ).remote(self.config, self.model_config, self.replica_rank)
        self._server_address = name
        self.servers = [self._server_handle]


class ServerAdapter(BaseRollout):  # type: ignore[misc]
    """Sends weights to the server of replica ``replica_rank``; -1 means this worker's."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(
        self, weights: NamedWeights, *args: Any, global_steps: int | None = None, **kwargs: Any
    ) -> None:
        server = ray.get_actor(server_name(self.replica_rank))
        config = kwargs.get("peft_config") or {}
        if ROLE_ADAPTERS in config:
            await server.update_adapters.remote(adapter_states(weights), config, global_steps)
        else:
            state = full_weights(weights, **kwargs)
            await server.update_weights.remote(state, global_steps)


def full_weights(
    weights: NamedWeights, peft_config: Any = None, base_sync_done: bool = True, **others: Any
) -> dict[str, torch.Tensor]:
    """Gather the weights that verl pushes, on every rank: the iterator contains a collective.

    Before the first push of adapters (``base_sync_done=False``) they are the base model's.
    """
    if peft_config is not None and base_sync_done:
        raise ValueError(
            "a rollout on a CPU loads full weights, but got a LoRA adapter: set "
            "actor_rollout_ref.model.lora.merge=True or train without LoRA"
        )
    return {name.replace(".base_layer.", "."): _own(tensor) for name, tensor in weights}


def adapter_states(weights: NamedWeights) -> dict[str, dict[str, torch.Tensor]]:
    """Gather what ``RoleAdapters.get_per_tensor_param`` gives, by adapter, in peft's names."""
    states: dict[str, dict[str, torch.Tensor]] = {}
    for named, tensor in weights:
        name, _, key = named.partition(":")
        states.setdefault(name, {})[key] = _own(tensor)
    return states


def _own(tensor: torch.Tensor) -> torch.Tensor:
    # Cloned from a larger storage, which Ray would send, too, and safetensors refuses to write
    # twice (tied weights).
    return tensor.detach().cpu().contiguous().clone()


def lora_config(pushed: Mapping[str, Any]) -> LoraConfig:
    keys = ("r", "lora_alpha", "target_modules", "exclude_modules")
    return LoraConfig(task_type="CAUSAL_LM", **{key: pushed[key] for key in keys})
