"""What reading a player's turn yields, whatever the output format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from medserl_agentloop.game.types import ErrorType, Label


@dataclass(frozen=True)
class ParsedAttack:
    """An attacker's turn.

    Attributes:
        note: The rewritten note, or None where no note can be told apart from the rest.
        reasoning: What stood before the note.
        violations: Ways in which the turn departs from the format; empty if it keeps it.
    """

    note: str | None
    reasoning: str
    violations: tuple[str, ...]


@dataclass(frozen=True)
class ParsedAssessment:
    """An assessor's turn.

    Attributes:
        verdict: The label given to the note, or None where there is no readable one.
        sentence: The sentence said to be wrong, as the assessor copied it.
        error_type: The error's type, where it is one of MEDEC's five.
        correction: The sentence as the assessor would write it.
        reasoning: What stood before the answer.
        violations: Ways in which the turn departs from the format; empty if it keeps it.
    """

    verdict: Label | None
    sentence: str | None
    error_type: ErrorType | None
    correction: str | None
    reasoning: str
    violations: tuple[str, ...]


class _ReadAttack(Protocol):
    def __call__(self, text: str, prefill: str = "") -> ParsedAttack: ...


class _ReadAssessment(Protocol):
    def __call__(self, text: str, prefill: str = "") -> ParsedAssessment: ...


@dataclass(frozen=True)
class Parser:
    """How one prompt profile's turns are read. Pure functions that never raise.

    Attributes:
        attack: Reads an attacker's turn.
        assessment: Reads an assessor's turn.

    Both get what the player wrote and ``prefill``, how the prompt began the turn for it, e.g.
    ``<think>``.
    """

    attack: _ReadAttack
    assessment: _ReadAssessment
