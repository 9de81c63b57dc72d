"""What a result stands beside: floors that need no medicine, and published results.

Called by ``report.py``. Nothing here learns from the reference: the two classifiers see the training file alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medserl_agentloop.data.pair_jsonl import REQUIRED_KEYS
from medserl_agentloop.data.reader import read_files
from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.scoring.metrics import Scores, score
from medserl_agentloop.scoring.reference import ReferenceNote, read_reference
from medserl_agentloop.scoring.submission import Prediction

COMPARED = ("flag_accuracy", "f1", "sentence_accuracy", "rouge_1_composite")
"""The measures that a floor bounds. "Always error" has a recall of 1, so recall alone says nothing."""


@dataclass(frozen=True)
class Floor:
    """A system that needs no medicine.

    Attributes:
        name: What it does.
        scores: Its scores on the same notes, without intervals; None where it is not computed.
        why: Why it is not computed.
    """

    name: str
    scores: Scores | None = None
    why: str | None = None


@dataclass(frozen=True)
class TrainingNotes:
    """Notes to train the classifiers on.

    Attributes:
        texts: The notes, none of which is in the reference.
        flags: Whether each has an error.
        left_out: Notes that are in the reference too.
    """

    texts: tuple[str, ...]
    flags: tuple[bool, ...]
    left_out: int


@dataclass(frozen=True)
class Published:
    """A result that others report, quoted.

    Attributes:
        system: Who.
        measures: By the names of ``metrics.py``.
        source: Where it is written.
        differs: What keeps it from being comparable: notes, examples in the prompt, judge.
    """

    system: str
    source: str
    differs: str
    measures: dict[str, float] = field(default_factory=dict)


_LOG = "log of the OpenRLHF system that this project replaces; not published"
_BOTH = "MEDEC test set, notes of both hospitals (925)"
_TEST = "MEDEC test set"
_RAG = "arXiv 2511.19858"
PUBLISHED = (
    Published(
        "Qwen3-4B, zero-shot",
        _LOG,
        f"{_BOTH}; its own prompt and scoring",
        {"flag_accuracy": 0.587, "f1": 0.675, "recall": 0.811, "sentence_accuracy": 0.554},
    ),
    Published(
        "Qwen3-4B, best RL run",
        _LOG,
        f"{_BOTH}; its own prompt and scoring",
        {"f1": 0.700, "recall": 0.878, "sentence_accuracy": 0.739},
    ),
    Published("Qwen3-4B, a later RL run", _LOG, f"{_BOTH}; its own prompt and scoring", {"f1": 0.498}),
    Published(
        "earlier inference run",
        _LOG,
        "MEDEC-MS test set (597); its own prompt and scoring",
        {"flag_accuracy": 0.519, "precision": 0.532, "recall": 0.720, "f1": 0.612},
    ),
    Published("GPT-4.1, zero-shot", _RAG, _TEST, {"flag_accuracy": 0.6812, "sentence_accuracy": 0.6573}),
    Published(
        "GPT-4.1, 10 retrieved shots",
        _RAG,
        f"{_TEST}; ten training notes in each prompt",
        {"flag_accuracy": 0.7286, "sentence_accuracy": 0.7037},
    ),
    Published(
        "GPT-5, optimised prompt", "arXiv 2602.22483", f"{_BOTH}; prompt optimised by GEPA", {"flag_accuracy": 0.785}
    ),
    Published(
        "Qwen3-32B, optimised prompt",
        "arXiv 2602.22483",
        f"{_BOTH}; prompt optimised by GEPA",
        {"flag_accuracy": 0.690},
    ),
    Published(
        "physician 1",
        f"arXiv 2412.19260 as quoted in {_RAG}",
        f"{_TEST}; a human reader",
        {"flag_accuracy": 0.7961, "sentence_accuracy": 0.6588},
    ),
    Published(
        "physician 2",
        f"arXiv 2412.19260 as quoted in {_RAG}",
        f"{_TEST}; a human reader",
        {"flag_accuracy": 0.7161, "sentence_accuracy": 0.6677},
    ),
)


def read_training(paths: Sequence[Path], reference: Sequence[ReferenceNote]) -> TrainingNotes:
    """The notes of MEDEC's CSV or of pair files, as they stand there, without those of the reference.

    Raises:
        MedecFormatError: A file is not right.
        ValueError: A file holds neither; or no notes are left.
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
    seen = {_key(note.text) for note in reference}
    kept = [(text, flag) for text, flag in rows if _key(text) not in seen]
    if not kept:
        raise ValueError("every note of the training file is in the reference too; give --train another file.")
    texts, flags = zip(*kept, strict=True)
    return TrainingNotes(texts, flags, len(rows) - len(kept))


