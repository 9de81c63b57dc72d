"""A LoRA adapter for each role on one base model, in verl's training engine and in a rollout.

A packed row holds the contexts of several roles, and peft chooses an adapter for whole rows only.
So all adapters are active, and what each adds is multiplied by the mask of its role's tokens:
``base + sum over roles of mask * B A x``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.save_and_load import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_id
from verl.utils.fsdp_utils import fsdp2_clip_grad_norm_

from medserl_agentloop.core.columns import TOKEN_ROLES
from medserl_agentloop.core.config import ROLE_ADAPTERS, adapter_names

ADAPTER_FOLDER, ADAPTERS_FOLDER = "lora_adapter", "lora_adapters"
"""Folders of a checkpoint in peft's format: the adapter of all roles, as verl's merger names it;
one for each role.
"""


class RoleAdapters:
    """Mixed in before verl's FSDP2 engine with an LM head; does nothing unless the run has an
    adapter for each role.

    A role that is not trained keeps its adapter bit for bit. Gradients are clipped for each adapter
    alone: a norm over all of them would let one role shrink the other's step.
    """

    model_config: Any
    module: Any
    optimizer: Any
    optimizer_config: Any

    @property
    def _trained(self) -> Mapping[str, float]:
        """Each adapter's share of the learning rate, in the order of the roles; 0 for an untrained
        one.
        """
        shares: Mapping[str, float] = self.model_config.lora.get(ROLE_ADAPTERS) or {}
        names = adapter_names(list(shares))
        return {names[role]: share for role, share in shares.items()}

    def _build_lora_module(self, module: Any) -> Any:
        module = super()._build_lora_module(module)  # type: ignore[misc]
        if not self._trained:
            return module
        first, *others = self._trained
        start = get_peft_model_state_dict(module, adapter_name=first)
        dtype = next(iter(start.values())).dtype
        for name in others:
            module.add_adapter(name, copy.deepcopy(module.peft_config[first]))
            _load(module, start, name)
        # Not the PeftModel's own set_adapter: its disable_adapter() needs one name there.
        module.base_model.set_adapter(list(self._trained))
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(
                    dtype
                )  # FSDP wants one dtype; peft adds adapters in fp32
        self._token_roles: torch.Tensor | None = None
        for layer in module.modules():
            if isinstance(layer, LoraLayer):
                for number, name in enumerate(self._trained, start=1):
                    if name in layer.lora_A:
                        layer.lora_A[name].register_forward_hook(partial(self._mask, number))
        return module

    def _build_optimizer(self, module: Any) -> Any:
        """verl's, with a parameter group for each adapter whose share of the learning rate is not
        1.
        """
        optimizer = super()._build_optimizer(module)  # type: ignore[misc]
        for name, share in self._trained.items():
            if share not in (0, 1):
                first = optimizer.param_groups[0]
                own = [
                    parameter for key, parameter in module.named_parameters() if f".{name}." in key
                ]
                others = set(first["params"]) - set(own)
                first["params"] = [
                    parameter for parameter in first["params"] if parameter in others
                ]
                optimizer.add_param_group({**first, "params": own, "lr": first["lr"] * share})
        return optimizer

    def _mask(self, number: int, module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        assert self._token_roles is not None
        return output * (self._token_roles == number).unsqueeze(-1).to(output.dtype)

    def prepare_model_inputs(self, micro_batch: Any) -> Any:
        inputs, arguments = super().prepare_model_inputs(micro_batch)  # type: ignore[misc]
        if self._trained:
            roles = micro_batch[TOKEN_ROLES].values().unsqueeze(0)
            padding = inputs["input_ids"].size(-1) - roles.size(-1)
            self._token_roles = torch.nn.functional.pad(roles, (0, padding)).to(
                inputs["input_ids"].device
            )
        return inputs, arguments

    def optimizer_step(self) -> Any:
        if not self._trained:
            return super().optimizer_step()  # type: ignore[misc]
        norms = []
        for name, trained in self._trained.items():
            own = [
                parameter for key, parameter in self.module.named_parameters() if f".{name}." in key
            ]
            if trained:
                norm = fsdp2_clip_grad_norm_(own, max_norm=self.optimizer_config.clip_grad)
                norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
            else:  # verl's reference pass makes it trainable again, and weight decay would move it
                for parameter in own:
                    parameter.grad = None
        if all(map(math.isfinite, norms)):
            self.optimizer.step()
        else:
            print(f"WARN: grad_norm is not finite: {norms}")
            self.optimizer.zero_grad()
        return math.hypot(*norms)

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **more: Any
    ) -> Any:
        """Once the rollout has the base, the adapters: names begin with the adapter's and a
        colon."""
        parameters, config = super().get_per_tensor_param(layered_summon, base_sync_done, **more)  # type: ignore[misc]
        if not self._trained or not base_sync_done:
            return parameters, config
        adapters = (
            (f"{name}:{key}", part)
            for name in self._trained
            for key, part in _state(self.module, name)
        )
        return adapters, {**config, ROLE_ADAPTERS: list(self._trained)}

    def save_checkpoint(self, local_path: str, *args: Any, **more: Any) -> None:
        """verl's checkpoint and, in peft's format, the adapter of all roles or of
        each."""
        super().save_checkpoint(local_path, *args, **more)  # type: ignore[misc]
        of_roles = adapter_names(list(self.model_config.lora.get(ROLE_ADAPTERS) or {}))
        folders = {
            name: Path(local_path) / ADAPTERS_FOLDER / role for role, name in of_roles.items()
        }
        if not folders and hasattr(self.module, "peft_config"):
            folders = {"default": Path(local_path) / ADAPTER_FOLDER}
        for name, folder in folders.items():
            state = {key: tensor.contiguous() for key, tensor in _state(self.module, name)}
            if torch.distributed.get_rank() == 0:
                config = copy.deepcopy(self.module.peft_config[name])
                config.base_model_name_or_path = str(self.model_config.path)
                write_adapter(folder, state, config)


def adapter_states(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors that :meth:`RoleAdapters.get_per_tensor_param` gave, by adapter, in peft's
    names."""
    states: dict[str, dict[str, torch.Tensor]] = {}
    for named, tensor in weights:
        name, _, key = named.partition(":")
        states.setdefault(name, {})[key] = tensor.detach().cpu().contiguous().clone()
    return states


