"""References and predictions to score, small ones made up."""

import csv
import random
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from medserl_agentloop.data.reader import COLUMNS
from medserl_agentloop.evaluation.score import read_reference
from medserl_agentloop.games.medical.case import ErrorType
from medserl_agentloop.scoring.notes import Prediction, Reference, ReferenceNote

WORDS = ["aspirin", "was", "given", "for", "gout", "5", "mg"]
CORRECTIONS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map(" ".join)


@cache
def validation(path: Path) -> Reference:
    return read_reference([path])


def note(
    n: int, flag: bool, correction: str | None = None, *, case: str = "", sentences: int = 3
) -> ReferenceNote:
    numbered = {i: f"Sentence {i} of note {n}." for i in range(sentences)}
    return ReferenceNote(
        text_id=f"ms-test-{n}",
        text=" ".join(numbered.values()),
        flag=flag,
        error_type=list(ErrorType)[n % len(ErrorType)].value if flag else None,
        sentence_id=n % sentences if flag else -1,
        correction=correction,
        sentences=numbered,
        case=case or f"case-{n}",
        subset="medec_ms",
    )


def gold(notes: Any) -> list[Prediction]:
    """Return the answers of a perfect system."""
    return [Prediction(n.text_id, n.flag, n.sentence_id, n.correction) for n in notes]


def guesses(notes: Any, seed: int) -> list[Prediction]:
    """Return the answers of a system of no skill; some corrections copy the last sentence, the
    others are made up.
    """
    draw = random.Random(seed)

    def one(of: ReferenceNote) -> Prediction:
        if draw.random() < 0.4:
            return Prediction(of.text_id)
        number = draw.choice(list(of.sentences))
        text = of.sentences[number] if draw.random() < 0.5 else " ".join(draw.choices(WORDS, k=5))
        return Prediction(of.text_id, True, number, text)

    return [one(of) for of in notes]


@st.composite
def scored(draw: st.DrawFn) -> tuple[list[ReferenceNote], list[Prediction]]:
    """A few notes and predictions of some of them: right, wrong, unreadable or none."""
    notes = []
    for n in range(draw(st.integers(1, 12))):
        flag = draw(st.booleans())
        correction = draw(st.none() | CORRECTIONS) if flag else None
        notes.append(note(n, flag, correction, case=f"case-{n // 2}"))
    predictions = [
        Prediction(
            of.text_id,
            draw(st.booleans()),
            draw(st.integers(-1, 2)),
            draw(st.none() | st.just("NA") | CORRECTIONS),
            parsed=draw(st.sampled_from([True, True, True, False])),
        )
        for of in notes
        if draw(st.sampled_from([True, True, True, False]))
    ]
    return notes, predictions


def write_reference(path: Path, notes: Any, blank: int = 0) -> Path:
    """MEDEC's CSV of these notes, with blank records at its end."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for of in notes:
            numbered = "\n".join(f"{number} {text}" for number, text in of.sentences.items())
            wrong = of.sentences[of.sentence_id] if of.flag else "NA"
            right = of.correction or "NA"
            corrected = of.text.replace(wrong, right) if of.flag and of.correction else "NA"
            facts = [int(of.flag), of.error_type or "NA", of.sentence_id, wrong, right, corrected]
            writer.writerow([of.text_id, of.text, numbered, *facts])
        writer.writerows([[""] * len(COLUMNS)] * blank)
    return path
