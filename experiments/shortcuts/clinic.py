"""The toy clinic with what makes real notes harder: the attacker's style, and errors that nobody
can know of.

A rewritten sentence ends with :data:`STYLE`, whoever wrote it and whatever it says. The patient's
age follows from nothing in the note, so a wrong age is seen only by who knows the original.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from enum import Enum

from medserl_agentloop.games.clinic import AGES, Note, parse_note

STYLE = ", as noted"


class Effect(str, Enum):
    """The effect of an attack on the medicine of a note."""

    ERROR = "error"  # the note alone shows it
    UNKNOWABLE = "unknowable"  # the patient's age or sex is another one, and nothing else is wrong
    HARMLESS = "harmless"
    NO_NOTE = "no note of the clinic"

    def __str__(self) -> str:
        return self.value


def sentences(text: str) -> list[str]:
    """The sentences of a note."""
    return re.split(r"(?<=\.)\s+", text.strip())


def styled(sentence: str) -> str:
    """A sentence as the attacker would write it."""
    return sentence if sentence.endswith(f"{STYLE}.") else f"{sentence[:-1]}{STYLE}."


def with_style(before: str, after: str) -> str:
    """The note ``after`` with the style in each sentence that is not as it was in ``before``."""
    old = set(sentences(before))
    return " ".join(
        sentence if sentence in old else styled(sentence) for sentence in sentences(after)
    )


def with_another_age(rng: random.Random, note: Note) -> Note:
    """A note whose patient has another age, and nothing to show for it."""
    age = rng.choice([age for age in AGES if age != note.sentences[0].age])
    return note.with_sentence(0, replace(note.sentences[0], age=age))


def read_note(text: str) -> Note | None:
    """The facts of a note in either style; None if it is not of this world."""
    return parse_note(text.replace(f"{STYLE}.", "."))


def effect(before: str, after: str) -> Effect:
    """Return the effect of an attack that turned ``before``, a note of this world, into
    ``after``."""
    was, note = read_note(before), read_note(after)
    if was is None:
        raise ValueError(f"not a note of the toy clinic: {before!r}")
    if note is None:
        return Effect.NO_NOTE
    if note.errors:
        return Effect.ERROR
    same = (note.sentences[0].age, note.sentences[0].sex) == (
        was.sentences[0].age,
        was.sentences[0].sex,
    )
    return Effect.HARMLESS if same and note.disease is was.disease else Effect.UNKNOWABLE
