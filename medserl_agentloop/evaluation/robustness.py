"""Does a model judge medicine, or something that goes with it? For --twins and --shortcuts of ``medserl evaluate``."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from rich.console import Group, RenderableType

from medserl_agentloop.data.reader import read_files
from medserl_agentloop.data.vignettes import EditTag
from medserl_agentloop.games.medical.edits import one_line, split_sentences
from medserl_agentloop.intervals import wilson_interval
from medserl_agentloop.scoring.metrics import Comparison
from medserl_agentloop.scoring.notes import Prediction, ReferenceNote
from medserl_agentloop.scoring.report import TITLES, table_of, with_interval

_FIRST_NUMBERS = range(2, 100)
_MOVED = ("flag_accuracy", "sentence_accuracy")
_TWIN_TITLES = {
    "both_right": "both right",
    "both_called_wrong": "an error seen in both",
    "both_called_right": "no error seen in either",
    "swapped": "an error seen in the correct note only",
    "unreadable": "an answer unreadable",
    "bias": 'bias towards "error", of notes',
}

Share = tuple[float, float, float]
"""A share and its 95 % interval."""


@dataclass(frozen=True)
class TwinScores:
    """How a model takes the two notes of each case; shares are of cases."""

    cases: int
    both_right: Share
    both_called_wrong: Share  # suspicion
    both_called_right: Share
    swapped: Share  # it sees an error in the correct note only
    unreadable: Share  # an answer cannot be read; no part of the others
    bias: Share | None  # share of the notes of readable cases that it calls wrong, minus one half; 0 is the truth


def read_twins(paths: Sequence[Path]) -> list[ReferenceNote]:
    """The two notes of each case, one after the other: the error note and its correction, without outer white space.

    The correction is the row's own corrected text; a clean twin row often has its sentences in another order. Cases
    whose correction changes letter case or white space only are left out.

    Raises:
        MedecFormatError: A file is not right.
        ValueError: There are no such cases.
    """
    found = []
    for case in read_files(paths).vignettes:
        if case.error_note and case.clean_note and case.edit_tag is not EditTag.NO_OP:
            found.append(ReferenceNote(case.vignette_id + "+error", case.error_note, True))
            found.append(ReferenceNote(case.vignette_id + "+clean", case.clean_note, False))
    if not found:
        raise ValueError("--twins: the file has no note with an error and its correction")
    return found


def score_twins(given: Sequence[Prediction | None]) -> TwinScores:
    """How the notes of :func:`read_twins` were judged; None is no answer, which is unreadable too."""
    cases = list(zip(given[::2], given[1::2], strict=True))
    read = [(a.flag, b.flag) for a, b in cases if a is not None and b is not None and a.parsed and b.parsed]
    bias = [(wrong + right) / 2 - 0.5 for wrong, right in read]
    spread = 1.96 * stdev(bias) / len(bias) ** 0.5 if len(bias) > 1 else 1.0

    def share(count: int) -> Share:
        return (count / len(cases), *wilson_interval(count, len(cases)))

    return TwinScores(
        cases=len(cases),
        both_right=share(read.count((True, False))),
        both_called_wrong=share(read.count((True, True))),
        both_called_right=share(read.count((False, False))),
        swapped=share(read.count((False, True))),
        unreadable=share(len(cases) - len(read)),
        bias=(fmean(bias), fmean(bias) - spread, fmean(bias) + spread) if bias else None,
    )


def _numbered(note: ReferenceNote, first: int = 0) -> str:
    """Every sentence on a line with its number."""
    return "\n".join(f"{number} {sentence}" for number, sentence in enumerate(_sentences(note), start=first))


def _last_moved(note: ReferenceNote) -> str:
    """The last sentence in another place, drawn for the note."""
    *others, last = _sentences(note)
    others.insert(random.Random(note.text_id).randrange(len(others) or 1), last)
    return " ".join(others)


def _sentences(note: ReferenceNote) -> list[str]:
    """MEDEC's own sentences, where they are listed."""
    return [text for s in note.sentences if (text := one_line(s.text))] or split_sentences(note.text)


SHORTCUTS: Mapping[str, Callable[[ReferenceNote], str]] = {
    "white space normalised": lambda note: one_line(note.text),
    "sentences numbered from 0": _numbered,
    "sentences renumbered": lambda note: _numbered(note, random.Random(note.text_id).choice(_FIRST_NUMBERS)),
    "last sentence moved": _last_moved,
}
"""By name, the same note with something changed that has nothing to do with medicine."""


def robustness_tables(twins: TwinScores | None, shortcuts: Mapping[str, Comparison]) -> Group:
    """What was computed of the two, for a terminal."""
    parts: list[RenderableType] = []
    if twins is not None:
        table = table_of(f"Both notes of {twins.cases} cases", "", "of cases")
        for name, title in _TWIN_TITLES.items():
            value, low, high = getattr(twins, name) or (None, None, None)
            table.add_row(title, with_interval(value, low, high, "+.3f" if name == "bias" else ".3f"))
        parts += [table, ""]
    if shortcuts:
        table = table_of("How far accuracy moves", "", *(TITLES[name] for name in _MOVED))
        for change, found in shortcuts.items():
            moved = (found.differences[name] for name in _MOVED)
            table.add_row(change, *(with_interval(m.value, m.low, m.high, "+.3f") for m in moved))
        parts += [table, ""]
    return Group(*parts)
