"""Found before the real torchvision, which it loads and replaces itself with.

PyPI's torchvision is built for CUDA. With a CPU build of torch its native library does not load
(torchvision/extension.py keeps silent about that), and torchvision/_meta_registrations.py (lines
163 and 177 of 0.28.0) then fails on two operators that only the library declares. SGLang imports
torchvision for ``decode_jpeg`` (sglang/srt/utils/common.py, line 90 of 0.5.12), which a text model
never calls; Transformers imports it wherever it is installed.
"""

import os
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

import torch

_HERE = os.path.dirname(os.path.abspath(__file__))
_others = [path for path in sys.path if os.path.abspath(path) != _HERE]
_spec = PathFinder.find_spec("torchvision", _others)
if _spec is None or _spec.origin is None or _spec.loader is None:
    raise ModuleNotFoundError("torchvision is not installed", name="torchvision")
with suppress(OSError):
    torch.ops.load_library(Path(_spec.origin).with_name("_C.so"))  # type: ignore[no-untyped-call]
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{_name}", _signature)

_real = module_from_spec(_spec)
sys.modules["torchvision"] = _real
_spec.loader.exec_module(_real)
