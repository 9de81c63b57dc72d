"""Notes with numbered sentences: how they are shown, and a note in which another sentence stands
behind a number.

Sentences by number are in the note's order and as they stand in it: only white space is between
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise

from rapidfuzz.distance import Postfix, Prefix

from medserl_agentloop.games.medical.edits import one_line, sentences_in
from medserl_agentloop.scoring.notes import alphanumeric


def number_sentences(note: str, listed: Mapping[int, str] = {}) -> dict[int, str]:
    """The sentences of ``note``, by the numbers of ``listed`` where that is a list of them, else
    the project's from 0.

    ``listed`` is what the source has. One sentence may read otherwise: a source lists those of one
    of two notes.
    """
    return _as_listed(note, listed) or dict(enumerate(sentences_in(note)))


def _as_listed(note: str, listed: Mapping[int, str]) -> dict[int, str]:
    """The parts of ``note`` that ``listed`` numbers; empty if more than one of its sentences is
    another one there.

    Only letters and digits are compared: lists drop apostrophes, stops and line breaks.
    """
    parts = {number: letters for number, text in listed.items() if (letters := alphanumeric(text))}
    if not parts or min(listed) < 0:
        return {}
    letters, wanted = alphanumeric(note), "".join(parts.values())
    places = [at for at, character in enumerate(note) if character.isalnum()]
    starts = [0, *accumulate(map(len, parts.values()))]  # the last one is the end
    # The sentences before ``first`` are the same, and those from ``rest`` on: one between may be
    # another one.
    same = Prefix.similarity(letters, wanted)
    first = max(start for start in starts if start <= same)
    rest = len(wanted) - Postfix.similarity(letters[first:], wanted[first:])
    if any(first < start < rest for start in starts[:-1]):
        return {}
    moves = first + 1  # from where on sentences stand elsewhere than in the list
    if (
        0 < first < len(wanted)
        and rest <= first
        and len(sentences_in(note[places[first - 1] : places[first] + 1])) < 2
    ):
        # what comes in between two sentences is the end of one, not the beginning of the next
        moves = first
    starts = [start + (len(letters) - len(wanted)) * (start >= moves) for start in starts]
    if any(start >= end for start, end in pairwise(starts)):  # a sentence is missing
        return {}
    cuts = [
        _before_signs(note, places[s], listed[n]) if s else 0
        for n, s in zip(parts, starts[:-1], strict=True)
    ]
    return {
        n: note[cut:end].strip()
        for n, cut, end in zip(parts, cuts, [*cuts[1:], len(note)], strict=True)
    }


def _before_signs(note: str, start: int, sentence: str) -> int:
    """Return where a sentence begins whose first letter is at ``start``, with the signs before the
    letter.
    """
    signs = sentence.split(alphanumeric(sentence)[0], 1)[0]
    for sign in reversed("".join(signs.split())):
        before = len(note[:start].rstrip()) - 1
        if before < 0 or note[before] != sign:
            break
        start = before
    return start


def numbered_text(sentences: Mapping[int, str]) -> str:
    """A note as players read it where they name sentences by number: each on a line of its own."""
    return "\n".join(f"{number}| {one_line(text)}" for number, text in sentences.items())


def replace_sentence(note: str, sentences: Mapping[int, str], number: int, new: str) -> str:
    """``note`` with ``new`` for its sentence of that number."""
    before, after = around(note, sentences, number)
    return before + new + after


def around(note: str, sentences: Mapping[int, str], number: int) -> tuple[str, str]:
    """The text before and after the sentence of that number."""
    at = 0
    for other, text in sentences.items():
        at = note.index(text, at)
        if other == number:
            break
        at += len(text)
    return note[:at], note[at + len(sentences[number]) :]


def change_between(note: str, sentences: Mapping[int, str], other: str) -> tuple[int, str] | None:
    """Number and new text of the one sentence of ``note`` by which ``other`` differs; None if there
    is no such one.
    """
    again = _as_listed(other, sentences)
    changed = [number for number, text in again.items() if text != sentences.get(number)]
    if len(changed) != 1:
        return None
    number, new = changed[0], again[changed[0]]
    same = one_line(replace_sentence(note, sentences, number, new)) == one_line(other)
    return (number, new) if same else None


def sentences_with(error: str, correction: str, sentences: Iterable[str]) -> list[str]:
    """Those of ``sentences`` in which ``error`` stands, or that are a part of it which
    ``correction`` lacks.
    """
    error, correction = one_line(error), one_line(correction)
    lines = ((text, one_line(text)) for text in sentences)
    return [
        text for text, line in lines if error in line or (line in error and line not in correction)
    ]
