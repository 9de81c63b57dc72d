"""verl's FSDP2 engines with an adapter for each role and attention within contexts, on CPUs too."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.utils.save_and_load import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_id
from verl.utils.fsdp_utils import (
    fsdp2_clip_grad_norm_,
    merged_lora_context,
    normalize_peft_param_name,
)
from verl.utils.model import convert_weight_keys
from verl.utils.tensordict_utils import assign_non_tensor
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from medserl_agentloop.backends.attention import attend_within_contexts
from medserl_agentloop.core.columns import TOKEN_COUNTS, TOKEN_ROLES, token_counts
from medserl_agentloop.core.config import ADAPTERS_FOLDER, ROLE_ADAPTERS, adapter_names


class RoleAdapters:
    """An adapter for each role on one base model; does nothing in other runs.

    A packed row holds the contexts of several roles, and peft chooses an adapter only for complete
    rows. So all adapters are active, and what each adds is multiplied by the mask of its role's
    tokens: ``base + sum over roles of mask * B A x``. A role that is not trained keeps its adapter
    bit for bit. Gradients are clipped for each adapter separately: a norm over all of them would
    let one role shrink the other's step.
    """

    model_config: Any
    module: Any
    optimizer: Any
    optimizer_config: Any

    @property
    def _shares(self) -> Mapping[str, float]:
        """Each adapter's learning-rate factor, in role order; 0 is untrained."""
        shares: Mapping[str, float] = self.model_config.lora.get(ROLE_ADAPTERS) or {}
        names = adapter_names(list(shares))
        return {names[role]: share for role, share in shares.items()}

    def _build_lora_module(self, module: Any) -> Any:
        module = super()._build_lora_module(module)  # type: ignore[misc]
        if not self._shares:
            return module
        first, *others = self._shares
        start = get_peft_model_state_dict(module, adapter_name=first)
        dtype = next(iter(start.values())).dtype
        for name in others:
            module.add_adapter(name, copy.deepcopy(module.peft_config[first]))
            load_adapter(module, start, name)
        # Not the PeftModel's own set_adapter: its disable_adapter() needs one name there.
        module.base_model.set_adapter(list(self._shares))
        for parameter in module.parameters():
            if parameter.requires_grad:  # FSDP wants one dtype; peft adds adapters in fp32
                parameter.data = parameter.data.to(dtype)
        self._token_roles: torch.Tensor | None = None
        for layer in module.modules():
            if isinstance(layer, LoraLayer):
                for number, name in enumerate(self._shares, start=1):
                    if name in layer.lora_A:
                        layer.lora_A[name].register_forward_hook(partial(self._mask, number))
        return module

    def _build_optimizer(self, module: Any) -> Any:
        """verl's, with a parameter group for each adapter whose factor is not 0 or 1."""
        optimizer = super()._build_optimizer(module)  # type: ignore[misc]
        for name, share in self._shares.items():
            if share not in (0, 1):
                first = optimizer.param_groups[0]
                own = _weights_of(module, name)
                others = set(first["params"]) - set(own)
                first["params"] = [weight for weight in first["params"] if weight in others]
                optimizer.add_param_group({**first, "params": own, "lr": first["lr"] * share})
        return optimizer

    def _mask(self, number: int, module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        assert self._token_roles is not None
        return output * (self._token_roles == number).unsqueeze(-1).to(output.dtype)

    def prepare_model_inputs(self, micro_batch: Any) -> Any:
        inputs, arguments = super().prepare_model_inputs(micro_batch)  # type: ignore[misc]
        if self._shares:
            ids, roles = inputs["input_ids"], micro_batch[TOKEN_ROLES].values().unsqueeze(0)
            padding = (0, ids.size(-1) - roles.size(-1))
            self._token_roles = torch.nn.functional.pad(roles, padding).to(ids.device)
        return inputs, arguments

    def optimizer_step(self) -> Any:
        if not self._shares:
            return super().optimizer_step()  # type: ignore[misc]
        norms = []
        for name, share in self._shares.items():
            own = _weights_of(self.module, name)
            if share:
                norm = fsdp2_clip_grad_norm_(own, max_norm=self.optimizer_config.clip_grad)
                norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
            else:  # verl's reference pass makes it trainable again, and weight decay would move it
                for weight in own:
                    weight.grad = None
        if all(map(math.isfinite, norms)):
            self.optimizer.step()
        else:
            print(f"WARN: grad_norm is not finite: {norms}")
            self.optimizer.zero_grad()
        return math.hypot(*norms)

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **more: Any
    ) -> Any:
        """Return only adapters once the rollout has the base: ``ADAPTER:NAME``, and weights."""
        engine: Any = super()  # the class that it is mixed into
        parameters, config = engine.get_per_tensor_param(layered_summon, base_sync_done, **more)
        if not self._shares or not base_sync_done:
            return parameters, config
        adapters = (
            (f"{name}:{key}", tensor)
            for name in self._shares
            for key, tensor in _whole_adapter(self.module, name)
        )
        return adapters, {**config, ROLE_ADAPTERS: list(self._shares)}

    def save_checkpoint(self, local_path: str, *args: Any, **more: Any) -> None:
        """Write verl's checkpoint, and the shared adapter or each role's in peft's format."""
        super().save_checkpoint(local_path, *args, **more)  # type: ignore[misc]
        of_roles = adapter_names(list(self.model_config.lora.get(ROLE_ADAPTERS) or {}))
        folders = {name: f"{ADAPTERS_FOLDER}/{role}" for role, name in of_roles.items()}
        if not folders and hasattr(self.module, "peft_config"):
            folders = {"default": "lora_adapter"}  # as verl's merger names it
        for name, folder in folders.items():
            state = dict(_whole_adapter(self.module, name))
            if torch.distributed.get_rank() == 0:
                config = copy.deepcopy(self.module.peft_config[name])
                config.base_model_name_or_path = str(self.model_config.path)
                write_adapter(Path(local_path) / folder, state, config)


