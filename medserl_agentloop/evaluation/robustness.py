"""Does a model judge medicine, or something that goes with it? Called by ``evaluate`` for --twins and --shortcuts."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from rich.console import Group, RenderableType
from rich.table import Table

from medserl_agentloop.data.reader import read_files
from medserl_agentloop.data.vignettes import EditTag
from medserl_agentloop.games.medical.edits import one_line, split_sentences
from medserl_agentloop.intervals import wilson_interval
from medserl_agentloop.scoring.grading import grade
from medserl_agentloop.scoring.metrics import Comparison, compare
from medserl_agentloop.scoring.reference import ReferenceNote
from medserl_agentloop.scoring.report import TITLES
from medserl_agentloop.scoring.submission import Prediction

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


@dataclass(frozen=True)
class Twins:
    """The two notes of a case: they differ in the error and in nothing else."""

    wrong: ReferenceNote
    right: ReferenceNote


@dataclass(frozen=True)
class TwinScores:
    """How a model takes the two notes of each case. Shares are of cases, with 95 % intervals.

    Attributes:
        cases: How many there are.
        both_right: Share of cases in which it is right about both notes.
        both_called_wrong: Share in which it sees an error in both: suspicion.
        both_called_right: Share in which it sees none in either.
        swapped: Share in which it sees one in the correct note only.
        unreadable: Share with an answer that cannot be read; no part of the others.
        bias: Share of the notes of readable cases that it calls wrong, minus one half; 0 is the truth. None where no
            case is readable.
    """

    cases: int
    both_right: tuple[float, float, float]
    both_called_wrong: tuple[float, float, float]
    both_called_right: tuple[float, float, float]
    swapped: tuple[float, float, float]
    unreadable: tuple[float, float, float]
    bias: tuple[float, float, float] | None


def read_twins(paths: Sequence[Path]) -> list[Twins]:
    """The cases with an error note and its correction, both without outer white space.

    The correction is the row's own corrected text; a clean twin row often has its sentences in another order. Cases
    whose correction changes letter case or white space only are left out.

    Raises:
        MedecFormatError: A file is not right.
        ValueError: There are no such cases.
    """
    found = [
        Twins(
            ReferenceNote(v.vignette_id + "+error", v.error_note, True),
            ReferenceNote(v.vignette_id + "+clean", v.clean_note, False),
        )
        for v in read_files(paths).vignettes
        if v.error_note and v.clean_note and v.edit_tag is not EditTag.NO_OP
    ]
    if not found:
        raise ValueError("--twins: the file has no note with an error and its correction")
    return found


def score_twins(cases: Sequence[tuple[Prediction, Prediction]]) -> TwinScores:
    """How the notes with an error and the correct notes of the same cases were judged."""
    read = [(wrong.flag, right.flag) for wrong, right in cases if wrong.parsed and right.parsed]
    bias = [(wrong + right) / 2 - 0.5 for wrong, right in read]
    spread = 1.96 * stdev(bias) / len(bias) ** 0.5 if len(bias) > 1 else 1.0

    def share(count: int) -> tuple[float, float, float]:
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


def _renumbered(note: ReferenceNote) -> str:
    """The same, counted from a number that is drawn for the note."""
    return _numbered(note, random.Random(note.text_id).choice(_FIRST_NUMBERS))


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
    "sentences renumbered": _renumbered,
    "last sentence moved": _last_moved,
}
"""By name, the same note with something changed that has nothing to do with medicine."""


def compare_shortcuts(
    reference: Sequence[ReferenceNote], changed: Mapping[str, Sequence[Prediction]], published: Sequence[Prediction]
) -> dict[str, Comparison]:
    """How far accuracy moves: predictions on the changed notes against those on the published ones, by change."""
    before = grade(reference, published)
    return {name: compare([grade(reference, given)], [before]) for name, given in changed.items()}


def robustness_tables(twins: TwinScores | None, shortcuts: Mapping[str, Comparison]) -> Group:
    """What was computed of the two, for a terminal."""
    parts: list[RenderableType] = []
    if twins is not None:
        table = _table(f"Both notes of {twins.cases} cases", "", "of cases")
        for name, title in _TWIN_TITLES.items():
            share = getattr(twins, name)
            form = "+.3f" if name == "bias" else ".3f"
            table.add_row(title, "-" if share is None else "{0:{3}} [{1:{3}}, {2:{3}}]".format(*share, form))
        parts += [table, ""]
    if shortcuts:
        table = _table("How far accuracy moves", "", *(TITLES[name] for name in _MOVED))
        for change, found in shortcuts.items():
            moved = (found.differences[name] for name in _MOVED)
            table.add_row(change, *(f"{m.value:+.3f} [{m.low:+.3f}, {m.high:+.3f}]" for m in moved))
        parts += [table, ""]
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
