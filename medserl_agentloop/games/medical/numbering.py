"""Notes with numbered sentences: how they are shown, and a note in which another sentence stands behind a number.

Sentences by number are in the note's order and as they stand in it: only white space is between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from medserl_agentloop.games.medical.edits import one_line, sentences_in


def number_sentences(note: str, listed: Mapping[int, str] = {}) -> dict[int, str]:
    """The sentences of ``note``, by the numbers of ``listed`` where that is a list of them, else the project's from 0.

    ``listed`` is what the source has. One sentence may read otherwise: a source lists those of one of two notes.
    """
    return _as_listed(note, listed) or dict(enumerate(sentences_in(note)))


def _as_listed(note: str, listed: Mapping[int, str]) -> dict[int, str]:
    """The parts of ``note`` that ``listed`` numbers; empty if more than one of its sentences is another one there.

    Only letters and digits are compared: lists drop apostrophes, stops and line breaks.
    """
    if min(listed, default=-1) < 0:
        return {}
    places = [at for at, character in enumerate(note) if character.isalnum()]
    letters = _letters(note)
    left = [(number, text) for number, listing in listed.items() if (text := _letters(listing))]
    first, end = 0, len(letters)
    starts, behind = dict[int, int](), dict[int, int]()
    while left and letters.startswith(left[0][1], first):
        number, text = left.pop(0)
        starts[number] = first
        first += len(text)
    while left and letters.endswith(left[-1][1], first, end):
        number, text = left.pop()
        end -= len(text)
        behind = {number: end, **behind}
    if len(left) == 1 and first < end:
        starts[left[0][0]] = first
    elif left or not (starts or behind):
        return {}
    elif first < end and behind and (not first or len(sentences_in(note[places[first - 1] : places[first] + 1])) > 1):
        behind[next(iter(behind))] = first  # it begins otherwise than in the list; else one ends otherwise
    starts |= behind
    cuts = [_before_signs(note, places[start], listed[number]) if start else 0 for number, start in starts.items()]
    return {
        number: note[cut:until].strip() for number, cut, until in zip(starts, cuts, [*cuts[1:], len(note)], strict=True)
    }


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text))


def _before_signs(note: str, start: int, sentence: str) -> int:
    """Return where a sentence begins whose first letter is at ``start``, with the signs before the letter."""
    signs = sentence.split(_letters(sentence)[0], 1)[0]
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
    """Number and new text of the one sentence of ``note`` by which ``other`` differs; None if there is no such one."""
    again = _as_listed(other, sentences)
    changed = [number for number, text in again.items() if text != sentences.get(number)]
    if len(changed) != 1:
        return None
    number, new = changed[0], again[changed[0]]
    same = one_line(replace_sentence(note, sentences, number, new)) == one_line(other)
    return (number, new) if same else None


def sentences_with(error: str, correction: str, sentences: Iterable[str]) -> list[str]:
    """Those of ``sentences`` in which ``error`` stands, or that are a part of it which ``correction`` lacks."""
    error, correction = one_line(error), one_line(correction)
    lines = ((text, one_line(text)) for text in sentences)
    return [text for text, line in lines if error in line or (line in error and line not in correction)]
