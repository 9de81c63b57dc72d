"""Variants of a MEDEC set that show whether a model judges medicine, or what goes with it.

    python -m experiments.shortcuts.medec write NOTES.csv FOLDER      # a CSV for each variant
    medserl evaluate MODEL --notes FOLDER/twins.csv --output OUT      # and likewise for the others
    python -m experiments.shortcuts.medec pairs FOLDER/twins.csv OUT/submission.txt
    python -m experiments.shortcuts.medec floors NOTES.csv TRAIN      # classifiers without medicine

``medserl score`` compares a variant's scores with those of the set as published.
"""

from __future__ import annotations

import csv
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from medserl_agentloop.data.reader import COLUMNS, read_files
from medserl_agentloop.evaluation.score import read_reference
from medserl_agentloop.games.medical.edit import one_line
from medserl_agentloop.scoring.metrics import COMPARED, score, wilson_interval
from medserl_agentloop.scoring.notes import Prediction, ReferenceNote, read_submission

app = typer.Typer(no_args_is_help=True)


def _numbered(sentences: Sequence[str], first: int = 0) -> str:
    return "\n".join(f"{number} {text}" for number, text in enumerate(sentences, start=first))


def _last_moved(note: ReferenceNote) -> str:
    """The last sentence, which holds the error in most error notes, in another place."""
    *others, last = map(one_line, note.sentences.values())
    others.insert(random.Random(note.text_id).randrange(len(others) or 1), last)
    return " ".join(others)


def _renumbered(note: ReferenceNote) -> str:
    start = random.Random(note.text_id).randrange(2, 100)
    return _numbered([*map(one_line, note.sentences.values())], start)


VARIANTS: Mapping[str, Callable[[ReferenceNote], str]] = {
    "white_space": lambda note: one_line(note.text),
    "numbered": lambda note: _numbered([*map(one_line, note.sentences.values())]),
    "renumbered": _renumbered,
    "last_moved": _last_moved,
}
"""The same note with something changed that is not medicine."""


def twins(notes: Sequence[ReferenceNote]) -> list[ReferenceNote]:
    """Each error note and its correction, which differ in the wrong sentence alone."""
    found = []
    for note in notes:
        wrong = note.sentences.get(note.sentence_id, "")
        if note.flag and note.correction and note.text.count(wrong) == 1:
            right = {**note.sentences, note.sentence_id: note.correction}
            text = note.text.replace(wrong, note.correction)
            clean = replace(
                note, text=text, flag=False, error_type=None, sentence_id=-1, correction=None
            )
            found.append(replace(note, text_id=f"{note.text_id}-error", text=one_line(note.text)))
            clean = replace(clean, text=one_line(text), sentences=right)
            found.append(replace(clean, text_id=f"{note.text_id}-clean"))
    return found


@app.command()
def write(notes: Path, folder: Path) -> None:
    """Write a CSV of MEDEC's columns for each variant and for the twins."""
    published = read_reference([notes]).notes
    folder.mkdir(parents=True, exist_ok=True)
    sets: dict[str, Sequence[ReferenceNote]] = {"twins": twins(published)}
    for name, change in VARIANTS.items():
        sets[name] = [replace(note, text=change(note)) for note in published]
    for name, changed in sets.items():
        with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *map(_row, changed)])


def _row(note: ReferenceNote) -> list[Any]:
    wrong, right = note.sentences.get(note.sentence_id, "NA"), note.correction or "NA"
    fixed = note.text.replace(wrong, right) if note.flag and note.correction else "NA"
    listed = "\n".join(f"{number} {one_line(text)}" for number, text in note.sentences.items())
    facts = [note.text_id, note.text, listed, int(note.flag), note.error_type or "NA"]
    return [*facts, note.sentence_id, wrong if note.flag else "NA", right, fixed]


@app.command()
def pairs(notes: Path, submission: Path) -> None:
    """Say how often both notes of a case are right; guessing gives at most a quarter."""
    for name, (hits, cases) in pair_shares(notes, submission).items():
        low, high = wilson_interval(hits, cases)
        print(f"{name}: {hits} of {cases}, {hits / cases:.3f} [{low:.3f}, {high:.3f}]")


def pair_shares(notes: Path, submission: Path) -> dict[str, tuple[int, int]]:
    """By outcome, the cases that have it, and all cases."""
    ids = [note.text_id for note in read_reference([notes]).notes]
    found, _ = read_submission(submission, ids)
    flags = {id_: found[id_].flag if id_ in found and found[id_].parsed else None for id_ in ids}
    names = {
        (True, False): "both right",
        (True, True): "both called wrong",
        (False, False): "both called right",
        (False, True): "swapped",
    }
    errors = [id_.removesuffix("-error") for id_ in ids if id_.endswith("-error")]
    said = [(flags[f"{case}-error"], flags[f"{case}-clean"]) for case in errors]
    counts = Counter(names.get(pair, "unreadable") for pair in said)  # type: ignore[arg-type]
    return {name: (counts[name], len(said)) for name in (*names.values(), "unreadable")}


@app.command()
def floors(notes: Path, train: Path) -> None:
    """Score two untuned classifiers, of words and of layout, taught on MEDEC's CSV or pairs."""
    reference = read_reference([notes]).notes
    for name, predictions in classified(reference, training_notes(train, reference)).items():
        measures = score(reference, predictions, resamples=0).measures
        print(name, {measure: round(measures[measure].value or 0.0, 3) for measure in COMPARED})


def training_notes(train: Path, reference: Sequence[ReferenceNote]) -> list[ReferenceNote]:
    """The notes of the training file that the reference does not have."""
    known = {one_line(note.text).casefold() for note in reference}
    cases = read_files([train], as_published=True).cases  # white space may give labels away
    notes = [
        ReferenceNote("", text, text is case.error_note) for case in cases for text in case.notes
    ]
    return [note for note in notes if one_line(note.text).casefold() not in known]


def classified(
    reference: Sequence[ReferenceNote], training: Sequence[ReferenceNote]
) -> dict[str, list[Prediction]]:
    """Predictions by a logistic regression; an error is placed in the last sentence."""
    shape = FunctionTransformer(lambda texts: [_shape(text) for text in texts])
    features = {
        "bag of words": [TfidfVectorizer()],
        "white space and length": [shape, StandardScaler()],
    }
    found = {}
    for name, steps in features.items():
        model = make_pipeline(*steps, LogisticRegression(max_iter=2000))
        model.fit([note.text for note in training], [note.flag for note in training])
        flags = model.predict([note.text for note in reference])
        found[name] = [
            _last(note) if flag else Prediction(note.text_id)
            for note, flag in zip(reference, flags, strict=True)
        ]
    return found


def _last(note: ReferenceNote) -> Prediction:
    number = max(note.sentences, default=0)
    return Prediction(note.text_id, True, number, note.sentences.get(number) or None)


def _shape(text: str) -> list[float]:
    """The part of a text that is neither word nor number."""
    inner = [text.count(part) for part in ("\n", "\r", "\t", "  ", "\n\n")]
    outer = [len(text) - len(text.lstrip()), len(text) - len(text.rstrip()), text.endswith("\n")]
    ends_blank = text != text.rstrip()
    return [
        float(n) for n in (len(text), len(text.split()), *inner, *outer[:2], ends_blank, outer[2])
    ]


if __name__ == "__main__":
    app()