def lora_config(pushed: Mapping[str, Any]) -> LoraConfig:
    keys = ("r", "lora_alpha", "target_modules", "exclude_modules")
    return LoraConfig(task_type="CAUSAL_LM", **{key: pushed[key] for key in keys})


def write_adapter(folder: Path, state: Mapping[str, torch.Tensor], config: LoraConfig) -> None:
    """Write an adapter as a folder in peft's format, to be read by peft and by SGLang."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(state), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.inference_mode = True
    config.save_pretrained(str(folder))


def with_adapters(
    model: Any, config: Mapping[str, Any], states: Mapping[str, Mapping[str, torch.Tensor]]
) -> Any:
    """``model`` with these adapters in it, new or in the place of those it has."""
    first, *others = states
    if not hasattr(model, "peft_config"):
        model = get_peft_model(model, lora_config(config), adapter_name=first)
        for name in others:
            model.add_adapter(name, copy.deepcopy(model.peft_config[first]))
        model.eval()
    for name, state in states.items():
        _load(model, state, name)
    return model


def _load(model: Any, state: Mapping[str, torch.Tensor], name: str) -> None:
    found: Any = set_peft_model_state_dict(model, dict(state), adapter_name=name)
    if found.unexpected_keys:
        raise ValueError(
            f"adapter {name} has weights that the model has no place for: "
            f"{found.unexpected_keys[:3]}"
        )


def _state(model: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole weights of an adapter on the host, in peft's names; every rank must ask for
    them."""
    for key, tensor in get_peft_model_state_dict(model, adapter_name=name).items():
        if isinstance(tensor, DTensor):
            # To the device first, as verl does it: offloaded weights are on the host, where
            # collectives may not work.
            on_device: Any = tensor.to(get_device_id())
            tensor = on_device.full_tensor()
        yield key, tensor.detach().cpu()
