"""verl's FSDP2 training engines, taught an adapter for each role and attention within each context, and for the CPU.

verl's EngineRegistry hands them to training workers of a run with ``actor_rollout_ref.actor.strategy=fsdp2``. FSDP1
needs an accelerator and is not offered on the CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForTokenClassification
from verl.utils.fsdp_utils import merged_lora_context, normalize_peft_param_name
from verl.utils.model import convert_weight_keys
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from medserl_agentloop.backends import packed_attention
from medserl_agentloop.backends.role_adapters import RoleAdapters


# verl's own is registered for "cuda" of any vendor, and a vendor's engine goes before it.
@EngineRegistry.register("language_model", "fsdp2", device="cuda", vendor="nvidia")
class FSDP2EngineWithLMHead(RoleAdapters, FSDPEngineWithLMHead):  # type: ignore[misc]  # verl is untyped
    """Actor and reference policy. verl's own, but for a run with adapters of roles or without flash attention."""

    def _build_module(self) -> Any:
        return packed_attention.instead_of_sdpa(super()._build_module())


class _WithoutPinnedMemory:
    """Keeps FSDP2 from pinning host memory, which only works beside an accelerator."""

    engine_config: Any

    def _build_fsdp_module(self, module: Any) -> Any:
        # verl/workers/engine/fsdp/transformer_impl.py answers `forward_only` (the reference policy) and
        # `offload_policy` with CPUOffloadPolicy(pin_memory=True). There is nothing to offload from here,
        # so both are off while the module is wrapped, and back on for everything that follows.
        config = self.engine_config
        self.engine_config = dataclasses.replace(config, forward_only=False, offload_policy=False)
        try:
            return super()._build_fsdp_module(module)  # type: ignore[misc]
        finally:
            self.engine_config = config


@EngineRegistry.register("language_model", "fsdp2", device="cpu")
class CpuFSDP2EngineWithLMHead(_WithoutPinnedMemory, FSDP2EngineWithLMHead):
    """Actor and reference policy on the CPU."""

    def prepare_model_outputs(self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any) -> Any:
        # Without flash attention verl takes the log-probs of logits row by row in Python (logprobs_from_logits_v2 in
        # verl/utils/torch_functional.py), and a row is a token of the pack. Here the whole pack is one row.
        output.logits = output.logits.unsqueeze(0)
        labels = output_args["input_ids_rmpad_rolled"].unsqueeze(0)
        output_args = {**output_args, "input_ids_rmpad_rolled": labels}
        return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)

    def _gather_and_unpad_packed(self, tensor: torch.Tensor, pad_size: int) -> torch.Tensor:
        unpadded: torch.Tensor = super()._gather_and_unpad_packed(tensor.flatten(), pad_size)
        return unpadded

    def _merged_lora_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        # verl's own rounds to bf16, as its GPU rollouts do; the rollout here computes in float32.
        with merged_lora_context(self.module, backup_adapters=True):
            state = convert_weight_keys(normalize_peft_param_name(self.module.state_dict()), self.module)
            for name, tensor in state.items():
                yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


@EngineRegistry.register("value_model", "fsdp2", device="cpu")
class CpuFSDP2EngineWithValueHead(_WithoutPinnedMemory, FSDPEngineWithValueHead):  # type: ignore[misc]
    """Critic on the CPU."""

    def _build_module(self) -> Any:
        # verl/utils/model.py (load_valuehead_model) hard-codes attn_implementation="flash_attention_2".
        hf_config = self.model_config.hf_config
        hf_config.num_labels = 1
        hf_config.classifier_dropout = 0.0
        hf_config.hidden_dropout = 0.0
        dtype = PrecisionType.to_dtype(self.engine_config.model_dtype or "fp32")
        module = AutoModelForTokenClassification.from_pretrained(
            str(self.model_config.local_path),
            config=hf_config,
            dtype=dtype,
            attn_implementation="sdpa",
            trust_remote_code=self.model_config.trust_remote_code,
        )
        if self.model_config.enable_gradient_checkpointing:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return packed_attention.instead_of_sdpa(module)
