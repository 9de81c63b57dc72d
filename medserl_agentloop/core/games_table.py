"""A table of games in Weights & Biases: a few of every step, to read while the run goes on.

Called by the trainer. It writes to the run that verl opened, and does nothing where there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from medserl_agentloop.core.interaction import Interaction
from medserl_agentloop.core.records import GameRecord

TABLE_NAME = "selfplay/games_table"


def log_games(
    game: Interaction[Any, Any],
    records: Sequence[GameRecord],
    step: int,
    count: int,
    loggers: str | Iterable[str],
) -> None:
    """Log up to ``count`` games of one step as ``selfplay/games_table``.

    Args:
        game: Says what a row shows.
        records: The games of the step.
        step: The training step, which verl logs its metrics under as well.
        count: How many games at most.
        loggers: ``trainer.logger``; without ``wandb`` in it nothing happens.
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
