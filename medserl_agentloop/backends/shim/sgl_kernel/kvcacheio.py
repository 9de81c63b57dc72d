"""Replaces SGLang's kernels if they are not installed: their wheels need an accelerator.

SGLang imports these names on every platform but NPU, XPU and MPS. ``sgl_kernel`` has nothing else
on purpose, and an installed one takes precedence because this one has no ``__init__.py``: SGLang
assumes that it has a feature if it can import its name. sglang/srt/mem_cache/memory_pool_host.py
(lines 46-61 of 0.5.12) copies the KV cache between host and device with them.
"""

from typing import NoReturn


def _unavailable(*args: object, **kwargs: object) -> NoReturn:
    raise NotImplementedError("sgl_kernel.kvcacheio needs an accelerator")


def __getattr__(name: str) -> object:
    if not name.startswith("transfer_kv_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _unavailable
