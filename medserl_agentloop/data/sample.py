"""Toy-clinic vignettes in MEDEC's official nine-column CSV format.

Called by ``medserl data sample``. By default the committed sample; otherwise any number of notes of the wordings
and facts that are taught or held out. The same arguments always give the same bytes. The facts in the notes are
simplified for a game and are NOT medical advice.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medserl_agentloop.data.official_csv import COLUMNS
from medserl_agentloop.games.medical.clinic import Note, Split, sample_clean_note, with_error
from medserl_agentloop.games.medical.types import ErrorType

VIGNETTES = 160
SEED = 20250
TWIN_SHARE = 0.85  # of the error notes are followed by their clean twin, as in MEDEC
NEAR_DUPLICATE = 0.5  # 4-gram overlap at which MEDEC preparation calls two notes near-duplicates
_MAX_TRIES = 200


@dataclass(frozen=True)
class Vignette:
    """One case: its error note, its clean note, and which sentence differs and how."""

    error: Note
    clean: Note
    index: int
    kind: ErrorType


def _four_grams(text: str) -> frozenset[tuple[str, ...]]:
    words = text.lower().split()
    return frozenset(zip(words, words[1:], words[2:], words[3:], strict=False))


def _overlap(a: frozenset[tuple[str, ...]], b: frozenset[tuple[str, ...]]) -> float:
    return len(a & b) / len(a | b)


def sample_vignettes(
    count: int, seed: int, *, split: Split = Split.ANY, overlap: float = NEAR_DUPLICATE
) -> Iterator[Vignette]:
    """Distinct vignettes whose error types take turns.

    Args:
        count: How many.
        seed: Of all choices.
        split: Which wordings and facts they use.
        overlap: Share of 4-grams from which on two notes are too much alike to stand in one sample;
            1 leaves out only the same notes again, in time that does not grow with the sample.

    Raises:
        ValueError: The world is too small for ``count`` distinct vignettes.
    """
    rng = random.Random(seed)
    kinds = list(ErrorType)
    known: list[frozenset[tuple[str, ...]]] = []
    texts: set[str] = set()
    for number in range(count):
        kind = kinds[number % len(kinds)]
        for _ in range(_MAX_TRIES):
            clean = sample_clean_note(rng, split, split)
            index = next((i for i, s in enumerate(clean.sentences) if s.kind is kind), None)
            if index is None:
                continue
            error = with_error(rng, clean, index)
            if {clean.text, error.text} & texts:
                continue
            grams = [_four_grams(clean.text), _four_grams(error.text)] if overlap < 1 else []
            if all(_overlap(a, b) < overlap for a in grams for b in known):
                break
        else:
            raise ValueError(
                f"no vignette {number} that differs enough from the others was found in {_MAX_TRIES} "
                f"tries; ask for fewer than {count} vignettes"
            )
        known += grams
        texts |= {clean.text, error.text}
        yield Vignette(error, clean, index, kind)


def _error_row(text_id: str, vignette: Vignette) -> list[str]:
    wrong, right = vignette.error.sentences[vignette.index], vignette.clean.sentences[vignette.index]
    note = vignette.error
    location = [vignette.kind.value, str(vignette.index)]
    return [text_id, note.text, _numbered(note), "1", *location, wrong.text, right.text, vignette.clean.text]


def _clean_row(text_id: str, note: Note) -> list[str]:
    return [text_id, note.text, _numbered(note), "0", "NA", "-1", "NA", "NA", "NA"]


def _numbered(note: Note) -> str:
    return "\n".join(f"{i} {s.text}" for i, s in enumerate(note.sentences))


def sample_rows(vignettes: Iterable[Vignette], seed: int) -> Iterator[list[str]]:
    """The rows of a sample: every vignette's error note, most followed by the clean twin."""
    rng = random.Random(f"twins of {seed}")
    number = 0
    for vignette in vignettes:
        yield _error_row(f"toy-train-{number}", vignette)
        number += 1
        if rng.random() < TWIN_SHARE:
            yield _clean_row(f"toy-train-{number}", vignette.clean)
            number += 1


def write_sample(output: Path, vignettes: int = VIGNETTES, seed: int = SEED, **choices: Any) -> int:
    """Write a sample, with :func:`sample_vignettes`' ``choices``; returns its number of rows."""
    rows = list(sample_rows(sample_vignettes(vignettes, seed, **choices), seed))
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)
    return len(rows)
