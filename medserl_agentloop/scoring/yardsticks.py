"""What a result stands beside: floors that need no medicine, and published results.

Nothing here learns from the reference: the two classifiers see the training file alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medserl_agentloop.scoring.metrics import Scores, score
from medserl_agentloop.scoring.notes import Prediction, ReferenceNote

COMPARED = ("flag_accuracy", "f1", "sentence_accuracy", "rouge_1_composite")
"""The measures that a floor bounds. "Always error" has a recall of 1, so recall alone says nothing."""


@dataclass(frozen=True)
class Published:
    """A result that others report, quoted, and what keeps it from being comparable: notes, prompt, judge."""

    system: str
    source: str
    differs: str
    measures: dict[str, float]


_LOG = "log of the OpenRLHF system that this project replaces; not published"
_RAG = "arXiv 2511.19858"
_READERS = f"arXiv 2412.19260 as quoted in {_RAG}"
_GEPA = "arXiv 2602.22483"
_TEST = "MEDEC test set"
_BOTH = f"{_TEST}, notes of both hospitals (925)"
_OWN = "its own prompt and scoring"
# fmt: off
PUBLISHED = (
    Published("Qwen3-4B, zero-shot", _LOG, f"{_BOTH}; {_OWN}",
              {"flag_accuracy": 0.587, "f1": 0.675, "recall": 0.811, "sentence_accuracy": 0.554}),
    Published("Qwen3-4B, best RL run", _LOG, f"{_BOTH}; {_OWN}",
              {"f1": 0.700, "recall": 0.878, "sentence_accuracy": 0.739}),
    Published("Qwen3-4B, a later RL run", _LOG, f"{_BOTH}; {_OWN}", {"f1": 0.498}),
    Published("earlier inference run", _LOG, f"MEDEC-MS test set (597); {_OWN}",
              {"flag_accuracy": 0.519, "precision": 0.532, "recall": 0.720, "f1": 0.612}),
    Published("GPT-4.1, zero-shot", _RAG, _TEST, {"flag_accuracy": 0.6812, "sentence_accuracy": 0.6573}),
    Published("GPT-4.1, 10 retrieved shots", _RAG, f"{_TEST}; ten training notes in each prompt",
              {"flag_accuracy": 0.7286, "sentence_accuracy": 0.7037}),
    Published("GPT-5, optimised prompt", _GEPA, f"{_BOTH}; prompt optimised by GEPA", {"flag_accuracy": 0.785}),
    Published("Qwen3-32B, optimised prompt", _GEPA, f"{_BOTH}; prompt optimised by GEPA", {"flag_accuracy": 0.690}),
    Published("physician 1", _READERS, f"{_TEST}; a human reader",
              {"flag_accuracy": 0.7961, "sentence_accuracy": 0.6588}),
    Published("physician 2", _READERS, f"{_TEST}; a human reader",
              {"flag_accuracy": 0.7161, "sentence_accuracy": 0.6677}),
)
# fmt: on


def floors(reference: Sequence[ReferenceNote], training: Sequence[ReferenceNote] = ()) -> dict[str, Scores | str]:
    """Every floor by name: its scores on the reference without intervals, or why it is not computed.

    Without training notes the two classifiers are not computed.
    """
    no_error = [Prediction(note.text_id) for note in reference]
    first, last = ([_copied(note, which) for note in reference] for which in (min, max))
    given = {"always no error": no_error, "always error (first sentence)": first, "last sentence is wrong": last}
    absent: dict[str, str] = {}
    for name in ("bag of words", "white space and length"):
        if not training:
            absent[name] = "--train names no training set"
            continue
        try:
            classifier = _classifier(name).fit([note.text for note in training], [note.flag for note in training])
            flags = classifier.predict([note.text for note in reference])
        except ImportError:
            absent[name] = "scikit-learn is not installed: pip install 'medserl-agentloop[eval]'"
        except ValueError as error:
            absent[name] = str(error).splitlines()[0]
        else:
            given[name] = [wrong if flag else right for flag, wrong, right in zip(flags, last, no_error, strict=True)]
    return {name: score(reference, predictions, resamples=0) for name, predictions in given.items()} | absent


def floor_value(floor: Scores | str, measure: str) -> float | None:
    """A measure of a floor; None if it is not computed."""
    return None if isinstance(floor, str) else floor.measures[measure].value


def floors_above(scores: Scores, bounds: Mapping[str, Scores | str]) -> dict[str, tuple[str, ...]]:
    """For each measure that a floor bounds, the floors that a system stays below."""

    def above(measure: str, value: float) -> tuple[str, ...]:
        theirs = ((name, floor_value(floor, measure)) for name, floor in bounds.items())
        return tuple(name for name, other in theirs if other is not None and value < other)

    values = {name: scores.measures[name].value for name in COMPARED if name in scores.measures}
    return {name: above(name, value) for name, value in values.items() if value is not None}


def _copied(note: ReferenceNote, which: Any) -> Prediction:
    """An error in the first or last sentence (``min`` or ``max``), which is "corrected" to what it already says."""
    number = which(note.sentences, default=0)
    return Prediction(note.text_id, True, number, note.sentences.get(number) or None)


def _classifier(name: str) -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer, StandardScaler

    words = [TfidfVectorizer()]
    shape = [FunctionTransformer(lambda texts: [_shape(text) for text in texts]), StandardScaler()]
    return make_pipeline(*(words if name == "bag of words" else shape), LogisticRegression(max_iter=2000))


def _shape(text: str) -> list[float]:
    """What of a text is neither word nor number."""
    counts = [text.count(part) for part in ("\n", "\r", "\t", "  ", "\n\n")]
    outer = [len(text) - len(text.lstrip()), len(text) - len(text.rstrip()), text != text.rstrip(), text.endswith("\n")]
    return [float(value) for value in (len(text), len(text.split()), *counts, *outer)]
