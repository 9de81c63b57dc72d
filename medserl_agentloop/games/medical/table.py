"""Games as rows of a table, to read in Weights & Biases."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from medserl_agentloop.games.medical.marking import marked_changes
from medserl_agentloop.games.medical.records import GameRecord
from medserl_agentloop.games.medical.types import Role

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


def _rewards(record: GameRecord) -> str:
    """Every component of every role, e.g. ``assessor: game +1.00, format +0.00``."""
    return "; ".join(
        f"{role.value}: " + ", ".join(f"{name} {value:+.2f}" for name, value in record.rewards[role].items())
        for role in Role
        if role in record.rewards
    )
