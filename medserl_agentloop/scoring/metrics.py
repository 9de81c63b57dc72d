"""Scores with 95 % intervals from predictions and their reference. Called by every command that scores.

Every measure is a ratio of two sums over notes. The bootstrap draws whole cases, because the two notes of a case are
not independent, and recomputes both sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from medserl_agentloop.scoring.corrections import SCORERS, Scorer
from medserl_agentloop.scoring.grading import Grades, Numbers, grade, groups_of
from medserl_agentloop.scoring.reference import ReferenceNote
from medserl_agentloop.scoring.submission import Prediction

RESAMPLES = 2000
GROUP_MEASURES = ("flag_accuracy", "sentence_accuracy", "rouge_1")
_NOTHING_TO_COUNT = {
    "precision": "no note is said to have an error",
    "recall": "no note has an error",
    "f1": "no note has an error and none is said to have one",
    "false_positive_rate": "every note has an error",
}
_NO_PAIR = "no note has a correction both in the reference and by the system"
_CHUNK = 100


@dataclass(frozen=True)
class Measure:
    """A score in [0, 1].

    Attributes:
        value: The score; None where it is not computed.
        low: Lower end of the 95 % interval; None without a bootstrap.
        high: Its upper end.
        spread: Standard deviation between seeds; None for a single one.
        why: Why it is not computed.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    spread: float | None = None
    why: str | None = None


@dataclass(frozen=True)
class Group:
    """Some of the notes and how they were judged."""

    notes: int
    measures: dict[str, Measure]


@dataclass(frozen=True)
class Scores:
    """Everything that is said about one system.

    Attributes:
        notes: Notes of the reference.
        errors: Those with an error.
        unreadable: Notes with an answer that could not be read; wrong in everything. The mean over seeds.
        missing: Notes without any answer; wrong in everything. The mean over seeds.
        measures: By name.
        groups: By what they are told apart by (error type, position, length), then by name.
        seeds: Submissions that were pooled.
    """

    notes: int
    errors: int
    unreadable: float
    missing: float
    measures: dict[str, Measure]
    groups: dict[str, dict[str, Group]]
    seeds: int = 1