def floors(reference: Sequence[ReferenceNote], training: TrainingNotes | None) -> tuple[Floor, ...]:
    """Score every floor on the reference; without training notes the classifiers are not computed."""
    scored = [
        ("always no error", [Prediction(note.text_id) for note in reference]),
        ("always error (first sentence)", [_copied(note, last=False) for note in reference]),
        ("last sentence is wrong", [_copied(note) for note in reference]),
    ]
    absent = []
    for name, fitted in (("bag of words", _bag_of_words), ("white space and length", _shape_of_text)):
        if training is None:
            absent.append(Floor(name, why="--train names no training set"))
            continue
        try:
            flags = fitted(training).predict([note.text for note in reference])
        except ImportError:
            absent.append(Floor(name, why="scikit-learn is not installed: pip install 'medserl-agentloop[eval]'"))
        except ValueError as error:
            absent.append(Floor(name, why=str(error).splitlines()[0]))
        else:
            given = [_copied(n) if flag else Prediction(n.text_id) for n, flag in zip(reference, flags, strict=True)]
            scored.append((name, given))
    return (*(Floor(name, score(reference, given, resamples=0)) for name, given in scored), *absent)


def floors_above(scores: Scores, found: Sequence[Floor]) -> dict[str, tuple[str, ...]]:
    """For each measure that a floor bounds, the floors that a system stays below."""

    def above(name: str, value: float) -> tuple[str, ...]:
        theirs = [(floor.name, floor.scores.measures[name].value) for floor in found if floor.scores]
        return tuple(floor for floor, other in theirs if other is not None and value < other)

    values = {name: scores.measures[name].value for name in COMPARED if name in scores.measures}
    return {name: above(name, value) for name, value in values.items() if value is not None}


def _copied(note: ReferenceNote, *, last: bool = True) -> Prediction:
    """An error in the last or first sentence, which is "corrected" to what it already says."""
    first = min(note.sentences, key=lambda sentence: sentence.id, default=note.last_sentence)
    sentence = note.last_sentence if last else first
    return Prediction(note.text_id, True, sentence.id, sentence.text or None)


def _bag_of_words(training: TrainingNotes) -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer

    return _fitted(TfidfVectorizer(), training)


def _shape_of_text(training: TrainingNotes) -> Any:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer, StandardScaler

    return _fitted(make_pipeline(FunctionTransformer(_shapes), StandardScaler()), training)


def _fitted(features: Any, training: TrainingNotes) -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    return make_pipeline(features, LogisticRegression(max_iter=2000)).fit(training.texts, training.flags)


_SHAPE: tuple[Callable[[str], float], ...] = (
    len,
    lambda text: len(text.split()),
    lambda text: text.count("\n"),
    lambda text: text.count("\r"),
    lambda text: text.count("\t"),
    lambda text: text.count("  "),
    lambda text: text.count("\n\n"),
    lambda text: len(text) - len(text.lstrip()),
    lambda text: len(text) - len(text.rstrip()),
    lambda text: text != text.rstrip(),
    lambda text: text.endswith("\n"),
)


def _shapes(texts: Sequence[str]) -> list[list[float]]:
    return [[float(feature(text)) for feature in _SHAPE] for text in texts]


def _key(text: str) -> str:
    return one_line(text).casefold()
