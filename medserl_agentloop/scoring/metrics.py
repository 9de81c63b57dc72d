"""Scores with 95 % intervals from graded notes, floors to beat, and verl's validation with both.

The bootstrap draws whole cases, because the two notes of a case are not independent, and recomputes
both sums of a measure; Wilson's interval with this variance is also valid near 0 and 1.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from medserl_agentloop.scoring.notes import CUT_OFF, TEXTS, Prediction, ReferenceNote, majority
from medserl_agentloop.scoring.official import SCORERS, Grades, Numbers, Scorer, grade

RESAMPLES = 2000
GROUP_MEASURES = ("flag_accuracy", "sentence_accuracy", "rouge_1")
PREVALENCES = (0.01, 0.05, 0.10)
"""Shares of notes with an error for which the precision of an alarm is computed."""
COMPARED = ("flag_accuracy", "f1", "sentence_accuracy", "rouge_1_composite")
"""The measures that a floor bounds; not recall, for which "always error" scores 1."""
_CORE = ("flag_accuracy", "sentence_accuracy", "f1")  # verl's word for what counts most
_NOTHING_TO_COUNT = {
    "precision": "no note is said to have an error",
    "recall": "no note has an error",
    "f1": "no note has an error and none is said to have one",
    "false_positive_rate": "every note has an error",
}
_NO_PAIR = "no note has a correction both in the reference and by the system"
_ROUNDING = 1e-6  # a perfect ROUGE is a little less than 1


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
    """One system's scores. Notes with an unreadable answer, or none, are wrong in everything."""

    notes: int
    errors: int
    unreadable: float  # mean over the seeds, as is the next
    missing: float
    measures: dict[str, Estimate]
    groups: dict[str, dict[str, dict[str, Any]]]  # kind and name -> ``notes`` and ``measures``
    screening: dict[str, Estimate]  # what a reader of the alarms would see
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


def summarise(seeds: Sequence[Grades], *, resamples: int = RESAMPLES) -> Scores:
    """A system's scores: means over its submissions; without ``resamples`` no intervals.

    ValueError if the submissions are about different notes.
    """
    weights = _weights(seeds, resamples)
    notes = seeds[0].notes
    absent = {name: Estimate(None, why=why) for grades in seeds for name, why in grades.why.items()}
    names = [name for name in seeds[0].sums if name not in absent]
    measures = {name: _measure(seeds, name, weights) for name in names}
    groups: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for kind, label, mask in _groups(notes):
        of_group = {n: _measure(seeds, n, weights, mask) for n in GROUP_MEASURES if n in names}
        groups[kind][label] = {"notes": int(mask.sum()), "measures": of_group}
    return Scores(
        notes=len(notes),
        errors=sum(note.flag for note in notes),
        unreadable=float(np.mean([grades.unreadable for grades in seeds])),
        missing=float(np.mean([grades.missing for grades in seeds])),
        measures=measures | absent,
        groups=dict(groups),
        screening=_screening(measures["recall"], measures["false_positive_rate"]),
        seeds=len(seeds),
    )


