"""Finding notes that are nearly the same: half of their runs of four words, or more, in common.

Called by ``data_prep/medec_to_parquet.py``. The search is exact: no pair at the threshold is missed.
"""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

THRESHOLD = 0.5  # Jaccard similarity of the two sets of 4-grams
_WORDS_PER_GRAM = 4

Grams = frozenset[str]


@dataclass(frozen=True)
class Match:
    """The most similar indexed text: its number and its Jaccard similarity."""

    number: int
    similarity: float


def four_grams(text: str) -> Grams:
    """The text's runs of four words, in lower case and without punctuation; a shorter text is one run."""
    words = re.findall(r"\w+", text.casefold())
    runs = range(max(1, len(words) - _WORDS_PER_GRAM + 1))
    return frozenset(" ".join(words[i : i + _WORDS_PER_GRAM]) for i in runs)


def similarity(a: Grams, b: Grams) -> float:
    """Jaccard similarity, 0 to 1."""
    return len(a & b) / len(a | b)


class NearDuplicateIndex:
    """An inverted index from 4-grams to texts, 8 bytes per entry.

    A text that reaches the threshold shares at least half of the query's 4-grams. So the rarer half of
    them, and one more, must lead to it, and the frequent ones need not be followed.
    """

    def __init__(self, texts: Iterable[str], text_of: Callable[[int], str]) -> None:
        """Index ``texts``; ``text_of`` gives the text of a number again, so that none is kept here."""
        entries = array("Q")
        for number, text in enumerate(texts):
            entries.extend((_key(gram) << 32) | number for gram in four_grams(text))
        self._entries = np.frombuffer(entries, dtype=np.uint64) if entries else np.zeros(0, dtype=np.uint64)
        self._entries.sort()
        self._grams_of = lru_cache(maxsize=1024)(lambda number: four_grams(text_of(number)))

    def find(self, text: str) -> Match | None:
        """The most similar indexed text; None if none reaches the threshold."""
        grams = four_grams(text)
        keys = np.fromiter((_key(gram) for gram in grams), dtype=np.uint64, count=len(grams)) << np.uint64(32)
        first = np.searchsorted(self._entries, keys)
        last = np.searchsorted(self._entries, keys | np.uint64(0xFFFFFFFF), side="right")
        if last.sum() == first.sum():
            return None
        rarest = np.argsort(last - first, kind="stable")[: len(grams) // 2 + 1]
        numbers = [self._entries[first[i] : last[i]] & np.uint64(0xFFFFFFFF) for i in rarest if last[i] > first[i]]
        if not numbers:
            return None
        found = ((similarity(grams, self._grams_of(n)), n) for n in np.unique(np.concatenate(numbers)).tolist())
        best = max(found, key=lambda match: (match[0], -match[1]))
        return Match(best[1], best[0]) if best[0] >= THRESHOLD else None


def _key(gram: str) -> int:
    return zlib.crc32(gram.encode("utf-8", "surrogatepass"))
