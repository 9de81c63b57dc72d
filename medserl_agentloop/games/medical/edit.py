"""The sentences of a note, and the one edit that turns it into another note.

Every attack is a :class:`SentenceEdit`: the ``edits`` format names one directly, and
:func:`edit_between` derives one from a note. The sentences are the row's own if it lists them.

Otherwise :func:`sentences_in` splits: at line breaks, and after a mark before a digit or a letter
that is not lower case, unless an abbreviation precedes it. It finds 301 of the 319 wrong sentences
of MEDEC's validation set as MEDEC lists them (``python benchmarks/sentences.py FILE``); the others
end within vital signs and tables, or go on after a unit (``110/70 mm | Hg.``, ``12 mg/dL. He``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from typing import NamedTuple

import regex
from pydantic import BaseModel, ConfigDict
from rapidfuzz.distance import Levenshtein, MatchingBlock, Postfix, Prefix

from medserl_agentloop.games.medical.canonical import canonical_words, says_the_same
from medserl_agentloop.scoring.notes import IDEOGRAPHS, alphanumeric

_SENTENCE_MARKS = ".!?\"')]\u201d\u2019\u061f\u3002\uff01\uff1f"
# "38.5 C" and "e.g. aspirin" stay whole, and so do "Dr. Doe" and "q.d. Renal function".
_SENTENCE_END = regex.compile(
    r"(?<=[.!?\u061f](?:[\"'\u201d\u2019)\]]{0,2}|\u00e2\u20ac\u009d))"  # MEDEC damages quotes
    r"(?<!\b(?:Drs?|Mrs?|Ms|Prof|Pt|St|Jr|Sr|vs|No|Fig|approx)\.)"
    r"(?<!\b\p{L}\.\p{L}{1,2}\.)(?<!\b\p{L}\.\p{L}\.\p{L}\.)"
    r"\s+(?=[\"'\u201c\u2018(\[]?[\p{Lu}\p{Lo}\p{Nd}])"
    r"|(?<=[\u3002\uff01\uff1f])\s*(?=[^\s\u3002\uff01\uff1f])"
)

LONGEST_WORD = 32  # characters; what is longer, or joined with ``_``, counts as several words
WORD = re.compile(rf"[{IDEOGRAPHS}]|_{{1,{LONGEST_WORD}}}|[^\s_{IDEOGRAPHS}]{{1,{LONGEST_WORD}}}")

# Characters that a model reads but a person does not see: format, control, private and unassigned
# characters, those that fonts do not show, Braille's blank.
_INVISIBLE = regex.compile(
    r"[\p{Cf}\p{Cc}\p{Co}\p{Cn}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}\u2800"
    r"--[\t\n\r\x0b\x0c]]",
    regex.V1,
)
# A Cyrillic, Greek or Coptic letter within a word of Latin ones is there to look like one.
_OTHER_SCRIPT = r"[[\p{Cyrillic}\p{Greek}\p{Coptic}]--[\u03bc]]"
_MIXED = regex.compile(rf"(?<=\p{{Latin}}){_OTHER_SCRIPT}|{_OTHER_SCRIPT}(?=\p{{Latin}})", regex.V1)
_GAP = re.compile(r"\s+")
_LONGEST_GAP = 16  # characters; an indented table of findings needs less


# -- sentences -------------------------------------------------------------------------------------


def one_line(text: str) -> str:
    """``text`` with every run of white space as one space."""
    return " ".join(text.split())


def sentences_in(note: str) -> list[str]:
    """The sentences of ``note``, verbatim."""
    lines = (line.strip() for line in note.splitlines())
    return [part for line in lines for part in _SENTENCE_END.split(line) if part]


def split_sentences(note: str) -> list[str]:
    """The sentences of ``note``, each in one line."""
    return [one_line(sentence) for sentence in sentences_in(note)]


def number_sentences(note: str, listed: Mapping[int, str] = {}) -> dict[int, str]:
    """The sentences of ``note``, verbatim, numbered as in the source's list if that fits, else
    from 0. One sentence may differ: a source lists the sentences of only one of two notes.
    """
    return _as_listed(note, listed) or dict(enumerate(sentences_in(note)))


def _as_listed(note: str, listed: Mapping[int, str]) -> dict[int, str]:
    """The parts of ``note`` numbered in ``listed``; empty if they differ in more than one sentence.

    Only letters and digits are compared: lists drop apostrophes, periods and line breaks.
    """
    parts = {number: letters for number, text in listed.items() if (letters := alphanumeric(text))}
    if not parts or min(listed) < 0:
        return {}
    letters, wanted = alphanumeric(note), "".join(parts.values())
    places = [at for at, character in enumerate(note) if character.isalnum()]
    starts = [0, *accumulate(map(len, parts.values()))]  # the last one is the end
    same, same_at_end = Prefix.similarity(letters, wanted), Postfix.similarity(letters, wanted)
    # Candidates for the other one: all sentences before and after it are the same.
    changed = [
        n
        for n, (start, end) in enumerate(pairwise(starts))
        if start <= same and len(wanted) - end <= same_at_end
    ]
    if not changed:
        return {}
    own, grown = changed[-1], len(letters) - len(wanted)
    if own - 1 in changed and grown > 0:
        # Text added between two sentences ends the first if no sentence begins with it.
        between = note[places[starts[own] - 1] : places[starts[own]] + 1]
        own -= len(sentences_in(between)) < 2
    starts = [start + grown * (n > own) for n, start in enumerate(starts)]
    if any(start >= end for start, end in pairwise(starts)):  # a sentence is missing
        return {}
    cuts = [
        _before_signs(note, places[start], listed[n]) if start else 0
        for n, start in zip(parts, starts, strict=False)
    ]
    return {
        n: note[cut:end].strip()
        for n, cut, end in zip(parts, cuts, [*cuts[1:], len(note)], strict=True)
    }


def _before_signs(note: str, start: int, sentence: str) -> int:
    """The start of a sentence whose first letter is at ``start``, including signs before it."""
    signs = sentence.split(alphanumeric(sentence)[0], 1)[0]
    for sign in reversed("".join(signs.split())):
        before = len(note[:start].rstrip()) - 1
        if before < 0 or note[before] != sign:
            break
        start = before
    return start


def starts_of(sentences: Mapping[int, str], note: str) -> dict[int, int] | None:
    """The start of each of ``sentences`` in ``note``; None if they are not the note's."""
    starts, end = {}, 0
    for number, text in sentences.items():
        starts[number] = note.find(text, end)
        if starts[number] < 0 or note[end : starts[number]].strip():
            return None
        end = starts[number] + len(text)
    return None if note[end:].strip() else starts


