"""The platform of a run with ``VERL_PLATFORM=cpu``: gloo, and one logical Ray "GPU" per worker."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def register_gloo() -> None:
    """Register gloo with torch under the name that verl asks for on this platform.

    It is ``cpu:gloo,{device}:{communication backend}`` (``verl/utils/distributed.py``). torch
    rejects a device that appears twice, unless a backend has this name.
    """
    gloo: Any = torch.distributed.ProcessGroupGloo
    torch.distributed.Backend.register_backend(
        "cpu:gloo,cpu:gloo", lambda *group: gloo(*group), devices="cpu"
    )


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer


_nothing = _always(None)  # a CPU has nothing to select, wait for or empty
_seed = staticmethod(torch.manual_seed)


class _CpuDeviceModule(types.ModuleType):
    """``torch.cpu`` plus the memory and RNG calls that verl makes on every ``torch.<device>``."""

    set_device = synchronize = empty_cache = staticmethod(_nothing)
    ipc_collect = reset_peak_memory_stats = staticmethod(_nothing)
    is_available, get_device_name = staticmethod(_always(True)), staticmethod(_always("CPU"))
    get_rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)
    manual_seed = manual_seed_all = _seed

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    @staticmethod
    def memory_allocated(device: Any = None) -> int:
        """Resident bytes of this process: what verl's memory metrics show on a CPU."""
        return int(psutil.Process().memory_info().rss)

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    @staticmethod
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):  # type: ignore[misc]
    """verl on a CPU. Selected only with ``VERL_PLATFORM=cpu``."""

    device_name = vendor_name = "cpu"
    device_module = _CpuDeviceModule("torch_cpu_for_verl")
    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing
    manual_seed = manual_seed_all = _seed
    nvtx_range = staticmethod(nullcontext)

    is_available = _always(True)
    # Never detected: the head node of a GPU cluster often has no GPU.
    is_platform_available = _always(False)
    # For tensor.to() and torch.device(), where an index would mean an accelerator.
    current_device = _always("cpu")
    device_count = _always(1)
    get_device_capability = _always((None, None))
    communication_backend_name = _always("gloo")
    # verl's ResourcePoolManager counts only "GPU" and "NPU"; with ray_kwargs.ray_init.num_gpus=N a
    # node has some, and Ray sets this variable for them.
    ray_resource_name = _always("GPU")
    visible_devices_envvar = _always("CUDA_VISIBLE_DEVICES")
    ray_noset_envvars = _always([])
    is_ipc_supported = _always(False)
