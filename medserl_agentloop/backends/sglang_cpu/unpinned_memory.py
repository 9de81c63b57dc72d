"""A plugin of SGLang's: what pins memory, which exists beside an accelerator only, works without.

SGLang 0.5.12 pins on every platform in three places. ``layers/logits_processor.py`` does it for requests that ask for
log-probs of the prompt, and for every request that the scheduler takes back when the KV pool is full and starts again
later; ``lora/layers.py`` and ``lora/backend/torch_backend.py`` do it wherever adapters are served. Without this, they
end the scheduler. SGLang finds :func:`install` through the entry-point group ``sglang.srt.plugins``, in each of its
processes.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

PINNING = ("layers.logits_processor", "lora.layers", "lora.backend.torch_backend")
"""Modules of ``sglang.srt``."""


class _TorchWithoutPinning(ModuleType):
    """``torch`` as one module sees it. ``torch.tensor`` itself stays as it is: models are built with it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(*args, **kwargs)

    @staticmethod
    def zeros(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **kwargs)


def install() -> None:
    """Called by SGLang before a model is built. With a GPU nothing happens."""
    if torch.cuda.is_available():
        return
    for name in PINNING:
        vars(importlib.import_module(f"sglang.srt.{name}"))["torch"] = _TorchWithoutPinning("torch")
    # The same of a tensor: all of this process is SGLang's.
    torch.Tensor.pin_memory = _stay  # type: ignore[assignment]


def _stay(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    return tensor
