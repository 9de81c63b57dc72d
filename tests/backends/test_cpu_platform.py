"""The CPU backend and SGLang on a CPU are chosen by the environment, and leave other runs alone."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import verl  # noqa: F401  the plugin's registrations run while verl is imported
from verl.plugin.platform import PlatformRegistry
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.rollout.base import _ROLLOUT_REGISTRY

from medserl_agentloop import backends
from medserl_agentloop.backends import sglang_cpu
from medserl_agentloop.backends.attention import PACKED
from medserl_agentloop.backends.cpu_platform import PlatformCPU
from medserl_agentloop.backends.engines import RoleAdapters
from medserl_agentloop.testing import tiny_model


def test_the_platform_is_whole_but_never_detected() -> None:
    assert PlatformRegistry.get("cpu") is PlatformCPU and not PlatformCPU.__abstractmethods__
    platform = PlatformCPU()
    assert not platform.is_platform_available(use_smi_check=True)
    assert torch.zeros(1).to(platform.current_device()).device.type == "cpu"
    assert platform.ray_resource_options(1) == {"num_gpus": 1}


def test_a_gpu_run_gets_our_engines_and_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    backends.register_adapters()
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "nvidia")
    critic = EngineRegistry.get_engine_cls("value_model", "fsdp2")
    assert critic.__module__ == "medserl_agentloop.backends.engines"
    engine = EngineRegistry.get_engine_cls("language_model", "fsdp2")
    assert issubclass(engine, RoleAdapters) and issubclass(engine, FSDPEngineWithLMHead)
    for attention, expected in (("sdpa", PACKED), ("eager", "eager")):
        model = tiny_model(100, attention=attention)
        monkeypatch.setattr(FSDPEngineWithLMHead, "_build_module", lambda self, built=model: built)
        assert engine._build_module(object.__new__(engine)).config._attn_implementation == expected
    assert _ROLLOUT_REGISTRY[("sglang", "async")] == f"{backends.SGLANG}.ServerAdapter"


def test_sglangs_flag_is_set_before_the_servers_module_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, server = ModuleType(backends.SGLANG), type("AdapterServer", (), {})
    module.AdapterServer = server  # type: ignore[attr-defined]

    def load() -> type:
        monkeypatch.setitem(sys.modules, backends.SGLANG, module)  # from here on it can be imported
        return type("SGLangReplica", (), {})

    monkeypatch.setattr("verl.workers.rollout.replica._load_sglang", load)
    monkeypatch.setattr("ray.remote", lambda served: served)
    assert backends.load_replica()().server_class is server


# --- SGLang on a CPU ---


VERLS = "verl.workers.rollout.sglang_rollout.sglang_rollout.ServerAdapter"
KEY = ("sglang", "async")


@pytest.mark.parametrize(
    ("machine", "ours", "shim"),
    [
        ({"chosen", "installed"}, True, True),
        ({"chosen", "installed", "gpu build"}, True, True),
        ({"chosen"}, True, False),
        ({"chosen", "installed", "gpu build", "gpu"}, False, False),
        ({"installed"}, False, True),  # Transformers imports torchvision all the same
        ({"installed", "gpu build"}, False, False),  # the head node of a GPU cluster
    ],
)
def test_register_chooses_push_and_shim_by_the_machine(
    monkeypatch: pytest.MonkeyPatch, machine: set[str], ours: bool, shim: bool
) -> None:
    before = [path for path in sys.path if path != sglang_cpu.SHIM]
    monkeypatch.setattr(sys, "path", list(before))
    monkeypatch.setitem(_ROLLOUT_REGISTRY, KEY, VERLS)
    monkeypatch.setenv(sglang_cpu.SWITCH, "1" if "chosen" in machine else "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "gpu" in machine)
    monkeypatch.setattr(torch.version, "cuda", "13.0" if "gpu build" in machine else None)
    monkeypatch.setattr(sglang_cpu, "is_installed", lambda: "installed" in machine)
    for _ in range(2):
        sglang_cpu.register()
    assert _ROLLOUT_REGISTRY[KEY] == (f"{backends.SGLANG}.CpuServerAdapter" if ours else VERLS)
    assert sys.path == [sglang_cpu.SHIM] * shim + before


def test_an_installed_kernel_package_goes_before_the_stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [sglang_cpu.SHIM, str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "sgl_kernel", raising=False)
    import sgl_kernel

    assert sgl_kernel.__file__ == str(tmp_path / "sgl_kernel" / "__init__.py")
