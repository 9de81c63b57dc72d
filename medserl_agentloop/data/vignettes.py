"""What one MEDEC case is, whatever file it came from: its edit, its twin, its near-duplicates.

The readers of this package write these types; ``rows.py`` turns them into game rows.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.games.medical.types import Category, ErrorType

# Word overlap of a clean row with the corrected text of the error row before it. On the official
# validation set the lowest twin has 0.86, and the highest of two unrelated notes 0.45.
TWIN_OVERLAP = 0.7
NEAR_DUPLICATE = 0.5  # Jaccard similarity of two notes' sets of 4-grams

_SUBSETS = {"ms": "medec_ms", "uw": "medec_uw"}
_WORDS_PER_GRAM = 4


class PairSource(str, Enum):
    """Where the clean note of a vignette was read."""

    IN_ROW = "in_row"  # the error row's own corrected text
    TWIN = "twin"  # the clean row that follows the error row
    UNPAIRED = "unpaired"  # the vignette has only one of the two notes


class EditTag(str, Enum):
    """How the clean note differs from the error note."""

    LOCAL = "local_edit"  # exchanging the two sentences in place gives the clean note
    NON_LOCAL = "non_local_edit"  # the corrected sentence stands elsewhere, or more was changed
    NO_OP = "no_op_edit"  # only letter case or white space differs: there is no error
    UNLOCATED = "unlocated_edit"  # the source does not name the two sentences
    NO_PAIR = "no_pair"  # only one note is known


@dataclass(frozen=True)
class Sentence:
    """One numbered sentence, under the number that the source gave it."""

    id: int
    text: str


@dataclass(frozen=True)
class Vignette:
    """One case: its error note, its clean note, or both. The unit of splitting."""

    vignette_id: str  # that of its error row, else of its only row
    error_note: str | None
    clean_note: str | None
    source_sha256: str  # of the file it was read from
    twin_text_id: str | None = None  # the clean row of the same case, where the file has one
    twin_note: str | None = None  # its text, often with its sentences in another order
    clean_from_twin: bool = False  # the error row has no corrected text: the twin's text stands in
    error_type: ErrorType | None = None
    error_sentence: str | None = None
    corrected_sentence: str | None = None
    error_sentence_id: int = -1  # number of the wrong sentence in ``sentences``; 0 is one, -1 is none
    sentences: tuple[Sentence, ...] = ()  # those of the note named by ``vignette_id``, with the source's numbers
    categories: tuple[Category, ...] | None = None  # those that the source asks for; None where it leaves them open

    @property
    def notes(self) -> tuple[str, ...]:
        """Every text of the case that is known."""
        return tuple(note for note in (self.error_note, self.clean_note, self.twin_note) if note)

    @property
    def text_ids(self) -> tuple[str, ...]:
        """Every source row that belongs to the case."""
        return (self.vignette_id, self.twin_text_id) if self.twin_text_id else (self.vignette_id,)

    @property
    def subset(self) -> str:
        """Which collection it is from: ``medec_ms``, ``medec_uw``, or the prefix of its id."""
        prefix = re.split(r"[-_]", self.vignette_id, maxsplit=1)[0].lower()
        return _SUBSETS.get(prefix, prefix or "unnamed")

    @property
    def pair_source(self) -> PairSource:
        """Where the clean note was read."""
        if self.error_note is None or self.clean_note is None:
            return PairSource.UNPAIRED
        return PairSource.TWIN if self.clean_from_twin else PairSource.IN_ROW

    @cached_property
    def edit_tag(self) -> EditTag:
        """How the two notes differ; differences in white space do not count."""
        if self.error_note is None or self.clean_note is None:
            return EditTag.NO_PAIR
        wrong, right = one_line(self.error_note), one_line(self.clean_note)
        if wrong.casefold() == right.casefold():
            return EditTag.NO_OP
        if self.error_sentence is None or self.corrected_sentence is None:
            return EditTag.UNLOCATED
        old, new = one_line(self.error_sentence), one_line(self.corrected_sentence)
        places = (match.start() for match in re.finditer(f"(?={re.escape(old)})", wrong))
        exchanged = any(wrong[:at] + new + wrong[at + len(old) :] == right for at in places)
        return EditTag.LOCAL if exchanged else EditTag.NON_LOCAL


def same_case(clean_note: str, corrected_note: str) -> bool:
    """Whether two notes describe the same case, with their sentences in any order."""
    words_a, words_b = (Counter(re.findall(r"\w+", text.casefold())) for text in (clean_note, corrected_note))
    total = words_a.total() + words_b.total()
    overlap = 2 * (words_a & words_b).total() / total if total else 1.0  # Dice coefficient, 0 to 1
    return overlap >= TWIN_OVERLAP


def four_grams(text: str) -> frozenset[str]:
    """The text's runs of four words, in lower case and without punctuation; a shorter text is one run."""
    words = re.findall(r"\w+", text.casefold())
    runs = range(max(1, len(words) - _WORDS_PER_GRAM + 1))
    return frozenset(" ".join(words[i : i + _WORDS_PER_GRAM]) for i in runs)


class NearDuplicateIndex:
    """Finds the indexed note that is most like another one. Exact: no pair of near-duplicates is missed."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._sizes: list[int] = []
        self._texts_of: defaultdict[str, list[int]] = defaultdict(list)
        for text in texts:
            self.add(text)

    def add(self, text: str) -> None:
        """Index one more note, under the next number from 0."""
        grams = four_grams(text)
        for gram in grams:
            self._texts_of[gram].append(len(self._sizes))
        self._sizes.append(len(grams))

    def find(self, text: str, threshold: float = NEAR_DUPLICATE) -> tuple[int, float] | None:
        """Number and Jaccard similarity of the most similar note, the first of several; None below ``threshold``."""
        return min(self.matches(text, threshold), key=lambda match: (-match[1], match[0]), default=None)

    def matches(self, text: str, threshold: float = NEAR_DUPLICATE) -> list[tuple[int, float]]:
        """Number and Jaccard similarity of every note that is at least so similar."""
        grams = four_grams(text)
        common = Counter(number for gram in grams for number in self._texts_of.get(gram, ()))
        found = ((n, shared / (len(grams) + self._sizes[n] - shared)) for n, shared in common.items())
        return [match for match in found if match[1] >= threshold]
