"""Scores with 95 % intervals from predictions and their reference.

Every measure is a ratio of two sums over notes; docs/evaluation.md has the rules of the shared
task. The bootstrap draws whole cases, because the two notes of a case are not independent, and
recomputes both sums; Wilson's interval with the variance of these draws holds near 0 and 1 too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from medserl_agentloop.scoring.notes import Prediction, ReferenceNote
from medserl_agentloop.scoring.official import SCORERS, Scorer

RESAMPLES = 2000
GROUP_MEASURES = ("flag_accuracy", "sentence_accuracy", "rouge_1")
PREVALENCES = (0.01, 0.05, 0.10)
"""Shares of notes with an error for which the precision of an alarm is computed."""
_NOTHING_TO_COUNT = {
    "precision": "no note is said to have an error",
    "recall": "no note has an error",
    "f1": "no note has an error and none is said to have one",
    "false_positive_rate": "every note has an error",
}
_NO_PAIR = "no note has a correction both in the reference and by the system"

Z_95 = 1.96  # standard errors from the middle of a 95 % interval to its ends
_ROUNDING = 1e-6  # a perfect ROUGE is a little less than 1

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Grades:
    """One submission, note by note, in the order of the text ids."""

    notes: tuple[ReferenceNote, ...]
    sums: dict[
        str, Numbers
    ]  # of each measure, what each note adds above and below the line; (2, N)
    why: dict[str, str]  # of each measure that is not computed, the reason
    unreadable: int
    missing: int


@dataclass(frozen=True)
class Estimate:
    """A score in [0, 1] with its 95 % interval; None is not computed."""

    value: float | None
    low: float | None = None
    high: float | None = None
    spread: float | None = None  # standard deviation between pooled seeds
    why: str | None = None  # the score is not computed


@dataclass(frozen=True)
class Scores:
    """Everything that is said about one system.

    Notes with an unreadable answer, or none, are wrong in everything.
    """

    notes: int
    errors: int
    unreadable: float  # mean over the seeds, as is the next
    missing: float
    measures: dict[str, Estimate]
    groups: dict[
        str, dict[str, dict[str, Any]]
    ]  # by kind (error type, position) and name: ``notes`` and ``measures``
    screening: dict[str, Estimate]  # what a reader of the alarms would meet
    seeds: int = 1


def score(
    reference: Sequence[ReferenceNote],
    predictions: Iterable[Prediction],
    *,
    scorers: Mapping[str, Scorer] = SCORERS,
    resamples: int = RESAMPLES,
) -> Scores:
    """Score one submission; see ``grade`` and ``summarise``."""
    return summarise([grade(reference, predictions, scorers)], resamples=resamples)


def grade(
    reference: Sequence[ReferenceNote],
    predictions: Iterable[Prediction],
    scorers: Mapping[str, Scorer] = SCORERS,
) -> Grades:
    """Judge every note, with the scorers of corrections by measure; of several predictions the last
    counts.
    """
    if not reference:
        raise ValueError("the reference has no notes; give MEDEC's CSV with at least one row.")
    notes = sorted(reference, key=lambda note: note.text_id)
    by_id = {prediction.text_id: prediction for prediction in predictions}
    answers = [by_id.get(note.text_id) for note in notes]
    given = [
        answer or Prediction(note.text_id, parsed=False)
        for answer, note in zip(answers, notes, strict=True)
    ]
    parsed = np.array([prediction.parsed for prediction in given])
    wrong = np.array([note.flag for note in notes])
    alarm = np.array([prediction.flag for prediction in given]) & parsed
    same_sentence = np.array(
        [p.sentence_id == note.sentence_id for p, note in zip(given, notes, strict=True)]
    )
    every = np.ones(len(notes))
    sums = {
        "readable": (parsed, every),
        "flag_accuracy": ((alarm == wrong) & parsed, every),
        "precision": (alarm & wrong, alarm),
        "recall": (alarm & wrong, wrong),
        "f1": (2.0 * (alarm & wrong), alarm * 1.0 + wrong),
        "false_positive_rate": (alarm & ~wrong, ~wrong),
        "sentence_accuracy": (same_sentence & parsed, every),
    }
    corrections, why = _corrections(notes, given, scorers)
    return Grades(
        notes=tuple(notes),
        sums={name: np.array(sides, dtype=float) for name, sides in (sums | corrections).items()},
        why=why,
        unreadable=sum(answer is not None and not answer.parsed for answer in answers),
        missing=answers.count(None),
    )


def _corrections(
    notes: Sequence[ReferenceNote], given: Sequence[Prediction], scorers: Mapping[str, Scorer]
) -> tuple[dict[str, tuple[Numbers, Numbers]], dict[str, str]]:
    """The measures of the corrections, and why some are absent."""
    right = np.array([" ".join((note.correction or "").split()) for note in notes], dtype=object)
    predicted = np.array(
        [" ".join((one.scored_correction or "").split()) for one in given], dtype=object
    )
    both = (right != "") & (predicted != "")
    neither = (right == "") & (predicted == "") & np.array([one.parsed for one in given])
    scores: dict[str, Numbers] = {}
    why: dict[str, str] = {}
    for name, scorer in scorers.items():
        of_pairs = scorer(list(predicted[both]), list(right[both]))
        if isinstance(of_pairs, str):
            why[name] = of_pairs
        else:
            scores[name] = np.zeros(len(notes))
            scores[name][both] = of_pairs
    if why:
        why["aggregate"] = f"needs {' and '.join(why)}"
    elif scores:
        scores["aggregate"] = np.mean(list(scores.values()), axis=0)
    why |= {f"{name}_composite": reason for name, reason in why.items()}
    sums = {name: (of_notes, both) for name, of_notes in scores.items()}
    composites = {
        f"{name}_composite": (s + neither, np.ones(len(notes))) for name, s in scores.items()
    }
    return sums | composites, why


def summarise(seeds: Sequence[Grades], *, resamples: int = RESAMPLES) -> Scores:
    """The scores of a system, means over its submissions on the same notes; no intervals without
    ``resamples``.
    """
    weights = _weights(seeds, resamples)
    notes = seeds[0].notes
    absent = {name: Estimate(None, why=why) for grades in seeds for name, why in grades.why.items()}
    names = [name for name in seeds[0].sums if name not in absent]
    of_groups = [name for name in GROUP_MEASURES if name in names]
    measures = {name: _measure(seeds, name, weights) for name in names}
    return Scores(
        notes=len(notes),
        errors=sum(note.flag for note in notes),
        unreadable=float(np.mean([grades.unreadable for grades in seeds])),
        missing=float(np.mean([grades.missing for grades in seeds])),
        measures=measures | absent,
        screening=_screening(measures["recall"], measures["false_positive_rate"]),
        groups={
            kind: {
                label: {
                    "notes": int(mask.sum()),
                    "measures": {name: _measure(seeds, name, weights, mask) for name in of_groups},
                }
                for label, mask in masks.items()
            }
            for kind, masks in _groups(notes).items()
        },
        seeds=len(seeds),
    )


def _screening(recall: Estimate, alarms: Estimate) -> dict[str, Estimate]:
    """False alarms per 100 correct notes, and by Bayes' rule the precision of an alarm.

    The interval of a precision joins the ends of those of recall and of false alarms, so it is
    conservative.
    """
    rates = (alarms.value, alarms.low, alarms.high)
    value, low, high = (None if rate is None else 100 * rate for rate in rates)
    found = {"false_alarms_per_100_correct_notes": Estimate(value, low, high, why=alarms.why)}
    for share in PREVALENCES:
        value = _precision(recall.value, alarms.value, share)
        low = _precision(recall.low, alarms.high, share)
        high = _precision(recall.high, alarms.low, share)
        why = recall.why or alarms.why or "no note is said to have an error"
        name = f"precision_at_a_prevalence_of_{100 * share:g}_percent"
        found[name] = Estimate(None, why=why) if value is None else Estimate(value, low, high)
    return found


def _precision(recall: float | None, alarms: float | None, prevalence: float) -> float | None:
    if recall is None or alarms is None or not recall + alarms:
        return None
    return prevalence * recall / (prevalence * recall + (1 - prevalence) * alarms)


def compare(
    first: Sequence[Grades], second: Sequence[Grades]
) -> dict[str, dict[str, float | None]]:
    """The first system minus the second on the same notes, by measure, JSON-able; a ValueError if
    the notes differ.

    ``value`` is None where one of the two is not computed; the 95 % interval and the two-sided
    ``p_value`` are by the paired bootstrap. Where a system is measured by a single case, there is
    no interval.
    """
    weights = _weights([*first, *second], RESAMPLES)
    absent = {name for grades in (*first, *second) for name in grades.why}
    differences: dict[str, dict[str, float | None]] = {}
    for name in (*sorted(absent), *(name for name in first[0].sums if name not in absent)):
        differences[name] = one = dict.fromkeys(("value", "low", "high", "p_value"))
        if name in absent:
            continue
        (a, drawn_a), (b, drawn_b) = (_ratios(seeds, name, weights) for seeds in (first, second))
        value, draws = float(a.mean() - b.mean()), drawn_a - drawn_b
        draws = draws[np.isfinite(draws)]
        if np.isfinite(value):
            one["value"] = value
        if np.isfinite(value) and len(draws):
            cases = min(len(_counted_cases(seeds, name)) for seeds in (first, second))
            if cases > 1:
                one["low"], one["high"] = np.percentile(draws, [2.5, 97.5]).tolist()
            # One is added to both counts: no finite number of draws shows a p value of 0. Nor do
            # few cases, which by chance all differ in one direction with the second of these
            # probabilities.
            tail = min((draws <= 0).sum(), (draws >= 0).sum())
            one["p_value"] = max(
                min(1.0, float(2 * (tail + 1) / (len(draws) + 1))), 2.0 ** (1 - cases)
            )
    return differences


def _groups(notes: Sequence[ReferenceNote]) -> dict[str, dict[str, Numbers]]:
    """Return masks (N,) of the notes by kind of group, then by name."""
    kinds = sorted({note.error_type for note in notes if note.error_type})
    groups: dict[str, dict[str, list[bool]]] = {
        "notes": {
            "with an error": [note.flag for note in notes],
            "without an error": [not note.flag for note in notes],
        },
        "error type": {kind: [note.error_type == kind for note in notes] for kind in kinds},
        "error position": {
            at: [note.error_position == at for note in notes] for at in ("first", "middle", "last")
        },
    }
    return {
        kind: {name: np.array(mask) for name, mask in named.items() if any(mask)}
        for kind, named in groups.items()
        if named
    }


def _weights(seeds: Sequence[Grades], resamples: int) -> Numbers:
    """Return how often each note is drawn with its case in each bootstrap draw (resamples, N); the
    same for all.
    """
    notes = seeds[0].notes
    if any(grades.notes != notes for grades in seeds):
        raise ValueError(
            "the submissions were scored on different notes; score all of them on one reference."
        )
    names, case = np.unique([note.case or note.text_id for note in notes], return_inverse=True)
    equally = np.full(len(names), 1 / len(names))
    return (
        np.random.default_rng(0)
        .multinomial(len(names), equally, size=resamples)
        .astype(float)[:, case]
    )


def _ratios(
    seeds: Sequence[Grades], name: str, weights: Numbers, mask: Numbers | float = 1.0
) -> tuple[Numbers, Numbers]:
    """A measure of the notes under the mask per seed (S,), and its mean over the seeds per draw.

    NaN is 0/0.
    """
    sides = np.array([grades.sums[name] for grades in seeds]) * mask  # (S, 2, N)
    with np.errstate(invalid="ignore"):
        whole, drawn = sides.sum(axis=2), sides @ weights.T
        return whole[:, 0] / whole[:, 1], (drawn[:, 0] / drawn[:, 1]).mean(axis=0)


def _measure(
    seeds: Sequence[Grades], name: str, weights: Numbers, mask: Numbers | float = 1.0
) -> Estimate:
    of_seeds, draws = _ratios(seeds, name, weights, mask)
    value = float(of_seeds.mean())
    if not np.isfinite(value):
        return Estimate(None, why=_NOTHING_TO_COUNT.get(name, _NO_PAIR))
    spread = float(of_seeds.std(ddof=1)) if len(of_seeds) > 1 else None
    draws = draws[np.isfinite(draws)]
    if not len(draws):
        return Estimate(value, spread=spread)
    cases = _counted_cases(seeds, name, mask)
    # The draws of a single case are all alike.
    uncertain, variance = value * (1 - value) * (len(cases) > 1), float(draws.var())
    if uncertain > _ROUNDING and not variance:
        return Estimate(value, value, value, spread)
    # As many notes as give this variance; 0 and 1 have none.
    trials = uncertain / variance if uncertain > _ROUNDING else len(cases)
    return Estimate(value, *wilson_interval(value * trials, trials), spread)


def _counted_cases(seeds: Sequence[Grades], name: str, mask: Numbers | float = 1.0) -> set[str]:
    """The cases that a measure of the notes under the mask counts, in any of the seeds."""
    counted = np.sum([grades.sums[name][1] for grades in seeds], axis=0) * mask > 0
    return {
        note.case or note.text_id
        for note, counts in zip(seeds[0].notes, counted, strict=True)
        if counts
    }


def wilson_interval(hits: float, trials: float, quantile: float = Z_95) -> tuple[float, float]:
    """Wilson's 95 % interval of a share; (0, 1) without trials."""
    if not trials:
        return 0.0, 1.0
    share, of_one = hits / trials, quantile**2 / trials
    centre = (share + of_one / 2) / (1 + of_one)
    half = math.sqrt(of_one * (share * (1 - share) + of_one / 4)) / (1 + of_one)
    return max(0.0, centre - half), min(1.0, centre + half)


def share_difference(first: tuple[int, int], second: tuple[int, int]) -> tuple[float, float, float]:
    """The second share minus the first, of (hits, trials) each, with Newcombe's 95 % interval."""
    p, q = (hits / trials for hits, trials in (first, second))
    (p_low, p_high), (q_low, q_high) = wilson_interval(*first), wilson_interval(*second)
    down, up = math.hypot(q - q_low, p_high - p), math.hypot(q_high - q, p - p_low)
    return q - p, q - p - down, q - p + up


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean of two or more values with Student's 95 % interval."""
    mean, deviation = float(np.mean(values)), float(np.std(values, ddof=1))
    half = student_quantile(len(values) - 1) * deviation / len(values) ** 0.5
    return mean, mean - half, mean + half


def student_quantile(degrees_of_freedom: float) -> float:
    """The standard errors that a 95 % interval reaches to each side, by Student's t."""
    from scipy.stats import t  # not at the top: half a second of every command

    return float(t.ppf(0.975, degrees_of_freedom))
