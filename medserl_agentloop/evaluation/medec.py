"""MEDEC's files -> notes to score, to train floors on, and twins. Called by ``medserl score`` and ``evaluate``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from medserl_agentloop.data.cases import EditTag
from medserl_agentloop.data.reader import REQUIRED_KEYS, read_files
from medserl_agentloop.data.rows import build_eval_rows
from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.scoring.notes import Reference, ReferenceNote


def read_reference(paths: Sequence[Path]) -> Reference:
    """Every note of MEDEC's CSV files; a MedecFormatError names file, row and column of what is wrong in them."""
    rows, read = build_eval_rows(paths)
    notes = tuple(ReferenceNote.from_extra_info(row["extra_info"]) for row in rows)
    dropped = sum(report.dropped_empty for report in read.reports)
    return Reference(notes, dropped, {report.file: report.sha256 for report in read.reports})


def read_training(paths: Sequence[Path], reference: Sequence[ReferenceNote]) -> tuple[list[ReferenceNote], int]:
    """The notes of MEDEC's CSV or of pair files, as they stand there, and how many were left out.

    Left out are those of the reference. A ValueError says that a file is not right, holds neither, or that no notes
    are left.
    """
    notes: list[ReferenceNote] = []
    for path in paths:
        if path.suffix.lower() == ".csv":
            notes += read_reference([path]).notes
        else:
            read_files([path])  # refuses whatever is wrong, but strips the white space that gives labels away
            pairs = [json.loads(line) for line in path.read_text("utf-8-sig").split("\n") if line.strip()]
            if any(not pair.keys() >= set(REQUIRED_KEYS) for pair in pairs):
                raise ValueError(f"{path}: holds no pairs; give --train MEDEC's CSV or a .jsonl file of pairs.")
            notes += [
                ReferenceNote("", pair[key], flag=key == "incorrect_note")
                for pair in pairs
                for key in REQUIRED_KEYS[1:]
            ]
    in_reference = {one_line(note.text).casefold() for note in reference}
    kept = [note for note in notes if one_line(note.text).casefold() not in in_reference]
    if not kept:
        raise ValueError("every note of the training file is in the reference too; give --train another file.")
    return kept, len(notes) - len(kept)


def read_twins(paths: Sequence[Path]) -> list[ReferenceNote]:
    """The two notes of each case, one after the other: the error note and its correction, without outer white space.

    The correction is the row's own corrected text; a clean twin row often has its sentences in another order. Cases
    whose correction changes letter case or white space only are left out; a ValueError if there are no others.
    """
    notes = []
    for case in read_files(paths).vignettes:
        if case.error_note and case.clean_note and case.edit_tag is not EditTag.NO_OP:
            notes.append(ReferenceNote(case.vignette_id + "+error", case.error_note, True))
            notes.append(ReferenceNote(case.vignette_id + "+clean", case.clean_note, False))
    if not notes:
        raise ValueError("--twins: the file has no note with an error and its correction")
    return notes