def compare(
    first: Sequence[Grades], second: Sequence[Grades]
) -> dict[str, dict[str, float | None]]:
    """The first system minus the second on the same notes, by measure, JSON-able.

    ``value`` is None if one of the two is not computed. The 95 % interval and the two-sided
    ``p_value`` are by the paired bootstrap; a single case gives no interval. ValueError if the
    notes differ.
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
        if not np.isfinite(value):
            continue
        one["value"] = value
        if len(draws):
            cases = min(len(_counted_cases(seeds, name)) for seeds in (first, second))
            if cases > 1:
                one["low"], one["high"] = np.percentile(draws, [2.5, 97.5]).tolist()
            # No finite number of draws shows a p value of 0, so one is added to both counts. All of
            # few cases may differ in one direction by chance: that is the second probability.
            tail = min((draws <= 0).sum(), (draws >= 0).sum())
            of_draws = min(1.0, float(2 * (tail + 1) / (len(draws) + 1)))
            one["p_value"] = max(of_draws, 2.0 ** (1 - cases))
    return differences


def _screening(recall: Estimate, alarms: Estimate) -> dict[str, Estimate]:
    """False alarms per 100 correct notes, and the precision of an alarm by Bayes' rule.

    The interval of a precision joins the ends of both rates' intervals, so it is conservative.
    """

    def precision(share: float, found: float | None, wrong: float | None) -> float | None:
        if found is None or wrong is None or not found + wrong:
            return None
        return share * found / (share * found + (1 - share) * wrong)

    ends = ((recall.value, alarms.value), (recall.low, alarms.high), (recall.high, alarms.low))
    why = recall.why or alarms.why or _NOTHING_TO_COUNT["precision"]
    rates = (alarms.value, alarms.low, alarms.high)
    value, low, high = (None if rate is None else 100 * rate for rate in rates)
    screening = {"false_alarms_per_100_correct_notes": Estimate(value, low, high, why=alarms.why)}
    for share in PREVALENCES:
        value, low, high = (precision(share, *end) for end in ends)
        name = f"precision_at_a_prevalence_of_{100 * share:g}_percent"
        known = Estimate(value, low, high)
        screening[name] = Estimate(None, why=why) if value is None else known
    return screening


def _groups(notes: Sequence[ReferenceNote]) -> Iterator[tuple[str, str, Numbers]]:
    """The kind, name and mask (N,) of each group that has notes."""
    flags = np.array([note.flag for note in notes])
    groups = [("notes", "with an error", flags), ("notes", "without an error", ~flags)]
    for kind, name_of, names in (
        ("error type", "error_type", sorted({n.error_type for n in notes if n.error_type})),
        ("error position", "error_position", ["first", "middle", "last"]),
    ):
        values = np.array([getattr(note, name_of) for note in notes], dtype=object)
        groups += [(kind, name, values == name) for name in names]
    return (group for group in groups if group[2].any())


# --- intervals ---


def _weights(seeds: Sequence[Grades], resamples: int) -> Numbers:
    """Counts of each note in each bootstrap draw, which draws whole cases: (resamples, N)."""
    notes = seeds[0].notes
    if any(grades.notes != notes for grades in seeds):
        raise ValueError(
            "the submissions were scored on different notes; score all of them on one reference."
        )
    names, case = np.unique([note.case or note.text_id for note in notes], return_inverse=True)
    equally = np.full(len(names), 1 / len(names))
    draws = np.random.default_rng(0).multinomial(len(names), equally, size=resamples)
    return draws.astype(float)[:, case]


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
        n.case or n.text_id for n, counts in zip(seeds[0].notes, counted, strict=True) if counts
    }


def wilson_interval(hits: float, trials: float, quantile: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a share, also of fractional counts; (0, 1) without trials."""
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


def student_quantile(degrees_of_freedom: float) -> float:
    """The standard errors that a 95 % interval reaches to each side, by Student's t."""
    from scipy.stats import t  # not at the top: it costs every command half a second

    return float(t.ppf(0.975, degrees_of_freedom))


# --- floors ---


def floors(reference: Sequence[ReferenceNote]) -> dict[str, Scores]:
    """The scores of answers that need no medicine, by name, without intervals."""
    given = {
        "always no error": [Prediction(note.text_id) for note in reference],
        "always error (first sentence)": [_copied(note, min) for note in reference],
        "last sentence is wrong": [_copied(note, max) for note in reference],
    }
    return {name: score(reference, answers, resamples=0) for name, answers in given.items()}


def _copied(note: ReferenceNote, which: Any) -> Prediction:
    """An error in the first or last sentence (``min``, ``max``), corrected to the same sentence."""
    number = which(note.sentences, default=0)
    return Prediction(note.text_id, True, number, note.sentences.get(number) or None)


