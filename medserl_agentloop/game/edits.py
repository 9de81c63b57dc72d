"""What an attacker changed: a sentence-aligned difference of seed note and rewritten note.

Called by ``game.rules`` to decide whether an attack did what it was asked to do.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from dataclasses import dataclass

from rapidfuzz import fuzz
from rapidfuzz.distance import Levenshtein

# A full stop, question mark or exclamation mark ends a sentence where a new one plausibly begins.
# "38.5 C" and "e.g. aspirin" stay whole. A line break ends nothing: models flatten them when they copy.
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[\"'(\[]?[A-Z0-9])")
_PUNCTUATION = ".,;:!?\"'()[]"


def split_sentences(note: str) -> list[str]:
    """The sentences of ``note``, white space normalised, empty ones left out."""
    return [s for s in _SENTENCE_END.split(one_line(note)) if s]


def one_line(text: str) -> str:
    """``text`` with every run of white space as one blank."""
    return " ".join(text.split())


def plain_words(text: str) -> list[str]:
    """The words of ``text`` without case, invisible characters and punctuation around them.

    Signs inside and before a word stay: ``0.5`` is not ``5``, ``>140`` is not ``<140``.
    """
    visible = "".join(c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c) != "Cf")
    return [word for token in visible.casefold().split() if (word := token.strip(_PUNCTUATION))]


def is_repair(new: str, error: str, correction: str) -> bool:
    """Whether ``new`` says what ``correction`` says where that differs from ``error``, whatever it adds."""
    said, wrong, right = (Counter(plain_words(text)) for text in (new, error, correction))
    return not (right - wrong) - said and not (wrong - right) & said


def same_sentence(a: str, b: str, *, threshold: float = 90.0) -> bool:
    """Whether ``a`` is ``b`` up to slips of copying (rapidfuzz ratio at or above ``threshold``)."""
    return fuzz.ratio(" ".join(a.lower().split()), " ".join(b.lower().split())) >= threshold


@dataclass(frozen=True)
class Edit:
    """A difference between two notes.

    Attributes:
        inserted: Sentences of the new note that the old one does not have, in order.
        removed: Sentences of the old note that the new one does not have, in order.
        sentences: Number of sentences touched: of each changed run, the longer side.
        words: Words inserted, deleted or replaced inside the changed runs.
    """

    inserted: tuple[str, ...]
    removed: tuple[str, ...]
    sentences: int
    words: int


def compare_notes(old: str, new: str) -> Edit:
    """Align two notes sentence by sentence and count what differs."""
    before, after = split_sentences(old), split_sentences(new)
    inserted: list[str] = []
    removed: list[str] = []
    sentences = words = 0
    for op in _changed_runs(before, after):
        gone, come = before[op[0] : op[1]], after[op[2] : op[3]]
        removed += gone
        inserted += come
        sentences += max(len(gone), len(come))
        words += Levenshtein.distance(" ".join(gone).split(), " ".join(come).split())
    return Edit(tuple(inserted), tuple(removed), sentences, words)


def _changed_runs(before: list[str], after: list[str]) -> list[tuple[int, int, int, int]]:
    """Maximal runs of differing sentences as (start, end) in ``before`` and in ``after``."""
    runs: list[tuple[int, int, int, int]] = []
    for op in Levenshtein.opcodes(before, after):
        if op.tag == "equal":
            continue
        if runs and runs[-1][1] == op.src_start and runs[-1][3] == op.dest_start:
            runs[-1] = (runs[-1][0], op.src_end, runs[-1][2], op.dest_end)
        else:
            runs.append((op.src_start, op.src_end, op.dest_start, op.dest_end))
    return runs
