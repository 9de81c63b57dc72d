"""Toy-clinic cases in MEDEC's official nine-column CSV format.

Called by ``data_prep/make_sample.py``. By default the committed sample; otherwise any number of
notes with taught or held-out wordings and facts. The same arguments always give the same bytes. The
facts in the notes are simplified for a game and are NOT medical advice.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from medserl_agentloop.data.cases import NEAR_DUPLICATE, NearDuplicateIndex, with_numbers
from medserl_agentloop.data.reader import COLUMNS
from medserl_agentloop.games.clinic import Note, Split, sample_clean_note, with_error
from medserl_agentloop.games.medical.case import ErrorType

CASES = 160
SEED = 20250
TWIN_SHARE = 0.85  # of the error notes are followed by their clean twin, as in MEDEC
_MAX_TRIES = 200
Draw = Callable[[random.Random, Note], tuple[Note, int] | None]


def write_sample(
    output: Path,
    cases: int = CASES,
    seed: int = SEED,
    split: Split = Split.ANY,
    overlap: float = NEAR_DUPLICATE,
    draw: Draw | None = None,
    twin_share: float = TWIN_SHARE,
) -> int:
    """Write distinct cases, and return the number of rows: an error note each, and for
    ``twin_share`` of them the clean twin.

    Error types take turns, unless ``draw`` adds the errors; it returns the wrong note and sentence,
    or None to ask for another note. ``overlap`` is the share of common 4-grams at which two notes
    are too similar; 1 leaves out only identical notes. Raises ValueError if the world is too small
    for that many distinct cases.
    """
    rng, twins = random.Random(seed), random.Random(f"twins of {seed}")
    kinds, known = list(ErrorType), NearDuplicateIndex()
    texts: set[str] = set()
    rows: list[list[str]] = []
    for number in range(cases):
        kind = kinds[number % len(kinds)]
        for _ in range(_MAX_TRIES):
            clean = sample_clean_note(rng, split, split)
            if draw:
                if (drawn := draw(rng, clean)) is None:
                    continue
                error, index = drawn
                kind = clean.sentences[index].kind or kind
            else:
                of_kind = [i for i, s in enumerate(clean.sentences) if s.kind is kind]
                if not of_kind:
                    continue
                index = of_kind[0]
                error = with_error(rng, clean, index)
            notes = {clean.text, error.text}
            if not notes & texts and (
                overlap >= 1 or not any(known.matches(note, overlap) for note in notes)
            ):
                break
        else:
            raise ValueError(
                f"no case {number} that differs enough from the others was found in {_MAX_TRIES} "
                f"tries; ask for fewer than {cases} cases"
            )
        texts |= notes
        for note in notes:
            known.add(note)
        wrong, right = ([sentence.text for sentence in note.sentences] for note in (error, clean))
        change = [str(index), wrong[index], right[index]]
        facts = [error.text, with_numbers(wrong), "1", kind.value, *change, clean.text]
        rows.append([f"toy-train-{len(rows)}", *facts])
        if twins.random() < twin_share:
            facts = [clean.text, with_numbers(right), "0", "NA", "-1", "NA", "NA", "NA"]
            rows.append([f"toy-train-{len(rows)}", *facts])
    output.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows, columns=list(COLUMNS)).to_csv(output, index=False, lineterminator="\n")
    return len(rows)
