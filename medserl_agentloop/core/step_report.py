"""The numbers of a training step: those that go on disk, and the few that go on screen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_FIRST = (("lost games", "selfplay/lost_games"), ("void", "selfplay/void_rate"))
_LAST = (
    ("grad norm", "actor/grad_norm"),
    ("rollout/actor prob diff", "training/rollout_probs_diff_max"),
    ("seconds", "timing_s/step"),
)
_UNLESS_ZERO = ("selfplay/void_rate",)


def step_numbers(metrics: Mapping[str, Any], timing: Mapping[str, float]) -> dict[str, float]:
    """What of a step's metrics can be written as JSON, timings in seconds as ``timing_s/…``.

    verl answers NaN where a step trained on no token; such a number is left out.
    """
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float, np.number))}
    finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
    return finite | {f"timing_s/{name}": seconds for name, seconds in timing.items()}


def step_line(metrics: Mapping[str, float], of_game: Sequence[tuple[str, str]]) -> str:
    """The numbers that say whether a step is healthy, on one line; what a step lacks is left out.

    Args:
        metrics: The step's numbers.
        of_game: The game's own part of the line: label and metric.
    """
    every = (*_FIRST, *of_game, *_LAST)
    shown = [(label, name) for label, name in every if name in metrics and (metrics[name] or name not in _UNLESS_ZERO)]
    return ", ".join(f"{label} {metrics[name]:.3g}" for label, name in shown)