def numbered_text(sentences: Mapping[int, str]) -> str:
    """A note as players read it with numbered sentences, one per line."""
    return "\n".join(f"{number}| {one_line(text)}" for number, text in sentences.items())


def sentences_with(error: str, correction: str, sentences: Iterable[str]) -> list[str]:
    """The ``sentences`` that contain ``error``, or are a part of it that ``correction`` lacks."""
    error, correction = one_line(error), one_line(correction)
    lines = ((text, one_line(text)) for text in sentences)
    return [
        text for text, line in lines if error in line or (line in error and line not in correction)
    ]


# -- the edit --------------------------------------------------------------------------------------


class SentenceEdit(BaseModel):
    """A sentence of a note and its replacement.

    ``old`` is empty where text is only added, and more than a sentence where several change.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    number: int | None  # of the sentence; None where it is not exactly one of the note
    old: str  # where the note has no such sentence, what the attacker calls it
    new: str
    start: int | None = None  # where ``old`` begins in the note; None where that is not known

    def applied(self, note: str) -> str:
        """``note`` with the new text in place of the old; unchanged if the place is unknown."""
        if self.start is None:
            return note
        return note[: self.start] + self.new + note[self.start + len(self.old) :]


def edit_of(note: str, sentences: Mapping[int, str], number: int, new: str) -> SentenceEdit:
    """The edit that puts ``new`` in place of the sentence of ``note`` with this number."""
    start = (starts_of(sentences, note) or {})[number]
    return SentenceEdit(number=number, old=sentences[number], new=new, start=start)


def edit_between(note: str, sentences: Mapping[int, str], other: str) -> SentenceEdit:
    """The edit that turns ``note`` into ``other``, from the first changed sentence to the last.

    Only ``note`` has sentences here, so an edit may drop a period or add one. White space
    outside the changed sentences does not count.
    """
    # On one line with a space before and after, so that a sentence ends where a word does.
    line, places = _with_places(note)
    wanted, places_wanted = _with_places(other)
    starts: list[int] = []
    ends: list[int] = []
    for text in map(one_line, sentences.values()):
        starts.append(line.index(text, ends[-1] if ends else 0))
        ends.append(starts[-1] + len(text))
    heads = [*starts, len(line)]  # how much is unchanged before a sentence, and after the last
    tails = [len(line) - end for end in (0, *ends)]  # how much is unchanged from a sentence on
    same, same_at_end = Prefix.similarity(line, wanted), Postfix.similarity(line, wanted)
    first = max((n for n, head in enumerate(heads) if head <= same), default=0)
    last = min((n for n, tail in enumerate(tails) if tail <= same_at_end), default=len(starts))
    last = max(first, last)
    # A repeated sentence may be in both parts, and the space between two is.
    while last < len(starts) and heads[first] + tails[last] > len(wanted) + 1:
        last += 1

    def put_in() -> str:
        begin, end = heads[first], len(wanted) - tails[last]
        text = other[places_wanted[begin] : places_wanted[end - 1] + 1] if begin < end else ""
        return text.strip()

    new = put_in()
    if first == last and new:  # added between two sentences: without its end it is part of one
        if last < len(starts) and new[-1] not in _SENTENCE_MARKS:
            last += 1
        elif first > 0 and line[ends[first - 1] - 1] not in _SENTENCE_MARKS:
            first -= 1
        new = put_in()
    start = places[starts[first]] if first < len(starts) else len(note)
    end = places[ends[last - 1] - 1] + 1 if first < last else start
    number = list(sentences)[first] if last - first == 1 else None
    return SentenceEdit(number=number, old=note[start:end], new=new, start=start)


def _with_places(text: str) -> tuple[str, list[int]]:
    """``text`` on one line between two spaces, and the place of each of its characters in it."""
    words, places = [""], []
    for word in re.finditer(r"\S+", text):
        words.append(word[0])
        places += [max(0, word.start() - 1), *range(*word.span())]
    return " ".join([*words, ""]), [*places, len(text)]


def changed_part(old: str, new: str) -> tuple[str, str]:
    """Words of either sentence from the first that differs to the last, or with a neighbor."""
    before, after = old.split(), new.split()
    start = Prefix.similarity(before, after)
    same = Postfix.similarity(before[start:], after[start:])
    if start + same == min(len(before), len(after)):
        start, same = (start - 1, same) if start else (start, same - 1)
    return " ".join(before[start : len(before) - same]), " ".join(after[start : len(after) - same])


def changed_runs(before: list[str], after: list[str]) -> list[tuple[int, int, int, int]]:
    """Maximal runs of differing sentences (or words): (start, end) in each of the two."""
    equal = [MatchingBlock(0, 0, 0), *Levenshtein.opcodes(before, after).as_matching_blocks()]
    between = [
        (one.a + one.size, other.a, one.b + one.size, other.b) for one, other in pairwise(equal)
    ]
    return [run for run in between if run[0] < run[1] or run[2] < run[3]]


# -- what an edit changes --------------------------------------------------------------------------


class Difference(NamedTuple):
    """The change that an edit makes, as the rules measure it."""

    inserted: tuple[str, ...]  # sentences of the new text that the old one does not have
    removed: tuple[str, ...]  # sentences of the old text that the new one does not have
    sentences: int  # touched
    words: int  # inserted, deleted or replaced
    similarity: float  # share of the note's words left alone
    cut_short: bool  # whether the note's end is missing
    says_the_same: bool  # whether all of it is mere dressing
    hides_text: bool  # whether invisible or look-alike characters or a wide gap are added


def measure(seed: str, note: str, edit: SentenceEdit) -> Difference:
    """Measure the edit that turns ``seed`` into ``note``, as fast as rapidfuzz's Levenshtein."""
    before, after = split_sentences(edit.old), split_sentences(edit.new)
    words = Levenshtein.distance(WORD.findall(edit.old), WORD.findall(edit.new))
    longest = max(len(WORD.findall(seed)), len(WORD.findall(note)), 1)
    at_the_end = not seed[(edit.start or 0) + len(edit.old) :].strip()
    changed = one_line(edit.old) != one_line(edit.new)
    touched = 1 if edit.number is not None else len(before)
    return Difference(
        inserted=tuple(sentence for sentence in after if sentence not in before),
        removed=tuple(sentence for sentence in before if sentence not in after),
        sentences=touched + max(0, len(after) - len(before)) if changed else 0,
        words=words,
        similarity=max(0.0, 1 - words / longest),
        cut_short=changed and at_the_end and _breaks_off(before, after),
        says_the_same=says_the_same(edit.old, edit.new),
        hides_text=_hidden(note, seed),
    )


def exceeds(new: str, old: str, words: int) -> bool:
    """Return whether ``new`` is longer by more than ``words`` words' worth of text."""
    return len(one_line(new)) - len(one_line(old)) > words * (LONGEST_WORD + 1)


def _breaks_off(gone: list[str], come: list[str]) -> bool:
    """Return whether the last changed run of a note lost its end, or breaks off."""
    if not come or not gone:
        return bool(gone)
    whole, part = canonical_words(" ".join(gone)), canonical_words(" ".join(come))
    beginning = whole[: len(part)]
    if len(part) >= len(whole):
        return False
    if len(come) < len(gone):
        # Merged sentences still end as they did, and a rewritten note begins otherwise.
        return part[-1:] != whole[-1:] and 2 * Levenshtein.distance(part, beginning) <= len(part)
    return part == beginning and come[-1][-1] not in _SENTENCE_MARKS


def _hidden(new: str, old: str) -> bool:
    gap, usual = (max(map(len, _GAP.findall(text)), default=0) for text in (new, old))
    mixed, usually = (len(_MIXED.findall(text)) for text in (new, old))
    wide = gap > max(_LONGEST_GAP, usual)
    return wide or mixed > usually or any(map(_INVISIBLE.match, Counter(new) - Counter(old)))
