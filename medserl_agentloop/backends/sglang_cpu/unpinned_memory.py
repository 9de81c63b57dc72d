"""A plugin of SGLang's: prompt log-probs without pinned memory, which exists beside an accelerator only.

sglang/srt/layers/logits_processor.py (lines 541-546 and 613-617 of 0.5.12) pins on every platform. That code
runs for requests that ask for log-probs of the prompt, and for every request that the scheduler takes back
when the KV pool is full and starts again later; without this, it ends the scheduler.
SGLang finds :func:`install` through the entry-point group ``sglang.srt.plugins``, in each of its processes.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch


class _TorchWithoutPinning(ModuleType):
    """``torch`` as one module sees it. ``torch.tensor`` itself stays as it is: models are built with it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(*args, **kwargs)


def install() -> None:
    """Called by SGLang before a model is built. With a GPU nothing happens."""
    if torch.cuda.is_available():
        return
    from sglang.srt.layers import logits_processor

    logits_processor.torch = _TorchWithoutPinning("torch")
