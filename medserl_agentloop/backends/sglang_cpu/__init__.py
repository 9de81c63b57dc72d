"""verl's own SGLang rollout where there is no accelerator.

verl's replica, server and client are used as they are. Two things are added: a weight push that needs no
CUDA (``weights.py``), and stand-ins for what SGLang takes for granted beside an accelerator (``shim/``).
The plugin calls :func:`register` in every process; with a GPU nothing happens.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

SWITCH = "SGLANG_USE_CPU_ENGINE"
"""SGLang's own switch for its CPU engine; the recipes set it to 1."""

_SHIM = Path(__file__).parent / "shim"


def register() -> None:
    """Make ``rollout.name=sglang`` run on the CPU in this process and those it spawns. Idempotent."""
    if torch.cuda.is_available():
        return
    chosen = is_chosen()
    # Beside a CPU build of torch PyPI's torchvision cannot be imported without the shim, and Transformers tries
    # to wherever it is installed: also in the process that reads the recipe and does not know the choice yet.
    cpu_build = torch.version.cuda is None and torch.version.hip is None
    if (chosen or cpu_build) and is_installed():
        _use_shim()
    if chosen:
        from verl.workers.rollout.base import _ROLLOUT_REGISTRY

        # base.py has no registering function in verl 0.9.1; the dict holds names, so nothing is imported yet.
        _ROLLOUT_REGISTRY[("sglang", "async")] = "medserl_agentloop.backends.sglang_cpu.weights.ServerAdapter"


def is_chosen() -> bool:
    """Whether SGLang runs on the CPU here."""
    return not torch.cuda.is_available() and os.environ.get(SWITCH) == "1"


def is_installed() -> bool:
    """Whether SGLang and torchvision, which it cannot do without, are installed."""
    specs = (find_spec(name) for name in ("sglang", "torchvision"))
    return all(spec is not None and spec.origin is not None for spec in specs)


def _use_shim() -> None:
    """Put the stand-ins on ``sys.path``.

    Nothing more is needed for the scheduler and the detokenizer, which SGLang spawns: ``multiprocessing``
    hands ``sys.path`` on. ``shim/first`` goes before what is installed, ``shim/last`` behind it.
    """
    first, last = str(_SHIM / "first"), str(_SHIM / "last")
    if first not in sys.path:
        sys.path.insert(0, first)
        sys.path.append(last)
