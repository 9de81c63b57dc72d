"""What a result stands beside: floors that need no medicine, and published results.

Nothing here learns from the reference: the two classifiers see the training file alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medserl_agentloop.data.pair_jsonl import REQUIRED_KEYS
from medserl_agentloop.data.reader import read_files
from medserl_agentloop.data.vignettes import Sentence
from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.scoring.metrics import Scores, score
from medserl_agentloop.scoring.notes import Prediction, ReferenceNote, read_reference

COMPARED = ("flag_accuracy", "f1", "sentence_accuracy", "rouge_1_composite")
"""The measures that a floor bounds. "Always error" has a recall of 1, so recall alone says nothing."""


@dataclass(frozen=True)
class Floor:
    """A system that needs no medicine: its scores without intervals, or why they are not computed."""

    name: str
    scores: Scores | None = None
    why: str | None = None


@dataclass(frozen=True)
class TrainingNotes:
    """Notes to train the classifiers on; those that are in the reference too are left out and counted."""

    texts: tuple[str, ...]
    flags: tuple[bool, ...]
    left_out: int


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


def read_training(paths: Sequence[Path], reference: Sequence[ReferenceNote]) -> TrainingNotes:
    """The notes of MEDEC's CSV or of pair files, as they stand there, without those of the reference.

    A ValueError says that a file is not right, holds neither, or that no notes are left.
    """
    rows: list[tuple[str, bool]] = []
    for path in paths:
        if path.suffix.lower() == ".csv":
            rows += [(note.text, note.flag) for note in read_reference([path]).notes]
        else:
            read_files([path])  # refuses whatever is wrong, but strips the white space that gives labels away
            pairs = [json.loads(line) for line in path.read_text("utf-8-sig").split("\n") if line.strip()]
            if any(not pair.keys() >= set(REQUIRED_KEYS) for pair in pairs):
                raise ValueError(f"{path}: holds no pairs; give --train MEDEC's CSV or a .jsonl file of pairs.")
            rows += [(pair[key], key == "incorrect_note") for pair in pairs for key in REQUIRED_KEYS[1:]]
    seen = {one_line(note.text).casefold() for note in reference}
    kept = [(text, flag) for text, flag in rows if one_line(text).casefold() not in seen]
    if not kept:
        raise ValueError("every note of the training file is in the reference too; give --train another file.")
    texts, flags = zip(*kept, strict=True)
    return TrainingNotes(texts, flags, len(rows) - len(kept))


def floors(reference: Sequence[ReferenceNote], training: TrainingNotes | None) -> tuple[Floor, ...]:
    """Score every floor on the reference; without training notes the classifiers are not computed."""
    no_error = [Prediction(note.text_id) for note in reference]
    first = [_copied(note, min) for note in reference]
    last = [_copied(note, max) for note in reference]
    given = {"always no error": no_error, "always error (first sentence)": first, "last sentence is wrong": last}
    absent = []
    for name in ("bag of words", "white space and length"):
        if training is None:
            absent.append(Floor(name, why="--train names no training set"))
            continue
        try:
            flags = _classifier(name).fit(training.texts, training.flags).predict([note.text for note in reference])
        except ImportError:
            absent.append(Floor(name, why="scikit-learn is not installed: pip install 'medserl-agentloop[eval]'"))
        except ValueError as error:
            absent.append(Floor(name, why=str(error).splitlines()[0]))
        else:
            given[name] = [wrong if flag else right for flag, wrong, right in zip(flags, last, no_error, strict=True)]
    return (*(Floor(name, score(reference, said, resamples=0)) for name, said in given.items()), *absent)


def floors_above(scores: Scores, found: Sequence[Floor]) -> dict[str, tuple[str, ...]]:
    """For each measure that a floor bounds, the floors that a system stays below."""

    def above(name: str, value: float) -> tuple[str, ...]:
        theirs = [(floor.name, floor.scores.measures[name].value) for floor in found if floor.scores]
        return tuple(floor for floor, other in theirs if other is not None and value < other)

    values = {name: scores.measures[name].value for name in COMPARED if name in scores.measures}
    return {name: above(name, value) for name, value in values.items() if value is not None}


def _copied(note: ReferenceNote, which: Any) -> Prediction:
    """An error in the first or last sentence (``min`` or ``max``), which is "corrected" to what it already says."""
    sentence = which(note.sentences, key=lambda sentence: sentence.id, default=Sentence(0, ""))
    return Prediction(note.text_id, True, sentence.id, sentence.text or None)


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