def floors_above(scores: Scores, bounds: Mapping[str, Scores]) -> dict[str, tuple[str, ...]]:
    """For each measure that a floor bounds, the floors that a system stays below."""
    values = {name: scores.measures[name].value for name in COMPARED if name in scores.measures}
    return {
        name: tuple(f for f, of in bounds.items() if value < (of.measures[name].value or 0.0))
        for name, value in values.items()
        if value is not None
    }


# --- verl's validation ---


NotesBySet = Mapping[str, Mapping[str, ReferenceNote]]
"""Reference notes by data set, then by text id."""


def notes_by_set(rows: Iterable[tuple[str, Mapping[str, Any]]]) -> NotesBySet:
    """The notes of evaluation rows, each with its ``data_source`` and its ``extra_info``."""
    notes: dict[str, dict[str, ReferenceNote]] = defaultdict(dict)
    for source, facts in rows:
        note = ReferenceNote.from_extra_info(facts)
        notes[_data_set(source)][note.text_id] = note
    return notes


def scores_by_set(
    notes: NotesBySet, data_sources: Sequence[str], facts: Mapping[str, Sequence[str | None]]
) -> Iterator[tuple[dict[str, float], str]]:
    """Each data set's metrics by verl's names, and a line with them; ``facts``: ``TEXTS``."""
    answers: dict[str, dict[str, list[Prediction]]] = defaultdict(lambda: defaultdict(list))
    cut: dict[str, list[bool]] = defaultdict(list)
    columns = (facts[name] for name in TEXTS)
    for source, text_id, verdict, sentence, correction, number, was_cut in zip(
        data_sources, *columns, strict=True
    ):
        name = _data_set(source)
        note = notes.get(name, {}).get(text_id or "")
        if note is not None and verdict is not None:
            named = None if number is None else int(number)
            answer = Prediction.of_answer(note, verdict, sentence, correction, named)
            answers[name][note.text_id].append(answer)
            cut[name].append(was_cut == CUT_OFF)
    for name, by_id in notes.items():
        reference = [*by_id.values()]
        scores = score(reference, map(majority, answers[name].values()), resamples=0)
        cut_rate = float(np.mean(cut[name])) if name in cut else None
        yield _reported(name, scores, floors(reference), cut_rate)


def _reported(
    name: str, scores: Scores, bounds: Mapping[str, Scores], cut_rate: float | None
) -> tuple[dict[str, float], str]:
    values: dict[str, float | None] = {
        "notes": float(scores.notes),
        "unreadable": scores.unreadable,
        "missing": scores.missing,
        "cut_rate": cut_rate,
    }
    values |= {measure: m.value for measure, m in scores.measures.items()}
    for kind, groups in scores.groups.items():
        for group, of in groups.items():
            values |= {f"{kind}/{group}/{key}": m.value for key, m in of["measures"].items()}
    for title, floor in bounds.items():
        values |= {f"floor/{title}/{key}": floor.measures[key].value for key in COMPARED}
    metrics = {
        f"val-{'core' if key in _CORE else 'aux'}/{name}/{_metric_name(key)}": value
        for key, value in values.items()
        if value is not None
    }
    said = [f"{key} {values[key]:.3f}" for key in _CORE if values[key] is not None]
    said += [] if cut_rate is None else [f"{100 * cut_rate:.1f} % of the answers cut off"]
    below = floors_above(scores, bounds).items()
    said += [f"{key} is below {', '.join(names)}" for key, names in below if names]
    line = ", ".join(said).replace("_", " ")
    return metrics, f"validation on {name}, {scores.notes} notes: {line}"


def _metric_name(text: str) -> str:
    """A name that every logger accepts; MLflow refuses parentheses and commas."""
    return re.sub(r"[^\w/.-]+", "_", text).strip("_")


def _data_set(data_source: str) -> str:
    return str(data_source).partition("/")[0]
