"""The platform "cpu" is chosen by VERL_PLATFORM=cpu, in no other way, and leaves other runs alone."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import verl  # noqa: F401  the plugin's registrations run while verl is imported
from real_runs import printed_by
from verl.plugin.platform import PlatformRegistry
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.rollout.base import _ROLLOUT_REGISTRY

from medserl_agentloop import backends
from medserl_agentloop.backends import engines, register
from medserl_agentloop.backends.cpu_platform import PlatformCPU, register_gloo
from medserl_agentloop.backends.role_adapters import RoleAdapters
from medserl_agentloop.testing.tiny import tiny_model

REPORT = """
import sys
import verl
from medserl_agentloop.backends import register
register()
register()
from verl.plugin.platform import get_platform
engines = getattr(sys.modules.get("verl.workers.engine.base"), "EngineRegistry", None)
print(get_platform().device_name, engines, "transformers.modeling_utils" in sys.modules)
"""


@pytest.mark.slow
def test_cpu_platform_is_inactive_and_light_without_verl_platform(tmp_path: Path) -> None:
    # Without plugins: this looks at register() alone, not at what the rest of the package does at `import verl`.
    printed = printed_by(tmp_path, "-W", "ignore", "-c", REPORT, VERL_PLATFORM="", VERL_USE_EXTERNAL_PLUGINS="none")
    assert printed.splitlines()[-1] == "cuda None False"


def test_the_platform_is_registered_whole_but_never_auto_detected() -> None:
    register()
    assert PlatformRegistry.get("cpu") is PlatformCPU and not PlatformCPU.__abstractmethods__
    platform = PlatformCPU()
    assert not platform.is_platform_available(use_smi_check=True) and not platform.is_platform_available()
    assert torch.zeros(1).to(platform.current_device()).device.type == "cpu"
    assert platform.ray_resource_options(1) == {"num_gpus": 1}


def test_the_device_module_has_the_calls_that_verl_makes_on_every_device() -> None:
    device = PlatformCPU().device_module
    free, total = device.mem_get_info()
    assert 0 < free <= total
    assert device.memory_allocated() > 0
    assert device.max_memory_reserved() > 0
    state = device.get_rng_state()
    first = torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    for call in (device.empty_cache, device.synchronize, device.ipc_collect):
        assert call() is None
    assert device.current_stream() is not None  # falls through to torch.cpu


def test_torch_starts_gloo_under_the_name_that_verl_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    register_gloo()
    monkeypatch.setattr("verl.utils.distributed.get_device_name", lambda: PlatformCPU.device_name)
    monkeypatch.setattr("verl.utils.distributed.get_nccl_backend", PlatformCPU().communication_backend_name)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    initialize_global_process_group_ray()
    try:
        assert torch.distributed.get_backend() == "cpu:gloo,cpu:gloo"
        torch.distributed.all_reduce(ones := torch.ones(2))
        assert ones.tolist() == [1, 1]
    finally:
        torch.distributed.destroy_process_group()


def test_a_gpu_run_gets_the_engine_and_the_replica_that_know_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    backends.register_adapters()
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "nvidia")
    engine = EngineRegistry.get_engine_cls("language_model", "fsdp2")
    assert issubclass(engine, RoleAdapters) and issubclass(engine, FSDPEngineWithLMHead)
    for attention, expected in (("sdpa", engines.PACKED), ("eager", "eager")):
        model = tiny_model(100, attention=attention)
        monkeypatch.setattr(FSDPEngineWithLMHead, "_build_module", lambda self, built=model: built)
        assert engine._build_module(object.__new__(engine)).config._attn_implementation == expected
    assert _ROLLOUT_REGISTRY[("sglang", "async")] == "medserl_agentloop.backends.sglang_adapters.ServerAdapter"


def test_sglangs_flag_is_set_before_the_servers_module_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    module, server = ModuleType(backends.SGLANG), type("AdapterServer", (), {})
    module.AdapterServer = server  # type: ignore[attr-defined]

    def load() -> type:
        monkeypatch.setitem(sys.modules, backends.SGLANG, module)  # from here on it can be imported
        return type("SGLangReplica", (), {})

    monkeypatch.setattr("verl.workers.rollout.replica._load_sglang", load)
    monkeypatch.setattr("ray.remote", lambda served: served)
    assert backends.load_replica()().server_class is server