def _weights_of(module: Any, adapter: str) -> list[torch.nn.Parameter]:
    return [weight for name, weight in module.named_parameters() if f".{adapter}." in name]


def _whole_adapter(module: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather an adapter's weights on the host, in peft's names; every rank must ask for them."""
    for key, tensor in get_peft_model_state_dict(module, adapter_name=name).items():
        if isinstance(tensor, DTensor):
            # To the device first, as verl does: offloaded weights are on the host, where
            # collectives may not work.
            on_device: Any = tensor.to(get_device_id())
            tensor = on_device.full_tensor()
        yield key, tensor.detach().cpu().contiguous()


def load_adapter(model: Any, state: Mapping[str, torch.Tensor], name: str) -> None:
    """Set the weights of a peft model's adapter."""
    found: Any = set_peft_model_state_dict(model, dict(state), adapter_name=name)
    if found.unexpected_keys:
        raise ValueError(f"adapter {name}: the model has no {found.unexpected_keys[:3]}")


def write_adapter(folder: Path, state: Mapping[str, torch.Tensor], config: LoraConfig) -> None:
    """Write an adapter as a folder in peft's format, for peft and SGLang."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(state), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.inference_mode = True
    config.save_pretrained(str(folder))


# verl's own is registered for "cuda" of any vendor, and a vendor's engine takes precedence.
@EngineRegistry.register("language_model", "fsdp2", device="cuda", vendor="nvidia")
class _FSDP2EngineWithLMHead(RoleAdapters, FSDPEngineWithLMHead):  # type: ignore[misc]
    """Actor and reference policy."""

    def _build_module(self) -> Any:
        return attend_within_contexts(super()._build_module())

    def forward_backward_batch(
        self, data: Any, loss_function: Any, forward_only: bool = False
    ) -> Any:
        """Run verl's method, after telling the loss each role's token count in a mini-batch."""
        if loss_function is not None and "role_ids" in data:
            group = self.get_data_parallel_group()
            of_workers: list[Any] = [None] * torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(of_workers, token_counts(data), group)
            assign_non_tensor(data, **{TOKEN_COUNTS: sum(of_workers, Counter())})
        return super().forward_backward_batch(data, loss_function, forward_only)


@EngineRegistry.register("value_model", "fsdp2", device="cuda", vendor="nvidia")
class _FSDP2EngineWithValueHead(FSDPEngineWithValueHead):  # type: ignore[misc]
    """Critic with the actor's attention."""

    model_config: Any

    def _build_module(self) -> Any:
        # Like any other model: load_valuehead_model in verl/utils/model.py demands flash-attn.
        model_config = self.model_config
        hf_config = model_config.hf_config
        hf_config.num_labels, hf_config.classifier_dropout, hf_config.hidden_dropout = 1, 0.0, 0.0
        hf_config.architectures = ["ForTokenClassification"]
        hf_config._attn_implementation = "sdpa"
        self.model_config = SimpleNamespace(**vars(model_config) | {"model_type": "language_model"})
        try:
            return attend_within_contexts(super()._build_module())
        finally:
            self.model_config = model_config


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
        # pack. Here the whole pack is one row. verl's fused kernels leave no logits.
        if output.logits is not None:
            output.logits = output.logits.unsqueeze(0)
            labels = output_args["input_ids_rmpad_rolled"].unsqueeze(0)
            output_args = {**output_args, "input_ids_rmpad_rolled": labels}
        return super().prepare_model_outputs(
            output, output_args, micro_batch, logits_processor_func
        )

    def _gather_and_unpad_packed(self, tensor: torch.Tensor, pad_size: int) -> torch.Tensor:
        gathered: torch.Tensor = super()._gather_and_unpad_packed(tensor.flatten(), pad_size)
        return gathered

    def _merged_lora_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        # verl's own rounds to bf16, as its GPU rollouts do; the rollout here computes in float32.
        with merged_lora_context(self.module, backup_adapters=True):
            state = normalize_peft_param_name(self.module.state_dict())
            for name, tensor in convert_weight_keys(state, self.module).items():
                sharded = isinstance(tensor, DTensor)
                yield name, tensor.full_tensor() if sharded else tensor.detach().clone()


@EngineRegistry.register("value_model", "fsdp2", device="cpu")
class _CpuFSDP2EngineWithValueHead(_WithoutPinnedMemory, _FSDP2EngineWithValueHead):
    """Critic on the CPU."""
