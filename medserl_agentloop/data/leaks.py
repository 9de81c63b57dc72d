"""Does anything but its medical content tell a row's label? Called by ``verify.py``.

No classifier is trained. For each feature of a row (white space and length of its note, its place in the file; ids
reach no prompt) every rule "harmful on this side of a cut, safe on the other" is tried. How many harmful rows
lie on one side is a hypergeometric count if feature and label are independent, so Fisher's exact test gives the chance
of a count that far off. It is multiplied by the number of rules tried (Bonferroni); below ``ALPHA`` the feature is a
leak. Copies of a row are not independent, so each note counts once per label, except for its place. The bound is wide
in small files: MEDEC's own leak, trailing blanks on 60 % of the error notes and 47 % of the clean ones, shows from
about 1,000 rows on, a perfect rule from about 20.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import hypergeom

from medserl_agentloop.games.medical.types import Label

ALPHA = 1e-3  # chance of one false alarm in a file without leaks
_MAX_CUTS = 32

_PLACE = "the row's place in the file"
_STRIP = "strip the notes of both labels alike"
_REMEDIES = {
    "white space before the note": _STRIP,
    "white space after the note": _STRIP,
    "a line break at the end of the note": _STRIP,
    "double blanks inside the note": "normalise white space in the notes of both labels alike",
    _PLACE: "shuffle the rows with a seed",
    "the note's length": "take the notes of both labels from the same vignettes",
}


class LabelledRow(NamedTuple):
    """What the leak test looks at."""

    seed_note: str
    target_label: Label
    seed_label: Label


class Leak(NamedTuple):
    """A feature that tells labels apart."""

    feature: str
    remedy: str
    label: str  # ``target_label`` or ``seed label``
    accuracy: float  # share of right answers of the best rule, both labels weighing the same; 0.5 is chance
    chance: float  # of a rule this good in any feature, if none of them depended on the label


def find_leaks(rows: Sequence[LabelledRow]) -> Iterator[Leak]:
    """Every feature of a file's rows, in their order, that tells a label better than chance, with its best label."""
    features = np.array([_features(place, row.seed_note) for place, row in enumerate(rows)]).reshape(-1, len(_REMEDIES))
    labels = {"target_label": np.array([row.target_label is Label.HARMFUL for row in rows])}
    of_seeds = np.array([row.seed_label is Label.HARMFUL for row in rows])
    if (of_seeds != labels["target_label"]).any():
        labels["seed label"] = of_seeds
    distinct = list({row: place for place, row in reversed(list(enumerate(rows)))}.values())
    for column, (feature, remedy) in zip(features.T, _REMEDIES.items(), strict=True):
        places = slice(None) if feature == _PLACE else distinct
        found = [
            Leak(feature, remedy, label, *_best_rule(column[places], harmful[places], len(labels) * len(_REMEDIES)))
            for label, harmful in labels.items()
        ]
        strongest = min(found, key=lambda leak: leak.chance)
        if strongest.chance < ALPHA:
            yield strongest


def _features(place: int, note: str) -> list[int]:
    """One value for each of ``_REMEDIES``."""
    before, tail = len(note) - len(note.lstrip()), note[len(note.rstrip()) :]
    broken = int("\n" in tail or "\r" in tail)
    return [before, len(tail), broken, note.strip().count("  "), place, len(note.split())]


def _best_rule(column: Any, harmful: Any, tests: int) -> tuple[float, float]:
    """Accuracy of the least likely rule, and the chance of one like it in ``tests`` columns."""
    rows, of_harmful = len(harmful), harmful.sum()
    cuts = np.unique(column)[:-1]
    if of_harmful in (0, rows) or not len(cuts):
        return 0.5, 1.0
    if len(cuts) > _MAX_CUTS:
        cuts = np.unique(np.quantile(column, np.linspace(0, 1, _MAX_CUTS + 2)[1:-1], method="lower"))
    is_below = column[:, None] <= cuts
    below, hits = is_below.sum(axis=0), is_below[harmful].sum(axis=0)
    drawn = hypergeom(rows, of_harmful, below)
    # Two sides: both "more harmful rows below the cut" and "fewer" would count as a leak.
    chances = 2 * np.minimum(drawn.cdf(hits), drawn.sf(hits - 1))
    best = chances.argmin()
    gap = abs(hits[best] / of_harmful - (below[best] - hits[best]) / (rows - of_harmful))
    return 0.5 + gap / 2, min(1.0, chances[best] * len(cuts) * tests)
