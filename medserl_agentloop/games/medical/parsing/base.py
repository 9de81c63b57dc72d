"""What one prompt profile's turns look like: how they are read and how they are written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from medserl_agentloop.games.medical.types import ErrorType, Label

THINK, END_THINK = "<think>", "</think>"

CONTRADICTION = "contradictory_verdicts"
"""Violation of an assessment that gives both verdicts; in every format it has none."""


class UnwritableTurn(ValueError):
    """A turn cannot be written so that it is read back as it was meant; the message is a clause."""


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


class _ComposeAttack(Protocol):
    def __call__(self, reasoning: str, note: str, label: Label, prefill: str) -> str: ...


class _ComposeAssessment(Protocol):
    def __call__(
        self,
        reasoning: str,
        verdict: Label,
        sentence: str | None,
        error_type: ErrorType | None,
        correction: str | None,
        prefill: str,
    ) -> str: ...


@dataclass(frozen=True)
class TurnFormat:
    """How one prompt profile's turns are read and written. Pure functions; reading never raises.

    Attributes:
        attack: Reads an attacker's turn.
        assessment: Reads an assessor's turn.
        compose_attack: Writes an attacker's turn, unchecked; None for a format that is only read.
        compose_assessment: The same for the assessor.
        locates: Whether an assessment says sentence, error type and correction besides the verdict.

    All get ``prefill``, how the prompt began the turn for the player, e.g. ``<think>``.
    """

    attack: _ReadAttack
    assessment: _ReadAssessment
    compose_attack: _ComposeAttack | None = None
    compose_assessment: _ComposeAssessment | None = None
    locates: bool = False

    def write_attack(self, reasoning: str, note: str, *, label: Label = Label.HARMFUL, prefill: str = "") -> str:
        """An attacker's turn that is read back as it is given here.

        Args:
            reasoning: What the attacker thinks.
            note: The note it hands over.
            label: What it says the note is, in formats that have it declare that.
            prefill: How the prompt begins the turn; not repeated in the result.

        Raises:
            UnwritableTurn: The format cannot hold these texts, e.g. because they hold its own tags.
        """
        if self.compose_attack is None:
            raise UnwritableTurn("its prompt profile's parser reads turns and cannot write them")
        text = self.compose_attack(reasoning, note, label, prefill)
        read = self.attack(text, prefill)
        _check(read.violations, reasoning=(reasoning, read.reasoning), note=(note, read.note))
        return text

    def write_assessment(
        self,
        reasoning: str,
        verdict: Label,
        sentence: str | None = None,
        error_type: ErrorType | None = None,
        correction: str | None = None,
        *,
        prefill: str = "",
    ) -> str:
        """An assessor's turn that is read back as it is given here, as far as the format says it.

        Raises:
            UnwritableTurn: The format cannot hold these texts.
        """
        if self.compose_assessment is None:
            raise UnwritableTurn("its prompt profile's parser reads turns and cannot write them")
        text = self.compose_assessment(reasoning, verdict, sentence, error_type, correction, prefill)
        read = self.assessment(text, prefill)
        _check(read.violations, reasoning=(reasoning, read.reasoning), verdict=(verdict, read.verdict))
        if self.locates:
            _check(
                (),
                sentence=(sentence, read.sentence),
                error_type=(error_type, read.error_type),
                correction=(correction, read.correction),
            )
        return text


def _check(violations: tuple[str, ...], **fields: tuple[object, object]) -> None:
    if violations:
        raise UnwritableTurn(", ".join(violations))
    for name, (meant, read) in fields.items():
        if meant != read:
            raise UnwritableTurn(f"the {name} is not read back as it was written")


def contradictory(said: Iterable[Label | None]) -> bool:
    """Whether the readable ones of these verdicts differ."""
    return len({label for label in said if label is not None}) > 1


def reasoning_open(prefill: str) -> bool:
    """Whether the prompt has begun the player's reasoning and left it open."""
    return prefill.rfind(THINK) > prefill.rfind(END_THINK)


def reasoning_closed(prefill: str) -> bool:
    """Whether the prompt has ended the reasoning, as templates do that switch thinking off."""
    return prefill.rfind(END_THINK) > prefill.rfind(THINK)


def split_reasoning(text: str, prefill: str) -> tuple[str | None, str]:
    """What was thought and what was said, split at the first ``</think>``.

    Returns:
        The reasoning without its tags, and the rest. The reasoning is None where there is none: no
        ``</think>``, or one that can only be quoted because the prompt had closed the reasoning.
    """
    if reasoning_closed(prefill) and not text.lstrip().startswith(THINK):
        return None, text
    head, closed, rest = text.partition(END_THINK)
    if not closed:
        return None, text
    return head.strip().removeprefix(THINK).strip(), rest


def write_reasoning(reasoning: str, prefill: str) -> str:
    """The reasoning in its tags, without the opening one where the prompt has written it."""
    if not reasoning and not reasoning_open(prefill):
        return ""
    return f"{'' if reasoning_open(prefill) else THINK}{reasoning}{END_THINK}\n"
