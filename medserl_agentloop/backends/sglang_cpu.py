"""verl's own SGLang rollout without an accelerator.

verl's replica, server and client are unchanged. Three things are added: a weight push that needs no
CUDA (``sglang_adapters.py``), replacements for what SGLang imports with an accelerator (``shim/``),
and memory that is not pinned. The plugin calls :func:`register` in every process; with a GPU
nothing happens.

``python -m medserl_agentloop.backends.sglang_cpu --model-path FOLDER --port 30000`` starts SGLang's
OpenAI-compatible server on the CPU, for a judge, an opponent or an evaluation that asks a server.
It takes all arguments of ``sglang.launch_server``, after those of ``NEEDS_NO_ACCELERATOR``.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

SWITCH = "SGLANG_USE_CPU_ENGINE"  # SGLang's own switch for its CPU engine; the recipes set it to 1
SHIM = str(Path(__file__).parent / "shim")
PINNING = ("layers.logits_processor", "lora.layers", "lora.backend.torch_backend")
"""Modules of ``sglang.srt`` that pin memory."""
NEEDS_NO_ACCELERATOR = (
    "--device=cpu",
    "--dtype=float32",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--grammar-backend=llguidance",
    "--disable-overlap-schedule",
    # Otherwise a small model bound to a schema writes blank lines until its budget is spent.
    "--constrained-json-disable-any-whitespace",
)


def register() -> None:
    """Make ``rollout.name=sglang`` run on the CPU, here and in processes spawned from here."""
    if torch.cuda.is_available():
        return
    # With a CPU build of torch, PyPI's torchvision cannot be imported without the shim, and
    # Transformers tries to wherever it is installed, even in the process that reads the recipe and
    # does not know the choice yet.
    cpu_build = torch.version.cuda is None and torch.version.hip is None
    if (is_chosen() or cpu_build) and is_installed() and SHIM not in sys.path:
        sys.path.insert(0, SHIM)  # before what is installed; what SGLang spawns inherits it
    if is_chosen():
        from verl.workers.rollout.base import _ROLLOUT_REGISTRY

        _ROLLOUT_REGISTRY[("sglang", "async")] = (
            "medserl_agentloop.backends.sglang_adapters.CpuServerAdapter"
        )


def is_chosen() -> bool:
    return not torch.cuda.is_available() and os.environ.get(SWITCH) == "1"


def is_installed() -> bool:
    """Return whether SGLang is installed, with torchvision, which it needs."""
    specs = (find_spec(name) for name in ("sglang", "torchvision"))
    return all(spec is not None and spec.origin is not None for spec in specs)


class _TorchWithoutPinning(ModuleType):
    """Replaces ``torch`` in one module; the real ``torch.tensor`` is unchanged: models need it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    tensor = staticmethod(lambda *args, pin_memory=False, **kwargs: torch.tensor(*args, **kwargs))
    zeros = staticmethod(lambda *args, pin_memory=False, **kwargs: torch.zeros(*args, **kwargs))


def unpin_memory() -> None:
    """Let SGLang work without pinned memory. With a GPU nothing happens.

    SGLang 0.5.12 pins memory when it serves adapters, returns prompt log-probs or restarts a
    request, and that kills the scheduler. It calls this plugin (``sglang.srt.plugins``) in each
    process before a model is built.
    """
    if torch.cuda.is_available():
        return
    for name in PINNING:
        vars(importlib.import_module(f"sglang.srt.{name}"))["torch"] = _TorchWithoutPinning("torch")
    # The same for tensors: this process is all SGLang's.
    setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor)  # noqa: B010  (typed)


if __name__ == "__main__":
    os.environ[SWITCH] = "1"
    register()
    sys.argv[1:] = [*NEEDS_NO_ACCELERATOR, *sys.argv[1:]]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
