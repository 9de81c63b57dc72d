"""The platform ``cpu`` for verl's PlatformRegistry: no accelerator, gloo, one logical Ray "GPU" per worker.

verl's ``get_platform()`` builds it in every process of a run started with ``VERL_PLATFORM=cpu``.
"""

from __future__ import annotations

import types
from contextlib import nullcontext
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What verl asks of an accelerator and a CPU has no need of: nothing to select, to wait for or to empty."""


def register_gloo() -> None:
    """Register gloo with torch under the name that verl asks for on this platform. Idempotent.

    It is ``cpu:gloo,{device}:{communication backend}`` (``verl/utils/distributed.py``). torch rejects a device that
    appears twice, unless a backend has this name.
    """
    gloo: Any = torch.distributed.ProcessGroupGloo
    torch.distributed.Backend.register_backend("cpu:gloo,cpu:gloo", lambda *group: gloo(*group), devices="cpu")


class _CpuDeviceModule(types.ModuleType):
    """``torch.cpu`` plus the memory and RNG calls that verl makes on every ``torch.<device>``."""

    set_device = synchronize = empty_cache = ipc_collect = reset_peak_memory_stats = staticmethod(_nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return "CPU"

    @staticmethod
    def memory_allocated(device: Any = None) -> int:
        """Resident bytes of this process: what verl's memory metrics show on a CPU."""
        return int(psutil.Process().memory_info().rss)

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    @staticmethod
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    get_rng_state, set_rng_state = staticmethod(torch.get_rng_state), staticmethod(torch.set_rng_state)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):  # type: ignore[misc]
    """verl on a CPU. Chosen with ``VERL_PLATFORM=cpu`` and in no other way."""

    device_name = vendor_name = "cpu"
    device_module = _CpuDeviceModule("torch_cpu_for_verl")
    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = _nothing
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    nvtx_range = staticmethod(nullcontext)

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # never auto-detected: the head node of a GPU cluster often has no GPU itself

    def current_device(self) -> str:
        return "cpu"  # for tensor.to() and torch.device(), where an index would mean an accelerator

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"  # which Ray sets for the logical GPUs that ray_resource_name() asks for

    def ray_resource_name(self) -> str:
        # verl's ResourcePoolManager counts only "GPU" and "NPU"; with ray_kwargs.ray_init.num_gpus=N a node has some.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False