@dataclass(frozen=True)
class Difference:
    """How far one system is from another on the same notes.

    Attributes:
        value: Their difference; None where one of the two is not computed.
        low: Lower end of the 95 % interval.
        high: Its upper end.
        p_value: Two-sided, by the paired bootstrap.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None


@dataclass(frozen=True)
class McNemar:
    """Notes that only one of two systems has right, and the exact two-sided p value."""

    only_first: int
    only_second: int
    p_value: float


@dataclass(frozen=True)
class Comparison:
    """The first system against the second.

    Attributes:
        differences: First minus second, by measure.
        mcnemar: By measure; empty where seeds are pooled, because a note then has several answers.
    """

    differences: dict[str, Difference]
    mcnemar: dict[str, McNemar]


def score(
    reference: Sequence[ReferenceNote],
    predictions: Iterable[Prediction],
    *,
    scorers: Mapping[str, Scorer] = SCORERS,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Scores:
    """Score one submission; see ``grade`` and ``summarise``."""
    return summarise([grade(reference, predictions, scorers)], resamples=resamples, seed=seed)


def summarise(seeds: Sequence[Grades], *, resamples: int = RESAMPLES, seed: int = 0) -> Scores:
    """The scores of one system.

    Args:
        seeds: Its submissions on the same notes; usually one. Values are means over them.
        resamples: Of the bootstrap; 0 leaves the intervals out.
        seed: Of the bootstrap's draws.

    Raises:
        ValueError: The submissions are of different notes.
    """
    first = seeds[0]
    absent = {name: Measure(None, why=why) for grades in seeds for name, why in grades.why.items()}
    names = [name for name in first.sums if name not in absent]
    groups = groups_of(first.notes)
    inside = {(kind, name): mask for kind, named in groups.items() for name, mask in named.items()}
    keys: list[tuple[Any, str]] = [(None, name) for name in names]
    keys += [(group, name) for group in inside for name in GROUP_MEASURES if name in names]
    values, drawn = _values(seeds, keys, inside, resamples, seed)
    found: dict[Any, dict[str, Measure]] = {}
    for (group, name), of_seeds, samples in zip(keys, values, drawn, strict=True):
        found.setdefault(group, {})[name] = _measure(name, of_seeds, samples)
    return Scores(
        notes=len(first.notes),
        errors=sum(note.flag for note in first.notes),
        unreadable=float(np.mean([grades.unreadable for grades in seeds])),
        missing=float(np.mean([grades.missing for grades in seeds])),
        measures=found[None] | absent,
        groups={
            kind: {name: Group(int(mask.sum()), found[kind, name]) for name, mask in named.items()}
            for kind, named in groups.items()
        },
        seeds=len(seeds),
    )


def compare(
    first: Sequence[Grades], second: Sequence[Grades], *, resamples: int = RESAMPLES, seed: int = 0
) -> Comparison:
    """Two systems on the same notes, each with one submission or several.

    Raises:
        ValueError: They were scored on different notes.
    """
    absent = {name for grades in (*first, *second) for name in grades.why}
    names = [name for name in first[0].sums if name not in absent]
    keys = [(None, name) for name in names]
    _check_same_notes([*first, *second])
    (a, drawn_a), (b, drawn_b) = (_values(seeds, keys, {}, resamples, seed) for seeds in (first, second))
    differences = {name: Difference(None) for name in sorted(absent)}
    for i, name in enumerate(names):
        value = float(a[i].mean() - b[i].mean())
        samples = drawn_a[i] - drawn_b[i]
        samples = samples[np.isfinite(samples)]
        if not np.isfinite(value) or not len(samples):
            differences[name] = Difference(value if np.isfinite(value) else None)
            continue
        low, high = np.percentile(samples, [2.5, 97.5])
        # One is added to both counts: no finite number of draws shows a p value of 0.
        tail = min((samples <= 0).sum(), (samples >= 0).sum())
        p_value = min(1.0, 2.0 * (tail + 1) / (len(samples) + 1))
        differences[name] = Difference(value, float(low), float(high), float(p_value))
    single = len(first) == len(second) == 1
    tested = ("flag_accuracy", "sentence_accuracy") if single else ()
    return Comparison(differences, {name: _mcnemar(first[0].sums[name][0], second[0].sums[name][0]) for name in tested})


def _values(
    seeds: Sequence[Grades],
    keys: Sequence[tuple[Any, str]],
    masks: Mapping[Any, Numbers],
    resamples: int,
    seed: int,
) -> tuple[Numbers, Numbers]:
    """Each measure per seed (K, S), and the mean over the seeds per draw (K, resamples); NaN is 0/0."""
    _check_same_notes(seeds)
    case = seeds[0].case
    columns = [
        np.bincount(case, weights=side if group is None else side * masks[group])
        for grades in seeds
        for group, name in keys
        for side in grades.sums[name]
    ]
    sums = np.stack(columns)  # (S * K * 2, cases)
    with np.errstate(invalid="ignore"):
        shape = (len(seeds), len(keys), 2)
        whole = sums.sum(axis=1).reshape(shape)
        drawn: list[Numbers] = [np.empty((0, *shape))]
        drawn += [(counts @ sums.T).reshape(-1, *shape) for counts in _draws(sums.shape[1], resamples, seed)]
        samples = np.concatenate(drawn)
        means = (samples[..., 0] / samples[..., 1]).mean(axis=1)
        return (whole[..., 0] / whole[..., 1]).T, means.T


def _draws(cases: int, resamples: int, seed: int) -> Iterator[Numbers]:
    """How often each case is drawn, (up to ``_CHUNK``, cases) at a time; the same for every system."""
    random = np.random.default_rng(seed)
    for start in range(0, resamples, _CHUNK):
        rows = min(_CHUNK, resamples - start)
        drawn = random.integers(cases, size=(rows, cases)) + cases * np.arange(rows)[:, None]
        yield np.bincount(drawn.ravel(), minlength=rows * cases).reshape(rows, cases).astype(float)


def _measure(name: str, of_seeds: Numbers, samples: Numbers) -> Measure:
    value = float(of_seeds.mean())
    if not np.isfinite(value):
        return Measure(None, why=_NOTHING_TO_COUNT.get(name, _NO_PAIR))
    spread = float(of_seeds.std(ddof=1)) if len(of_seeds) > 1 else None
    samples = samples[np.isfinite(samples)]
    if not len(samples):
        return Measure(value, spread=spread)
    low, high = np.percentile(samples, [2.5, 97.5])
    return Measure(value, float(low), float(high), spread)


def _mcnemar(first: Numbers, second: Numbers) -> McNemar:
    only_first, only_second = int((first > second).sum()), int((second > first).sum())
    together = only_first + only_second
    tail = sum(math.comb(together, k) for k in range(min(only_first, only_second) + 1))
    return McNemar(only_first, only_second, min(1.0, 2 * tail / 2**together))


def _check_same_notes(seeds: Sequence[Grades]) -> None:
    if any(grades.notes != seeds[0].notes for grades in seeds):
        raise ValueError("the submissions were scored on different notes; score all of them on one reference.")
