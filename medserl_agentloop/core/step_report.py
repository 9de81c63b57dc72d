"""What a training step reports: numbers on disk, a line on the screen, and a few games in Weights & Biases."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from medserl_agentloop.core.interaction import Interaction
from medserl_agentloop.core.records import GameRecord

TABLE_NAME = "selfplay/games_table"

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
    """The numbers that say whether a step is healthy on one line, labels and metrics ``of_game`` between the core's."""
    every = (*_FIRST, *of_game, *_LAST)
    shown = [(label, name) for label, name in every if name in metrics and (metrics[name] or name not in _UNLESS_ZERO)]
    return ", ".join(f"{label} {metrics[name]:.3g}" for label, name in shown)


def log_games(
    game: Interaction[Any, Any],
    records: Sequence[GameRecord],
    step: int,
    count: int,
    loggers: str | Iterable[str],
) -> None:
    """Log up to ``count`` games of one step as ``selfplay/games_table``, to the W&B run that verl opened.

    ``loggers`` is ``trainer.logger``; without ``wandb`` in it nothing happens.
    """
    if not count or not records or "wandb" not in ([loggers] if isinstance(loggers, str) else loggers):
        return
    import wandb  # slow to import, and only runs that log to it need it

    table = game.table(records, count)
    if wandb.run is None or table is None:
        return
    columns, rows = table
    data = [[_encodable(cell) for cell in row] for row in rows]
    # A table per step: W&B keeps them all, and one that grew would be written anew in every step.
    # With an explicit step W&B holds the row open, so that verl's metrics of this step join it.
    wandb.run.log({TABLE_NAME: wandb.Table(columns=list(columns), data=data)}, step=step)


def _encodable(cell: Any) -> Any:
    """Text with its lone surrogates spelt out, which a model may write and UTF-8 cannot hold."""
    return cell.encode("utf-8", errors="backslashreplace").decode() if isinstance(cell, str) else cell
