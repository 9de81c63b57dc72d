"""Whether anything about a row but its medical content tells its label: a test without a classifier.

Called by ``verify.py``. For each feature of a row (white space of its note, its id's number, its
place in the file, the length of its note) every rule "harmful on this side of a cut, safe on the
other" is tried. How many harmful rows lie on one side is a hypergeometric count if feature and label
are independent, so Fisher's exact test gives the chance of a count that far off. It is multiplied
by the cuts of the feature and by the number of features (Bonferroni); below ``ALPHA`` the feature is
a leak. Copies of a row are not independent, so each note counts once per label, except for its place.
The bound is wide in small files: MEDEC's own leak, trailing blanks on 60 % of the error
notes and 47 % of the clean ones, shows from about 1,000 rows on, a perfect rule from about 20.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from medserl_agentloop.games.medical.types import Label

ALPHA = 1e-3  # chance of one false alarm in a file without leaks
_MAX_CUTS = 32
_ID_NUMBER = re.compile(r"([0-9]{1,18})\D*$")

_PLACE = "the row's place in the file"
FEATURES = {
    "white space before the note": "strip the notes of both labels alike",
    "white space after the note": "strip the notes of both labels alike",
    "a line break at the note's end": "strip the notes of both labels alike",
    "double blanks in the note": "give the notes of both labels the same white space",
    "the parity of the text id": "take both notes of a case from its error row, so that they share its id",
    "the number in the text id": "choose the vignettes of each label with a seed, not by their ids",
    _PLACE: "shuffle the rows with a seed",
    "the note's length": "take the notes of both labels from the same vignettes",
}


@dataclass(frozen=True)
class Leak:
    """A feature that tells labels apart.

    Attributes:
        feature: What is looked at, a key of ``FEATURES``.
        label: Which label it tells: ``target_label`` or ``seed label``.
        accuracy: Share of right answers of the best rule, both labels weighing the same; 0.5 is chance.
        chance: Probability of a rule this good in any feature, if none of them depended on the label.
    """

    feature: str
    label: str
    accuracy: float
    chance: float

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return FEATURES[self.feature]


class LeakTest:
    """Collects what is tested of each row of one file."""

    def __init__(self) -> None:
        # Of each row: a value for each of FEATURES, whether each label is harmful, whether it is a copy.
        self._rows: list[tuple[tuple[int, ...], dict[str, bool], bool]] = []
        self._seen: set[tuple[str, str, Label, Label]] = set()

    def add(self, *, text_id: str, seed_note: str, target_label: Label, seed_label: Label) -> None:
        """Take the next row of the file."""
        number = _ID_NUMBER.search(text_id)
        tail = seed_note[len(seed_note.rstrip()) :]
        features = (
            len(seed_note) - len(seed_note.lstrip()),
            len(tail),
            int("\n" in tail or "\r" in tail),
            seed_note.strip().count("  "),
            int(number[1]) % 2 if number else -1,
            int(number[1]) if number else -1,
            len(self._rows),
            len(seed_note.split()),
        )
        harmful = {"target_label": target_label is Label.HARMFUL, "seed label": seed_label is Label.HARMFUL}
        content = (text_id, seed_note, target_label, seed_label)
        self._rows.append((features, harmful, content in self._seen))
        self._seen.add(content)

    def leaks(self) -> Iterator[Leak]:
        """Every feature that tells a label better than chance, with the label it tells best."""
        differ = any(len(set(harmful.values())) > 1 for _, harmful, _ in self._rows)
        labels = ["target_label", "seed label"] if differ else ["target_label"]
        for at, feature in enumerate(FEATURES):
            kept = [row for row in self._rows if feature == _PLACE or not row[2]]
            values = [features[at] for features, *_ in kept]
            cuts = _cuts(values)
            tests = max(1, len(cuts)) * len(labels) * len(FEATURES)
            found = []
            for label in labels:
                accuracy, chance = _best_rule(values, [harmful[label] for _, harmful, _ in kept], cuts)
                found.append(Leak(feature, label, accuracy, min(1.0, chance * tests)))
            strongest = min(found, key=lambda leak: leak.chance)
            if strongest.chance < ALPHA:
                yield strongest


def _cuts(column: Iterable[int]) -> list[int]:
    """Values to cut at: every distinct one but the last, or evenly spaced quantiles of them."""
    ordered = sorted(column)
    distinct = sorted(set(ordered))[:-1]
    if len(distinct) <= _MAX_CUTS:
        return distinct
    quantiles = {ordered[len(ordered) * i // (_MAX_CUTS + 1)] for i in range(1, _MAX_CUTS + 1)}
    return sorted(quantiles - {ordered[-1]})


def _best_rule(column: list[int], harmful: list[bool], cuts: list[int]) -> tuple[float, float]:
    """Accuracy and chance of the least likely rule."""
    rows, of_harmful = len(harmful), sum(harmful)
    best = (0.5, 1.0)
    if of_harmful in (0, rows):
        return best
    ordered = sorted(zip(column, harmful, strict=True))
    harmful_up_to = [0, *accumulate(is_harmful for _, is_harmful in ordered)]
    for cut in cuts:
        below = bisect_right(ordered, cut, key=lambda pair: pair[0])
        hits = harmful_up_to[below]
        gap = abs(hits / of_harmful - (below - hits) / (rows - of_harmful))
        # Two sides: both "more harmful rows below the cut" and "fewer" would count as a leak.
        chance = min(1.0, 2 * _tail(hits, below, of_harmful, rows))
        if chance < best[1]:
            best = (0.5 + gap / 2, chance)
    return best


def _tail(hits: int, drawn: int, marked: int, rows: int) -> float:
    """Probability of a hypergeometric count at least as far from its mean, on the same side, as ``hits``."""
    if hits * rows < drawn * marked:  # below the mean: count the unmarked rows instead
        hits, marked = drawn - hits, rows - marked
    log_first = _log_choose(marked, hits) + _log_choose(rows - marked, drawn - hits) - _log_choose(rows, drawn)
    total = term = 1.0
    for k in range(hits, min(drawn, marked)):
        term *= (marked - k) * (drawn - k) / ((k + 1) * (rows - marked - drawn + k + 1))
        total += term
        if term < total * 1e-12:
            break
    return math.exp(min(0.0, log_first + math.log(total)))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
