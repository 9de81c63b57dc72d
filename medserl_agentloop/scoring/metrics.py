"""Scores with 95 % intervals from predictions and their reference. Called by every command that scores.

Every measure is a ratio of two sums over notes (docs/scoring.md has the rules of the shared task). The bootstrap draws
whole cases, because the two notes of a case are not independent, and recomputes both sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from medserl_agentloop.games.medical.types import ErrorType
from medserl_agentloop.scoring.notes import Prediction, ReferenceNote
from medserl_agentloop.scoring.official import SCORERS, NotComputed, Scorer

RESAMPLES = 2000
GROUP_MEASURES = ("flag_accuracy", "sentence_accuracy", "rouge_1")
_NOTHING_TO_COUNT = {
    "precision": "no note is said to have an error",
    "recall": "no note has an error",
    "f1": "no note has an error and none is said to have one",
    "false_positive_rate": "every note has an error",
}
_NO_PAIR = "no note has a correction both in the reference and by the system"
_LENGTHS = {100: "up to 100 words", 150: "101 to 150 words", 200: "151 to 200 words", math.inf: "over 200 words"}

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Grades:
    """One submission, note by note, in the order of the text ids."""

    notes: tuple[ReferenceNote, ...]
    sums: dict[str, Numbers]  # of each measure, what each note adds above and below the line; (2, N)
    why: dict[str, str]  # of each measure that is not computed, the reason
    unreadable: int
    missing: int


@dataclass(frozen=True)
class Measure:
    """A score in [0, 1] with its 95 % interval; None is not computed."""

    value: float | None
    low: float | None = None
    high: float | None = None
    spread: float | None = None  # standard deviation between pooled seeds
    why: str | None = None  # the score is not computed


@dataclass(frozen=True)
class Group:
    """Some of the notes and how they were judged."""

    notes: int
    measures: dict[str, Measure]


@dataclass(frozen=True)
class Scores:
    """Everything that is said about one system.

    Notes with an unreadable answer and notes without any (``missing``) are wrong in everything; both counts are means
    over the seeds. Groups are by what the notes are told apart by (error type, position, length), then by name.
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
    """How far one system is from another on the same notes; None where one of the two is not computed."""

    value: float | None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None  # two-sided, by the paired bootstrap


@dataclass(frozen=True)
class McNemar:
    """Notes that only one of two systems has right, and the exact two-sided p value."""

    only_first: int
    only_second: int
    p_value: float


@dataclass(frozen=True)
class Comparison:
    """The first system minus the second; McNemar's test not for pools, in which a note has several answers."""

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


def grade(
    reference: Sequence[ReferenceNote], predictions: Iterable[Prediction], scorers: Mapping[str, Scorer] = SCORERS
) -> Grades:
    """Judge every note of the reference.

    Args:
        reference: The notes; their order changes nothing.
        predictions: In any order. Of several for one note the last counts; those of unknown notes are ignored.
        scorers: Of the corrections, by the name of their measure.

    Raises:
        ValueError: There are no notes.
    """
    if not reference:
        raise ValueError("the reference has no notes; give MEDEC's CSV with at least one row.")
    notes = sorted(reference, key=lambda note: note.text_id)
    by_id = {prediction.text_id: prediction for prediction in predictions}
    answers = [by_id.get(note.text_id) for note in notes]
    given = [said or Prediction(note.text_id, parsed=False) for said, note in zip(answers, notes, strict=True)]
    parsed = np.array([said.parsed for said in given])
    wrong = np.array([note.flag for note in notes])
    alarm = np.array([said.flag for said in given]) & parsed
    same_sentence = np.array([said.sentence_id == n.sentence_id for said, n in zip(given, notes, strict=True)])
    every = np.ones(len(notes))
    sums = {
        "readable": _ratio(parsed, every),
        "flag_accuracy": _ratio((alarm == wrong) & parsed, every),
        "precision": _ratio(alarm & wrong, alarm),
        "recall": _ratio(alarm & wrong, wrong),
        "f1": _ratio(2.0 * (alarm & wrong), alarm * 1.0 + wrong),
        "false_positive_rate": _ratio(alarm & ~wrong, ~wrong),
        "sentence_accuracy": _ratio(same_sentence & parsed, every),
    }
    corrections, why = _corrections(notes, given, scorers)
    return Grades(
        notes=tuple(notes),
        sums=sums | corrections,
        why=why,
        unreadable=sum(said is not None and not said.parsed for said in answers),
        missing=answers.count(None),
    )


