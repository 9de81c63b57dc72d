"""The ``medserl score`` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

_SHOWN_PROBLEMS = 20


def score(
    predictions: Annotated[
        list[Path],
        typer.Argument(help="Submission files. A folder counts as one system whose .txt files are its seeds."),
    ],
    reference: Annotated[list[Path], typer.Option(help="MEDEC's CSV with the answers; may be repeated.")],
    train: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option(help="MEDEC's training CSV, or a .jsonl file of pairs, for two of the floors; may be repeated."),
    ] = None,
    pool: Annotated[bool, typer.Option("--pool", help="The files are seeds of one system.")] = False,
    neural: Annotated[
        bool, typer.Option("--neural", help="Compute BERTScore and BLEURT too; their models take some GB.")
    ] = False,
    official_bugs: Annotated[
        bool, typer.Option("--official-bugs", help="Also print what the published script makes of the files.")
    ] = False,
    resamples: Annotated[int, typer.Option(min=0, help="Draws of the bootstrap.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap's draws.")] = 0,
    output: Annotated[Optional[Path], typer.Option(help="File for all results, as JSON.")] = None,  # noqa: UP045
) -> None:
    """Score submissions on MEDEC, with intervals, floors to beat and published results.

    Several systems are compared with the first one on the same notes. Choose models, prompts and settings on the
    validation set; the test set is for one final run.
    """
    import hashlib
    import json

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from medserl_agentloop.scoring.corrections import NEURAL_SCORERS, SCORERS
    from medserl_agentloop.scoring.grading import Grades, grade
    from medserl_agentloop.scoring.official import official_scores
    from medserl_agentloop.scoring.reference import read_reference
    from medserl_agentloop.scoring.report import as_json, report_on, tables
    from medserl_agentloop.scoring.submission import read_submission
    from medserl_agentloop.scoring.yardsticks import read_training

    console = Console()
    scorers = NEURAL_SCORERS if neural else SCORERS
    files: dict[str, dict[str, Any]] = {}
    official: dict[str, dict[str, float | None] | str] = {}
    try:
        if official_bugs and len(reference) > 1:
            raise ValueError("--official-bugs reads one --reference, as the published script does; give one.")
        notes = read_reference(reference)
        training = read_training(train, notes.notes) if train else None
        systems: dict[str, list[Grades]] = {}
        for name, paths in _systems(predictions, pool).items():
            systems[name] = []
            for path in paths:
                submission = read_submission(path, [note.text_id for note in notes.notes])
                files[str(path)] = {
                    "system": name,
                    "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                    "problems": [str(problem) for problem in submission.problems],
                }
                systems[name].append(grade(notes.notes, submission.predictions.values(), scorers))
                if official_bugs:
                    try:
                        official[str(path)] = official_scores(reference[0], path, scorers)
                    except ValueError as error:
                        official[str(path)] = str(error)
        report = report_on(notes, systems, training, resamples=resamples, seed=seed)
        if output is not None:
            results = as_json(report) | {"files": files, "published_script": official}
            output.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        typer.echo(f"medserl: {error}", err=True)
        raise typer.Exit(2) from None
    for name, file in files.items():
        for problem in file["problems"][:_SHOWN_PROBLEMS]:
            typer.echo(f"{name}: {problem}", err=True)
        if len(file["problems"]) > _SHOWN_PROBLEMS:
            more = len(file["problems"]) - _SHOWN_PROBLEMS
            typer.echo(f"{name}: {more} more problems; --output holds all of them", err=True)
    console.print(tables(report))
    for name, found in official.items():
        if isinstance(found, str):
            console.print(Text(found))
            continue
        table = Table("", "value", title=Text(f"By the published script, mistakes included: {name}"))
        for title, value in found.items():
            table.add_row(title, repr(value))
        console.print(table)
    if output is not None:
        typer.echo(f"results: {output}")


def _systems(predictions: list[Path], pool: bool) -> dict[str, list[Path]]:
    """The files of each system, by a name for it."""
    systems: dict[str, list[Path]] = {}
    for path in predictions:
        found = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        if not found:
            raise ValueError(f"{path}: the folder holds no .txt files; give submission files.")
        if str(path) in systems:
            raise ValueError(f"{path} is given twice; give each system once.")
        systems[str(path)] = found
    if pool:
        return {"pooled": [path for paths in systems.values() for path in paths]}
    return systems
