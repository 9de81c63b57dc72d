"""``medserl score``: submission files against MEDEC's notes; how MEDEC's files become notes to score.

``medserl evaluate`` reads its notes here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from medserl_agentloop.command_line import errors_in_one_line, visible
from medserl_agentloop.data.cases import EditTag
from medserl_agentloop.data.reader import REQUIRED_KEYS, read_files
from medserl_agentloop.data.rows import build_eval_rows
from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.paths import sha256_of
from medserl_agentloop.scoring.metrics import Grades, grade
from medserl_agentloop.scoring.notes import Reference, ReferenceNote, read_submission
from medserl_agentloop.scoring.official import NEURAL_SCORERS, SCORERS, official_scores
from medserl_agentloop.scoring.report import as_json, published_script, report_on, tables

_SHOWN_PROBLEMS = 20

Train = Annotated[
    list[Path] | None,
    typer.Option(help="MEDEC's training CSV, or a .jsonl file of pairs, for two of the floors; may be repeated."),
]
Neural = Annotated[bool, typer.Option("--neural", help="Compute BERTScore and BLEURT too; their models take some GB.")]


def score(
    predictions: Annotated[
        list[Path],
        typer.Argument(help="Submission files. A folder counts as one system whose .txt files are its seeds."),
    ],
    reference: Annotated[list[Path], typer.Option(help="MEDEC's CSV with the answers; may be repeated.")],
    train: Train = None,
    pool: Annotated[bool, typer.Option("--pool", help="The files are seeds of one system.")] = False,
    neural: Neural = False,
    official_bugs: Annotated[bool, typer.Option("--official-bugs", help="Also print the published script's.")] = False,
    resamples: Annotated[int, typer.Option(min=0, help="Draws of the bootstrap.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap's draws.")] = 0,
    output: Annotated[Path | None, typer.Option(help="File for all results, as JSON.")] = None,
) -> None:
    """Score submissions on MEDEC, with intervals, floors to beat and published results.

    Several systems are compared with the first one on the same notes. Choose models, prompts and settings on the
    validation set; the test set is for one final run.
    """
    scorers = NEURAL_SCORERS if neural else SCORERS
    files: dict[str, dict[str, Any]] = {}
    official: dict[str, dict[str, float | None] | str] = {}
    with errors_in_one_line():
        if official_bugs and len(reference) > 1:
            raise ValueError("--official-bugs reads one --reference, as the published script does; give one.")
        notes = read_reference(reference)
        training = read_training(train, notes.notes) if train else ([], 0)
        grades: dict[str, list[Grades]] = {}
        for name, paths in _systems(predictions, pool).items():
            for path in paths:
                answers, problems = read_submission(path, [note.text_id for note in notes.notes])
                grades.setdefault(name, []).append(grade(notes.notes, answers.values(), scorers))
                files[str(path)] = {"system": name, "sha256": sha256_of(path), "problems": problems}
                if official_bugs:
                    try:
                        official[str(path)] = official_scores(reference[0], path, scorers)
                    except ValueError as error:
                        official[str(path)] = str(error)
        report = report_on(notes, grades, *training, resamples=resamples, seed=seed)
        if output is not None:
            results = as_json(report) | {"files": files, "published_script": official}
            output.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    for file, facts in files.items():
        shown = list(facts["problems"][:_SHOWN_PROBLEMS])
        if more := len(facts["problems"]) - len(shown):
            shown.append(f"{more} more problems; --output holds all of them")
        for problem in shown:
            typer.echo(visible(f"{file}: {problem}"), err=True)
    console = Console()
    console.print(tables(report))
    for file, printed in official.items():
        console.print(published_script(file, printed))
    if output is not None:
        typer.echo(f"results: {output}")


def _systems(predictions: list[Path], pool: bool) -> dict[str, list[Path]]:
    """The files of each system, by a name for it."""
    systems: dict[str, list[Path]] = {}
    for path in predictions:
        files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"{path}: the folder holds no .txt files; give submission files.")
        if str(path) in systems:
            raise ValueError(f"{path} is given twice; give each system once.")
        systems[str(path)] = files
    return {"pooled": [path for paths in systems.values() for path in paths]} if pool else systems


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
