"""Stands for SGLang's kernels where they are not installed: their wheels need an accelerator.

SGLang imports these names on every platform but NPU, XPU and MPS. ``sgl_kernel`` offers nothing
else on purpose, and gives way to an installed one because it has no ``__init__.py``: SGLang takes a
name that it can import for a feature that it has. sglang/srt/mem_cache/memory_pool_host.py (lines
46-61 of 0.5.12) copies the KV cache between host and device with them.
"""

from typing import NoReturn


def _unavailable(*args: object, **kwargs: object) -> NoReturn:
    raise NotImplementedError("sgl_kernel.kvcacheio needs an accelerator")


def __getattr__(name: str) -> object:
    if not name.startswith("transfer_kv_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _unavailable
