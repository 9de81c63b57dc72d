"""One submission against its reference, note by note, by the shared task's rules. Called by ``metrics.py``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from medserl_agentloop.games.medical.types import ErrorType
from medserl_agentloop.scoring.corrections import SCORERS, NotComputed, Scorer
from medserl_agentloop.scoring.reference import ReferenceNote
from medserl_agentloop.scoring.submission import Prediction

_LENGTHS = ((100, "up to 100 words"), (150, "101 to 150 words"), (200, "151 to 200 words"))
_LONGEST = "over 200 words"

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Grades:
    """One submission, note by note, in the order of the text ids.

    Attributes:
        notes: The reference.
        case: Number of each note's case; (N,).
        sums: Of each measure, what each note adds above and below the line; (2, N).
        why: Of each measure that is not computed, the reason.
        unreadable: Answers that could not be read.
        missing: Notes without an answer.
    """

    notes: tuple[ReferenceNote, ...]
    case: Numbers
    sums: dict[str, Numbers]
    why: dict[str, str]
    unreadable: int
    missing: int


def grade(
    reference: Sequence[ReferenceNote],
    predictions: Iterable[Prediction],
    scorers: Mapping[str, Scorer] = SCORERS,
) -> Grades:
    """Judge every note of the reference by the shared task's rules (docs/scoring.md).

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
    given = [by_id.get(note.text_id, Prediction(note.text_id, parsed=False)) for note in notes]
    parsed = np.array([p.parsed for p in given])
    wrong = np.array([note.flag for note in notes])
    said = np.array([p.flag for p in given]) & parsed
    same_sentence = np.array([p.sentence_id == n.sentence_id for p, n in zip(given, notes, strict=True)])
    every = np.ones(len(notes))
    sums: dict[str, Numbers] = {
        "readable": _ratio(parsed, every),
        "flag_accuracy": _ratio((said == wrong) & parsed, every),
        "precision": _ratio(said & wrong, said),
        "recall": _ratio(said & wrong, wrong),
        "f1": _ratio(2.0 * (said & wrong), said * 1.0 + wrong),
        "false_positive_rate": _ratio(said & ~wrong, ~wrong),
        "sentence_accuracy": _ratio(same_sentence & parsed, every),
    }
    corrections, why = _corrections(notes, given, scorers)
    return Grades(
        notes=tuple(notes),
        case=np.unique([note.case or note.text_id for note in notes], return_inverse=True)[1],
        sums=sums | corrections,
        why=why,
        unreadable=sum(not by_id[note.text_id].parsed for note in notes if note.text_id in by_id),
        missing=sum(note.text_id not in by_id for note in notes),
    )


def _ratio(above: Numbers, below: Numbers) -> Numbers:
    return np.stack([above.astype(float), below.astype(float)])


def _corrections(
    notes: Sequence[ReferenceNote], given: Sequence[Prediction], scorers: Mapping[str, Scorer]
) -> tuple[dict[str, Numbers], dict[str, str]]:
    """The measures of the corrections, and why some are absent."""
    right = [" ".join((note.correction or "").split()) for note in notes]
    said = [" ".join((p.scored_correction or "").split()) for p in given]
    parsed = np.array([p.parsed for p in given])
    both = np.array([bool(r and s) for r, s in zip(right, said, strict=True)])
    neither = np.array([not r and not s for r, s in zip(right, said, strict=True)]) & parsed
    at = np.flatnonzero(both)
    scores: dict[str, Numbers] = {}
    why: dict[str, str] = {}
    for name, scorer in scorers.items():
        try:
            of_pairs = scorer([said[i] for i in at], [right[i] for i in at])
        except NotComputed as reason:
            why[name] = str(reason)
        else:
            scores[name] = np.zeros(len(notes))
            scores[name][at] = of_pairs
    if why:
        why["aggregate"] = f"needs {' and '.join(why)}"
    elif scores:
        scores["aggregate"] = np.mean(list(scores.values()), axis=0)
    why |= {f"{name}_composite": reason for name, reason in why.items()}
    sums = {name: _ratio(of_notes, both) for name, of_notes in scores.items()}
    composites = {f"{name}_composite": _ratio(s + neither, np.ones(len(notes))) for name, s in scores.items()}
    return sums | composites, why


def groups_of(notes: Sequence[ReferenceNote]) -> dict[str, dict[str, Numbers]]:
    """Masks (N,) of the notes by what they are told apart by, then by name."""
    lengths = [len(note.text.split()) for note in notes]
    labels: dict[str, tuple[list[str], list[str | None]]] = {
        "notes": (
            ["with an error", "without an error"],
            ["with an error" if note.flag else "without an error" for note in notes],
        ),
        "error type": (
            [t.value for t in ErrorType],
            [note.error_type.value if note.error_type else None for note in notes],
        ),
        "error position": (["first", "middle", "last"], [note.error_position for note in notes]),
        "length": (
            [name for _, name in _LENGTHS] + [_LONGEST],
            [next((name for most, name in _LENGTHS if length <= most), _LONGEST) for length in lengths],
        ),
        "subset": (sorted({note.subset for note in notes}), [note.subset for note in notes]),
    }
    masks = {
        kind: {name: np.array([label == name for label in found]) for name in order if name in found}
        for kind, (order, found) in labels.items()
    }
    return {kind: named for kind, named in masks.items() if kind != "subset" or len(named) > 1}
