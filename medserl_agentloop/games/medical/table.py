"""The one table of games: a row for each, as W&B, the page of a report and the frames for notebooks show it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from rich.text import Text

from medserl_agentloop.command_line import visible
from medserl_agentloop.games.medical.edits import changed_runs
from medserl_agentloop.games.medical.records import MedicalRecord
from medserl_agentloop.games.medical.types import Role


class Column(NamedTuple):
    """A column: its pandas dtype, what it says, and how it is read from a game's record."""

    dtype: str  # Int64, Float64 and boolean hold missing values
    meaning: str
    value: Callable[[MedicalRecord], Any] = lambda record: None


def _word(value: Any) -> str | None:
    return str(value.value) if value else None


GAMES = {
    "step": Column("Int64", "training step that used the game", lambda g: g.step),
    "uid": Column("string", "prompt group", lambda g: g.uid),
    "session": Column("Int64", "number of the game within its group", lambda g: g.session),
    "category": Column("string", "kind of game", lambda g: g.category.value),
    "outcome": Column("string", "how it ended", lambda g: g.outcome.value),
    "right": Column(
        "boolean", "whether the assessor was right; missing without a verdict", lambda g: g.outcome.is_right
    ),
    "void": Column("string", "why the game does not count", lambda g: g.void),
    "invalid": Column("string", "why the attack does not count", lambda g: _word(g.attack and g.attack.invalid)),
    "intended": Column("string", "label the row asks for", lambda g: g.spec.target_label.value),
    "judged": Column("string", "label of the presented note", lambda g: _word(g.label)),
    "judge": Column("string", "who gave it", lambda g: g.judgement.judge if g.judgement else None),
    "verdict": Column(
        "string",
        "the assessor's verdict; missing if unreadable",
        lambda g: _word(g.assessment and g.assessment.verdict),
    ),
    "error_type": Column("string", "type of the case's error", lambda g: _word(g.spec.error_type)),
    "text_id": Column("string", "source row", lambda g: g.spec.text_id),
    "vignette_id": Column("string", "case", lambda g: g.spec.vignette_id),
    "attacker_reward": Column("Float64", "sum of the components", lambda g: g.reward(Role.ATTACKER.value)),
    "assessor_reward": Column("Float64", "sum of the components", lambda g: g.reward(Role.ASSESSOR.value)),
    "signal": Column("boolean", "whether the rewards of a role differ within the group"),  # by medserl_agentloop.report
    "changed_words": Column("Int64", "words the attack changed", lambda g: g.attack and g.attack.changed_words),
    "attacker_tokens": Column("Int64", "length of the turn", lambda g: g.attack and g.attack.tokens),
    "assessor_tokens": Column("Int64", "length of the turn", lambda g: g.assessment and g.assessment.tokens),
    "policy_version": Column("Int64", "step after which the weights were pushed", lambda g: g.policy_version),
    "finished": Column(
        "datetime64[s, UTC]", "when its last turn was over; missing in old records", lambda g: g.finished
    ),
}
"""The facts of a game, without its texts: a run may have a million games."""


def _marked_note(game: MedicalRecord) -> str:
    """The note after the attack with its changes marked, whether the assessor saw it or not."""
    note = game.attack.note if game.attack else game.presented_note
    return marked_changes(game.spec.seed_note, note).plain.strip() if note else ""


def _assessments(game: MedicalRecord) -> str:
    """Verdict and answer of each assessment."""
    return "\n\n".join(f"[{_word(each.verdict) or 'unreadable'}] {each.response}" for each in game.assessments)


def _components(game: MedicalRecord) -> str:
    """Every component of every role, e.g. ``assessor: game +1.00, format +0.00``."""
    return "; ".join(
        f"{role.value}: " + ", ".join(f"{name} {value:+.2f}" for name, value in components.items())
        for role, components in game.rewards.items()
    )


TEXTS = {
    "seed_note": Column("string", "note that the game starts from", lambda g: g.spec.seed_note),
    "presented_note": Column("string", "note after the attack, its changes marked", _marked_note),
    "attacker_reasoning": Column("string", "never shown to the assessor", lambda g: g.attack and g.attack.reasoning),
    "assessment": Column("string", "the assessor's verdict and answer; of several, each", _assessments),
    "rewards": Column("string", "the components of each role", _components),
    "judge_reason": Column("string", "the judge's own words", lambda g: g.judgement and g.judgement.reason),
}
"""Texts of a game, for tables of a few games."""

TO_READ = (
    *("step", "category", "seed_note", "presented_note", "invalid", "attacker_reasoning", "verdict", "assessment"),
    *("outcome", "void", "attacker_reward", "assessor_reward", "rewards", "judge", "judged", "judge_reason"),
)
"""Columns of a table in which a few games are read."""


def table_to_read(records: Sequence[MedicalRecord], count: int) -> tuple[Sequence[str], list[list[Any]]]:
    """The columns :data:`TO_READ`, and their values in up to ``count`` games of varied outcomes."""
    columns = GAMES | TEXTS
    rows = [[columns[name].value(game) for name in TO_READ] for game in varied_games(records, count)]
    return TO_READ, rows


def varied_games(records: Sequence[MedicalRecord], count: int) -> list[MedicalRecord]:
    """Up to ``count`` games, the outcomes in turn, so that a rare one is not crowded out."""
    by_outcome: dict[str, list[MedicalRecord]] = defaultdict(list)
    for record in records:
        by_outcome[record.outcome.value].append(record)
    rounds = zip_longest(*(by_outcome[outcome] for outcome in sorted(by_outcome)))
    return [record for games in rounds for record in games if record is not None][:count]


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
