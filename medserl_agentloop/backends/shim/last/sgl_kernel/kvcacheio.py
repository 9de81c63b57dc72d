"""Stands in for a part of SGLang's kernels where they are not installed: their wheels need an
accelerator.

These are the names that SGLang imports on every platform but NPU, XPU and MPS, and needs beside an
accelerator only. ``sgl_kernel`` offers nothing else on purpose: SGLang takes a name that it can
import for a feature that it has. sglang/srt/mem_cache/memory_pool_host.py (lines 46-61 of 0.5.12)
copies the KV cache between host and device with them, for the hierarchical cache.
"""

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.startswith("transfer_kv_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def unavailable(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.kvcacheio.{name} needs an accelerator")

    return unavailable
