"""Found before the real torchvision, which it loads and leaves in its own place.

PyPI's torchvision is built for CUDA. With a CPU build of torch its native library does not load
(torchvision/extension.py keeps silent about that), and torchvision/_meta_registrations.py (lines
163 and 177 of 0.28.0) then fails on two operators that only the library declares. SGLang imports
torchvision for ``decode_jpeg`` (sglang/srt/utils/common.py, line 90 of 0.5.12), which a text model
never calls; Transformers imports it wherever it is installed.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

import torch

_HERE = os.path.dirname(os.path.abspath(__file__))


def _has_native_operators(package: Path) -> bool:
    try:
        torch.ops.load_library(package / "_C.so")  # type: ignore[no-untyped-call]  # torch is not
    except OSError:
        return False
    return True


_spec = PathFinder.find_spec(
    "torchvision", [path for path in sys.path if os.path.abspath(path) != _HERE]
)
if _spec is None or _spec.origin is None or _spec.loader is None:
    raise ModuleNotFoundError("torchvision is not installed", name="torchvision")
if not _has_native_operators(Path(_spec.origin).parent):
    for _operator in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{_operator}",
            "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        )

_real = module_from_spec(_spec)
sys.modules["torchvision"] = _real
_spec.loader.exec_module(_real)
