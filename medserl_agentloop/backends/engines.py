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
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AutoModelForTokenClassification
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface
from verl.utils.fsdp_utils import merged_lora_context, normalize_peft_param_name
from verl.utils.model import convert_weight_keys
from verl.utils.tensordict_utils import assign_non_tensor
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from medserl_agentloop.backends.role_adapters import RoleAdapters
from medserl_agentloop.core.columns import TOKEN_COUNTS, token_counts

PACKED = "packed_sdpa"
"""Name of the attention over a pack of sequences with PyTorch's SDPA, one sequence at a time.

verl trains on packs: many trajectories in one row, and a context starts where positions restart.
With ``sdpa`` Transformers lets every token look at every other one behind a mask, so time and
memory grow with the square of the pack, here with that of a context. It is not in the config: verl
writes ``override_config`` into checkpoints, and theirs have to load where this package is not
installed.
"""

_STARTS = (
    WeakTensorKeyDictionary()
)  # of a pack's sequences, by its positions: one wait for the GPU, not one a layer


def instead_of_sdpa(model: Any) -> Any:
    """A model of Transformers', which attends within each context from now on if it did by SDPA."""
    AttentionInterface.register(PACKED, packed_sdpa)
    AttentionMaskInterface.register(PACKED, mask_unless_packed)
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(PACKED)
    return model


def packed_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence of a pack; plain SDPA with a mask, or where nothing is
    packed.

    ``query`` is (1, H, T, D), ``key`` and ``value`` are (1, H_kv, T, D), and ``position_ids`` (1,
    T): a sequence starts wherever a position does not follow the one before. ``attention_mask`` is
    what :func:`mask_unless_packed` made. Returns the output (1, T, H, D), and None for the weights.
    """
    starts = [0]
    if (
        attention_mask is None and position_ids is not None and len(position_ids) == 1
    ):  # several rows are not a pack
        if position_ids not in _STARTS:
            _STARTS[position_ids] = [
                0,
                *(torch.nonzero(position_ids[0].diff() != 1).flatten() + 1).tolist(),
            ]
        starts = _STARTS[position_ids]
    if len(starts) == 1:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output, None
    lengths = [end - start for start, end in pairwise([*starts, query.shape[2]])]
    # Not slices: the gradient of each would be as long as the pack.
    sequences = zip(
        *(torch.split(states, lengths, dim=2) for states in (query, key, value)), strict=True
    )
    parts = [sdpa_attention_forward(module, *states, None, **options)[0] for states in sequences]
    return torch.cat(parts, dim=1), None


def mask_unless_packed(**batch: Any) -> torch.Tensor | None:
    """SDPA's mask, which layers with a window need; None for one row, where positions say what
    belongs together.
    """
    one_row = (
        batch["batch_size"] == 1
        and batch.get("attention_mask") is None
        and not batch.get("kv_offset")
    )
    whole = (
        batch.get("q_length") == batch["kv_length"]
        and getattr(batch["config"], "sliding_window", None) is None
    )
    return None if one_row and whole else sdpa_mask(**batch)


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
    """Actor and reference policy. verl's own, but for a run with adapters of roles or without flash
    attention.
    """

    def _build_module(self) -> Any:
        return instead_of_sdpa(super()._build_module())


class _WithoutPinnedMemory:
    """Keeps FSDP2 from pinning host memory, which only works beside an accelerator."""

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


@EngineRegistry.register("value_model", "fsdp2", device="cpu")
class _CpuFSDP2EngineWithValueHead(_WithoutPinnedMemory, FSDPEngineWithValueHead):  # type: ignore[misc]
    """Critic on the CPU."""

    def _build_module(self) -> Any:
        # verl/utils/model.py (load_valuehead_model) hard-codes
        # attn_implementation="flash_attention_2".
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
            module.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        return instead_of_sdpa(module)
