"""verl's FSDP training engines, taught roles' tokens and adapters and attention within each
context, and for the CPU.

verl's EngineRegistry hands them to training workers of a run with
``actor_rollout_ref.actor.strategy=fsdp2``. FSDP1 needs an accelerator and is not offered on the
CPU; of all this it knows the roles' tokens only.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForTokenClassification
from verl.utils.fsdp_utils import (
    get_init_weight_context_manager,
    merged_lora_context,
    normalize_peft_param_name,
)
from verl.utils.model import convert_weight_keys
from verl.utils.tensordict_utils import assign_non_tensor
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from medserl_agentloop.backends.attention import attend_within_contexts
from medserl_agentloop.backends.role_adapters import RoleAdapters
from medserl_agentloop.core.columns import TOKEN_COUNTS, token_counts


# verl's own is registered for "cuda" of any vendor, and a vendor's engine goes before it.
@EngineRegistry.register("language_model", "fsdp", device="cuda", vendor="nvidia")
class _EngineWithLMHead(FSDPEngineWithLMHead):  # type: ignore[misc]  # verl is untyped
    """verl's own, which also tells the loss how many tokens of each role a mini-batch has."""

    def forward_backward_batch(
        self, data: Any, loss_function: Any, forward_only: bool = False
    ) -> Any:
        if loss_function is not None and "role_ids" in data:
            group = self.get_data_parallel_group()
            of_workers: list[Any] = [None] * torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(of_workers, token_counts(data), group)
            assign_non_tensor(data, **{TOKEN_COUNTS: sum(of_workers, Counter())})
        return super().forward_backward_batch(data, loss_function, forward_only)


@EngineRegistry.register("language_model", "fsdp2", device="cuda", vendor="nvidia")
class _FSDP2EngineWithLMHead(RoleAdapters, _EngineWithLMHead):
    """Actor and reference policy: verl's own, with adapters of roles and attention within
    contexts.
    """

    def _build_module(self) -> Any:
        return attend_within_contexts(super()._build_module())


class _WithoutPinnedMemory:
    """Keeps FSDP2 from pinning host memory, which only works with an accelerator."""

    engine_config: Any

    def _build_fsdp_module(self, module: Any) -> Any:
        # verl's transformer_impl.py answers `forward_only` (the reference policy) and
        # `offload_policy` with CPUOffloadPolicy(pin_memory=True): both are off while the module is
        # wrapped.
        config = self.engine_config
        self.engine_config = dataclasses.replace(config, forward_only=False, offload_policy=False)
        try:
            return super()._build_fsdp_module(module)  # type: ignore[misc]
        finally:
            self.engine_config = config


@EngineRegistry.register("language_model", "fsdp2", device="cpu")
class _CpuFSDP2EngineWithLMHead(_WithoutPinnedMemory, _FSDP2EngineWithLMHead):
    """Actor and reference policy on the CPU."""

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> Any:
        # Without flash attention verl takes the log-probs of logits row by row in Python
        # (logprobs_from_logits_v2 in verl/utils/torch_functional.py), and a row is a token of the
        # pack. Here the whole pack is one row.
        if (
            output.logits is not None
        ):  # verl's fused kernels have taken log-probs already, in chunks
            output.logits = output.logits.unsqueeze(0)
            labels = output_args["input_ids_rmpad_rolled"].unsqueeze(0)
            output_args = {**output_args, "input_ids_rmpad_rolled": labels}
        return super().prepare_model_outputs(
            output, output_args, micro_batch, logits_processor_func
        )

    def _gather_and_unpad_packed(self, tensor: torch.Tensor, pad_size: int) -> torch.Tensor:
        return super()._gather_and_unpad_packed(tensor.flatten(), pad_size)  # type: ignore[no-any-return]

    def _merged_lora_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        # verl's own rounds to bf16, as its GPU rollouts do; the rollout here computes in float32.
        with merged_lora_context(self.module, backup_adapters=True):
            state = convert_weight_keys(
                normalize_peft_param_name(self.module.state_dict()), self.module
            )
            for name, tensor in state.items():
                yield (
                    name,
                    tensor.full_tensor()
                    if isinstance(tensor, DTensor)
                    else tensor.detach().clone(),
                )


class _EngineWithValueHead(FSDPEngineWithValueHead):  # type: ignore[misc]
    """Critic that attends as the actor does; verl's own demands flash-attn
    (load_valuehead_model in verl/utils/model.py).
    """

    def _build_module(self) -> Any:
        config = self.model_config.hf_config
        config.num_labels, config.classifier_dropout, config.hidden_dropout = 1, 0.0, 0.0
        dtype = PrecisionType.to_dtype(self.engine_config.model_dtype or "fp32")
        # As verl's: rank 0 alone reads the weights, unless some are tied.
        meta = not config.tie_word_embeddings
        with get_init_weight_context_manager(use_meta_tensor=meta, mesh=self.device_mesh)():
            module = AutoModelForTokenClassification.from_pretrained(
                str(self.model_config.local_path),
                config=config,
                dtype=dtype,
                attn_implementation="sdpa",
                trust_remote_code=self.model_config.trust_remote_code,
            )
        if self.model_config.enable_gradient_checkpointing:
            module.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        return attend_within_contexts(module)


@EngineRegistry.register("value_model", "fsdp2", device="cuda", vendor="nvidia")
class _FSDP2EngineWithValueHead(_EngineWithValueHead):
    """Critic on GPUs."""


@EngineRegistry.register("value_model", "fsdp2", device="cpu")
class _CpuFSDP2EngineWithValueHead(_WithoutPinnedMemory, _EngineWithValueHead):
    """Critic on the CPU."""
