"""A table of games in Weights & Biases: a few of every step, to read while the run goes on.

Called by the trainer. It writes to the run that verl opened, and does nothing where there is none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from medserl_agentloop.games.medical.records import GameRecord
from medserl_agentloop.games.medical.types import Role
from medserl_agentloop.report.terminal import marked_changes

TABLE_NAME = "selfplay/games_table"
COLUMNS = (
    "step",
    "category",
    "seed_note",
    "presented_note",
    "attack",
    "attacker_reasoning",
    "verdict",
    "assessment",
    "outcome",
    "attacker_reward",
    "assessor_reward",
    "rewards",
    "judge",
    "judge_label",
    "judge_reason",
)


def log_games(records: Sequence[GameRecord], step: int, count: int, loggers: str | Iterable[str]) -> None:
    """Log up to ``count`` games of one step as ``selfplay/games_table``.

    Args:
        records: The games of the step.
        step: The training step, which verl logs its metrics under as well.
        count: How many games at most.
        loggers: ``trainer.logger``; without ``wandb`` in it nothing happens.
    """
    if not count or not records or "wandb" not in ([loggers] if isinstance(loggers, str) else loggers):
        return
    import wandb  # slow to import, and only runs that log to it need it

    if wandb.run is None:
        return
    rows = [[_encodable(cell) for cell in game_row(record)] for record in varied_games(records, count)]
    # A table per step: W&B keeps them all, and one that grew would be written anew in every step.
    # With an explicit step W&B holds the row open, so that verl's metrics of this step join it.
    wandb.run.log({TABLE_NAME: wandb.Table(columns=list(COLUMNS), data=rows)}, step=step)


def varied_games(records: Sequence[GameRecord], count: int) -> list[GameRecord]:
    """Up to ``count`` games, the outcomes in turn, so that a rare one is not crowded out."""
    by_outcome: dict[str, list[GameRecord]] = defaultdict(list)
    for record in records:
        by_outcome[record.outcome.value].append(record)
    rounds = zip_longest(*(by_outcome[outcome] for outcome in sorted(by_outcome)))
    return [record for games in rounds for record in games if record is not None][:count]


def game_row(record: GameRecord) -> list[Any]:
    """One game as the values of ``COLUMNS``; what it lacks is an empty text or None."""
    attack, assessment, judgement = record.attack, record.assessment, record.judgement
    seed = record.spec.seed_note
    presented = attack.note if attack is not None else record.presented_note
    attacked = "none"
    if attack is not None:
        attacked = f"invalid: {attack.invalid.value}" if attack.invalid else "valid"
    verdict = ""
    if assessment is not None:
        verdict = assessment.verdict.value if assessment.verdict else "unreadable"
    return [
        record.step,
        record.category.value,
        seed,
        marked_changes(seed, presented).plain.strip() if presented else "",
        attacked,
        attack.reasoning if attack else "",
        verdict,
        assessment.response if assessment else "",
        f"void: {record.void}" if record.void else record.outcome.value,
        record.reward(Role.ATTACKER),
        record.reward(Role.ASSESSOR),
        _rewards(record),
        judgement.judge if judgement else "",
        judgement.label.value if judgement and judgement.label else "",
        judgement.reason if judgement else "",
    ]


def _encodable(cell: Any) -> Any:
    """Text with its lone surrogates spelt out, which a model may write and UTF-8 cannot hold."""
    return cell.encode("utf-8", errors="backslashreplace").decode() if isinstance(cell, str) else cell


def _rewards(record: GameRecord) -> str:
    """Every component of every role, e.g. ``assessor: game +1.00, format +0.00``."""
    return "; ".join(
        f"{role.value}: " + ", ".join(f"{name} {value:+.2f}" for name, value in record.rewards[role].items())
        for role in Role
        if role in record.rewards
    )
