"""Games for a reader: what a rewritten note changes, and games as rows of a table in Weights & Biases."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from rich.text import Text

from medserl_agentloop.command_line import visible
from medserl_agentloop.games.medical.edits import changed_runs
from medserl_agentloop.games.medical.records import MedicalRecord
from medserl_agentloop.games.medical.types import Role


def varied_games(records: Sequence[MedicalRecord], count: int) -> list[MedicalRecord]:
    """Up to ``count`` games, the outcomes in turn, so that a rare one is not crowded out."""
    by_outcome: dict[str, list[MedicalRecord]] = defaultdict(list)
    for record in records:
        by_outcome[record.outcome.value].append(record)
    rounds = zip_longest(*(by_outcome[outcome] for outcome in sorted(by_outcome)))
    return [record for games in rounds for record in games if record is not None][:count]


def game_row(record: MedicalRecord) -> dict[str, Any]:
    """One game by column; what it lacks is an empty text or None."""
    attack, said, judgement = record.attack, record.assessments, record.judgement
    presented = attack.note if attack else record.presented_note
    attacked = "none"
    if attack is not None:
        attacked = f"invalid: {attack.invalid.value}" if attack.invalid else "valid"
    # Every component of every role, e.g. "assessor: game +1.00, format +0.00".
    rewards = [
        f"{role.value}: " + ", ".join(f"{name} {value:+.2f}" for name, value in record.rewards[role].items())
        for role in Role
        if role in record.rewards
    ]
    return {
        "step": record.step,
        "category": record.category.value,
        "seed_note": record.spec.seed_note,
        "presented_note": marked_changes(record.spec.seed_note, presented).plain.strip() if presented else "",
        "attack": attacked,
        "attacker_reasoning": attack.reasoning if attack else "",
        "verdict": ", ".join(a.verdict.value if a.verdict else "unreadable" for a in said),
        "assessment": said[0].response if said else "",
        "outcome": f"void: {record.void}" if record.void else record.outcome.value,
        "attacker_reward": record.reward(Role.ATTACKER),
        "assessor_reward": record.reward(Role.ASSESSOR),
        "rewards": "; ".join(rewards),
        "judge": judgement.judge if judgement else "",
        "judge_label": record.label.value if record.label else "",
        "judge_reason": judgement.reason if judgement else "",
    }


def marked_changes(old: str, new: str) -> Text:
    """``new`` with what it has in place of ``old`` marked word by word."""
    before, after = visible(old).split(), visible(new).split()
    text, at = Text(), 0
    for start, end, new_start, new_end in changed_runs(before, after):
        text.append("".join(word + " " for word in after[at:new_start]))
        if start < end:
            text.append("[-" + " ".join(before[start:end]) + "-] ", style="strike dim")
        if new_start < new_end:
            text.append("{+" + " ".join(after[new_start:new_end]) + "+} ", style="bold")
        at = new_end
    return text.append("".join(word + " " for word in after[at:]))
