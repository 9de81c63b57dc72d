"""Floors that need no medicine, and the scores of verl's validation with them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from medserl_agentloop.scoring.metrics import Scores, score
from medserl_agentloop.scoring.notes import CUT_OFF, TEXTS, Prediction, ReferenceNote, majority

_CORE = ("flag_accuracy", "sentence_accuracy", "f1")  # verl's word for what counts most
COMPARED = ("flag_accuracy", "f1", "sentence_accuracy", "rouge_1_composite")
"""The measures that a floor bounds. "Always error" has a recall of 1, so recall alone says nothing.
"""

NotesBySet = Mapping[str, Mapping[str, ReferenceNote]]
"""Reference notes by data set, then by text id."""


def floors(
    reference: Sequence[ReferenceNote], training: Sequence[ReferenceNote] = ()
) -> tuple[dict[str, Scores], dict[str, str]]:
    """The floors' scores by name, without intervals, and why others are not computed; two learn
    from training notes.
    """
    no_error = [Prediction(note.text_id) for note in reference]
    first, last = ([_copied(note, which) for note in reference] for which in (min, max))
    given = {
        "always no error": no_error,
        "always error (first sentence)": first,
        "last sentence is wrong": last,
    }
    classifiers = ("bag of words", "white space and length")
    absent = {} if training else dict.fromkeys(classifiers, "--train names no training set")
    for name in classifiers if training else ():
        try:
            classifier = _classifier(name).fit(
                [note.text for note in training], [note.flag for note in training]
            )
            flags = classifier.predict([note.text for note in reference])
        except ImportError:
            absent[name] = "scikit-learn is not installed: pip install 'medserl-agentloop[eval]'"
        except ValueError as error:
            absent[name] = str(error).splitlines()[0]
        else:
            given[name] = [
                wrong if flag else right
                for flag, wrong, right in zip(flags, last, no_error, strict=True)
            ]
    return {
        name: score(reference, predictions, resamples=0) for name, predictions in given.items()
    }, absent


def floors_above(scores: Scores, bounds: Mapping[str, Scores]) -> dict[str, tuple[str, ...]]:
    """For each measure that a floor bounds, the floors that a system stays below."""
    values = {name: scores.measures[name].value for name in COMPARED if name in scores.measures}
    return {
        measure: tuple(
            name for name, floor in bounds.items() if value < (floor.measures[measure].value or 0.0)
        )
        for measure, value in values.items()
        if value is not None
    }


def notes_by_set(rows: Iterable[tuple[str, Mapping[str, Any]]]) -> NotesBySet:
    """The notes of evaluation rows, each with its ``data_source`` and its ``extra_info``."""
    notes: dict[str, dict[str, ReferenceNote]] = {}
    for source, facts in rows:
        note = ReferenceNote.from_extra_info(facts)
        notes.setdefault(_data_set(source), {})[note.text_id] = note
    return notes


def scores_by_set(
    notes: NotesBySet, data_sources: Sequence[str], facts: Mapping[str, Sequence[str | None]]
) -> Iterator[tuple[dict[str, float], str]]:
    """For each data set its metrics by verl's names, and a line that says them, from the ``TEXTS``
    of the answers.
    """
    answers: dict[tuple[str, str | None], list[Prediction]] = {}
    cut: dict[str, list[bool]] = {}
    columns = (facts[name] for name in TEXTS)
    for source, text_id, verdict, sentence, correction, number, was_cut in zip(
        data_sources, *columns, strict=True
    ):
        name = _data_set(source)
        note = notes.get(name, {}).get(text_id or "")
        if note is not None and verdict is not None:
            named = None if number is None else int(number)
            answer = Prediction.of_answer(note, verdict, sentence, correction, named)
            answers.setdefault((name, text_id), []).append(answer)
            cut.setdefault(name, []).append(was_cut == CUT_OFF)
    for name, by_id in notes.items():
        reference = list(by_id.values())
        predictions = [
            majority(answers[name, n.text_id]) for n in reference if (name, n.text_id) in answers
        ]
        cut_rate = sum(cut[name]) / len(cut[name]) if name in cut else None
        yield _reported(name, reference, score(reference, predictions, resamples=0), cut_rate)


def _reported(
    name: str, reference: Sequence[ReferenceNote], scores: Scores, cut_rate: float | None
) -> tuple[dict[str, float], str]:
    bounds, _ = floors(reference)
    values: dict[str, float | None] = {
        "notes": float(scores.notes),
        "unreadable": scores.unreadable,
        "missing": scores.missing,
        "cut_rate": cut_rate,
    }
    values |= {measure: m.value for measure, m in scores.measures.items()}
    for kind, groups in scores.groups.items():
        for group, of_group in groups.items():
            values |= {
                f"{kind}/{group}/{measure}": m.value for measure, m in of_group["measures"].items()
            }
    for title, floor in bounds.items():
        values |= {
            f"floor/{title}/{measure}": floor.measures[measure].value for measure in COMPARED
        }
    metrics = {
        f"val-{'core' if key in _CORE else 'aux'}/{name}/{metric_name(key)}": value
        for key, value in values.items()
        if value is not None
    }
    parts = [f"{key} {values[key]:.3f}" for key in _CORE if values[key] is not None]
    parts += [] if cut_rate is None else [f"{100 * cut_rate:.1f} % of the answers cut off"]
    parts += [
        f"{key} is below {', '.join(names)}"
        for key, names in floors_above(scores, bounds).items()
        if names
    ]
    return (
        metrics,
        f"validation on {name}, {scores.notes} notes: {', '.join(parts).replace('_', ' ')}",
    )


def metric_name(text: str) -> str:
    """``text`` as a name that every logger takes; MLflow refuses parentheses and commas."""
    return re.sub(r"[^\w/.-]+", "_", text).strip("_")


def _data_set(data_source: str) -> str:
    return str(data_source).partition("/")[0]


def _copied(note: ReferenceNote, which: Any) -> Prediction:
    """Predict an error in the first or last sentence (``min`` or ``max``), "corrected" to the same
    sentence.
    """
    number = which(note.sentences, default=0)
    return Prediction(note.text_id, True, number, note.sentences.get(number) or None)


def _classifier(name: str) -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer, StandardScaler

    words = [TfidfVectorizer()]
    shape = [FunctionTransformer(lambda texts: [_shape(text) for text in texts]), StandardScaler()]
    return make_pipeline(
        *(words if name == "bag of words" else shape), LogisticRegression(max_iter=2000)
    )


def _shape(text: str) -> list[float]:
    """Return the part of a text that is neither word nor number."""
    counts = [text.count(part) for part in ("\n", "\r", "\t", "  ", "\n\n")]
    outer = [
        len(text) - len(text.lstrip()),
        len(text) - len(text.rstrip()),
        text != text.rstrip(),
        text.endswith("\n"),
    ]
    return [float(value) for value in (len(text), len(text.split()), *counts, *outer)]