def _ratio(above: Numbers, below: Numbers) -> Numbers:
    return np.stack([above.astype(float), below.astype(float)])


def _corrections(
    notes: Sequence[ReferenceNote], given: Sequence[Prediction], scorers: Mapping[str, Scorer]
) -> tuple[dict[str, Numbers], dict[str, str]]:
    """The measures of the corrections, and why some are absent."""
    right = np.array([" ".join((note.correction or "").split()) for note in notes], dtype=object)
    said = np.array([" ".join((one.scored_correction or "").split()) for one in given], dtype=object)
    both = (right != "") & (said != "")
    neither = (right == "") & (said == "") & np.array([one.parsed for one in given])
    scores: dict[str, Numbers] = {}
    why: dict[str, str] = {}
    for name, scorer in scorers.items():
        try:
            of_pairs = scorer(list(said[both]), list(right[both]))
        except NotComputed as reason:
            why[name] = str(reason)
        else:
            scores[name] = np.zeros(len(notes))
            scores[name][both] = of_pairs
    if why:
        why["aggregate"] = f"needs {' and '.join(why)}"
    elif scores:
        scores["aggregate"] = np.mean(list(scores.values()), axis=0)
    why |= {f"{name}_composite": reason for name, reason in why.items()}
    sums = {name: _ratio(of_notes, both) for name, of_notes in scores.items()}
    composites = {f"{name}_composite": _ratio(s + neither, np.ones(len(notes))) for name, s in scores.items()}
    return sums | composites, why


