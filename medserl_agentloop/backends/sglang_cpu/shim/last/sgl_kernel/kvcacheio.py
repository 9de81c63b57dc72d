"""The names that SGLang imports on every platform but NPU, XPU and MPS, and needs beside an accelerator only.

sglang/srt/mem_cache/memory_pool_host.py (lines 46-61 of 0.5.12) copies the KV cache between host and device
with them, for the hierarchical cache.
"""

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.startswith("transfer_kv_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def unavailable(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.kvcacheio.{name} needs an accelerator")

    return unavailable