def summarise(seeds: Sequence[Grades], *, resamples: int = RESAMPLES, seed: int = 0) -> Scores:
    """The scores of one system.

    Args:
        seeds: Its submissions on the same notes; usually one. Values are means over them.
        resamples: Of the bootstrap; 0 leaves the intervals out.
        seed: Of the bootstrap's draws.

    Raises:
        ValueError: The submissions are of different notes.
    """
    notes = seeds[0].notes
    absent = {name: Measure(None, why=why) for grades in seeds for name, why in grades.why.items()}
    names = [name for name in seeds[0].sums if name not in absent]
    groups = _groups(notes)
    masks: dict[tuple[str, str], Numbers] = {("", ""): np.ones(len(notes))}
    masks |= {(kind, label): mask for kind, of_kind in groups.items() for label, mask in of_kind.items()}
    keys = [(group, name) for group in masks for name in names if group == ("", "") or name in GROUP_MEASURES]
    values, drawn = _values(seeds, [(masks[group], name) for group, name in keys], resamples, seed)
    found: dict[tuple[str, str], dict[str, Measure]] = {group: {} for group in masks}
    for (group, name), of_seeds, samples in zip(keys, values, drawn, strict=True):
        found[group][name] = _measure(name, of_seeds, samples)
    return Scores(
        notes=len(notes),
        errors=sum(note.flag for note in notes),
        unreadable=float(np.mean([grades.unreadable for grades in seeds])),
        missing=float(np.mean([grades.missing for grades in seeds])),
        measures=found["", ""] | absent,
        groups={
            kind: {label: Group(int(mask.sum()), found[kind, label]) for label, mask in of_kind.items()}
            for kind, of_kind in groups.items()
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
    _check_same_notes([*first, *second])
    absent = {name for grades in (*first, *second) for name in grades.why}
    names = [name for name in first[0].sums if name not in absent]
    keys = [(np.ones(len(first[0].notes)), name) for name in names]
    (a, drawn_a), (b, drawn_b) = (_values(seeds, keys, resamples, seed) for seeds in (first, second))
    differences = {name: Difference(None) for name in sorted(absent)}
    for name, value, samples in zip(names, a.mean(axis=1) - b.mean(axis=1), drawn_a - drawn_b, strict=True):
        low, high = _interval(samples)
        differences[name] = Difference(float(value) if np.isfinite(value) else None)
        if low is not None and np.isfinite(value):
            # One is added to both counts: no finite number of draws shows a p value of 0.
            tail = min((samples <= 0).sum(), (samples >= 0).sum())
            p_value = min(1.0, 2.0 * (tail + 1) / (np.isfinite(samples).sum() + 1))
            differences[name] = Difference(float(value), low, high, float(p_value))
    tested = ("flag_accuracy", "sentence_accuracy") if len(first) == len(second) == 1 else ()
    return Comparison(differences, {name: _mcnemar(first[0].sums[name][0], second[0].sums[name][0]) for name in tested})


def _groups(notes: Sequence[ReferenceNote]) -> dict[str, dict[str, Numbers]]:
    """Masks (N,) of the notes by what they are told apart by, then by name."""
    lengths = [len(note.text.split()) for note in notes]
    of_notes: dict[str, list[str | None]] = {
        "notes": ["with an error" if note.flag else "without an error" for note in notes],
        "error type": [note.error_type.value if note.error_type else None for note in notes],
        "error position": [note.error_position for note in notes],
        "length": [next(name for most, name in _LENGTHS.items() if length <= most) for length in lengths],
        "subset": [note.subset for note in notes],
    }
    order = {
        "notes": ["with an error", "without an error"],
        "error type": [kind.value for kind in ErrorType],
        "error position": ["first", "middle", "last"],
        "length": list(_LENGTHS.values()),
        "subset": sorted({note.subset for note in notes}),
    }
    masks = {
        kind: {label: np.array(found) == label for label in order[kind] if label in found}
        for kind, found in of_notes.items()
    }
    return {kind: of_kind for kind, of_kind in masks.items() if kind != "subset" or len(of_kind) > 1}


def _values(
    seeds: Sequence[Grades], keys: Sequence[tuple[Numbers, str]], resamples: int, seed: int
) -> tuple[Numbers, Numbers]:
    """Each measure of some of the notes per seed (K, S), and its mean over the seeds per draw (K, resamples).

    The draws are the same for every system. NaN is 0/0.
    """
    _check_same_notes(seeds)
    case = np.unique([note.case or note.text_id for note in seeds[0].notes], return_inverse=True)[1]
    sums = np.stack(
        [np.bincount(case, side * mask) for grades in seeds for mask, name in keys for side in grades.sums[name]]
    )  # (S * K * 2, cases)
    cases = sums.shape[1]
    drawn = np.random.default_rng(seed).integers(cases, size=(resamples, cases))
    times = np.stack([np.bincount(row, minlength=cases) for row in drawn]) if resamples else np.empty((0, cases))
    with np.errstate(invalid="ignore"):
        whole = sums.sum(axis=1).reshape(len(seeds), len(keys), 2)
        samples = (times @ sums.T).reshape(resamples, len(seeds), len(keys), 2)
        return (whole[..., 0] / whole[..., 1]).T, (samples[..., 0] / samples[..., 1]).mean(axis=1).T


def _measure(name: str, of_seeds: Numbers, samples: Numbers) -> Measure:
    value = float(of_seeds.mean())
    if not np.isfinite(value):
        return Measure(None, why=_NOTHING_TO_COUNT.get(name, _NO_PAIR))
    spread = float(of_seeds.std(ddof=1)) if len(of_seeds) > 1 else None
    low, high = _interval(samples)
    return Measure(value, low, high, spread)


def _interval(samples: Numbers) -> tuple[float, float] | tuple[None, None]:
    """The 95 % interval of the draws in which there was something to count."""
    samples = samples[np.isfinite(samples)]
    if not len(samples):
        return None, None
    low, high = np.percentile(samples, [2.5, 97.5])
    return float(low), float(high)


def _mcnemar(first: Numbers, second: Numbers) -> McNemar:
    only_first, only_second = int((first > second).sum()), int((second > first).sum())
    together = only_first + only_second
    tail = sum(math.comb(together, k) for k in range(min(only_first, only_second) + 1))
    return McNemar(only_first, only_second, min(1.0, 2 * tail / 2**together))


def _check_same_notes(seeds: Sequence[Grades]) -> None:
    if any(grades.notes != seeds[0].notes for grades in seeds):
        raise ValueError("the submissions were scored on different notes; score all of them on one reference.")
