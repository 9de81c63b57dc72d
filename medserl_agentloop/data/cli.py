"""The ``medserl data`` commands and their output.

The scripts of ``data_prep`` are the same commands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from typer import Argument, Option

from medserl_agentloop.data.convert import COLUMN, convert, named_columns, say_why, show
from medserl_agentloop.data.reader import read_files
from medserl_agentloop.data.rows import UW_AGREEMENT, refuse_uw, write_parquet
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.paths import all_or_none
from medserl_agentloop.terminal import errors_in_one_line, say

if TYPE_CHECKING:
    from medserl_agentloop.data.verify import Report

app = typer.Typer(no_args_is_help=True, help="Make data files from MEDEC's notes, and check them.")

app.command()(convert)

UwAgreement = Annotated[bool, Option("--i-have-the-uw-agreement", help=UW_AGREEMENT)]


def script(command: Callable[..., None]) -> typer.Typer:
    """One of the commands as a program of its own."""
    program = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    program.command()(command)
    return program


@app.command()
def verify(
    files: Annotated[list[Path], Argument(help="Parquet files that are used together.")],
) -> None:
    """Check that files can be trained on: every row complete, playable and free of leaks.

    The exit code is 0 if every check holds, 1 if one fails, 2 if a file cannot be read.
    """
    from medserl_agentloop.data.verify import verify_files

    with errors_in_one_line("error"):
        report = verify_files(files)
    _print_report(report)
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def sft(
    output: Annotated[Path, Option(help="Folder for sft_train.parquet and sft_val.parquet.")],
    inputs: Annotated[
        list[Path], Option("--input", help="Notes with errors, as for convert. Repeatable.")
    ],
    column: Annotated[list[str], Option(help=COLUMN)] = [],  # noqa: B006
    val_fraction: Annotated[float, Option(help="Share of cases for validation, 0 to 1.")] = 0.1,
    seed: Annotated[int, Option(help="Seed of the split and the order.")] = 42,
    profile: Annotated[
        str, Option(help="Prompt profile of the messages: a name or a folder.")
    ] = "medserl",
    error_types: Annotated[
        str | None, Option(help="The run's selfplay.error_types, with commas between them.")
    ] = None,
    splits_of: Annotated[
        Path | None,
        Option(
            help="Folder written by medserl data convert: every case keeps the split it has there."
        ),
    ] = None,
    i_have_the_uw_agreement: UwAgreement = False,
) -> None:
    """Write conversations to imitate: an attack, and an assessment of either note, for every pair
    of --input.

    What self-play validates on must not be taught here. With the same input, --val-fraction and
    --seed, medserl data convert puts a case on the same side; if it was told to leave cases out, or
    given files for validation, give its folder with --splits-of.
    """
    from medserl_agentloop.data.sft import SFT_SCHEMA, build_sft_rows, read_splits

    with errors_in_one_line("error"):
        read = read_files(inputs, columns=named_columns(column))
        refuse_uw(read.uw_rows, i_have_the_uw_agreement)
        for report in read.reports:
            say_why(f"left out: {report.file}", report.contradictions)
        made = build_sft_rows(
            read.cases,
            prompts=load_profile(profile, error_types),
            split_of=read_splits(splits_of) if splits_of else None,
            val_fraction=val_fraction,
            seed=seed,
        )
        files = {"sft_train.parquet": made.train, "sft_val.parquet": made.val}
        with all_or_none(output) as place:
            for name, rows in files.items():
                write_parquet(rows, place / name, SFT_SCHEMA)
    train, val = (
        Counter((row["game_role"], row["category"]) for row in rows) for rows in files.values()
    )
    lessons = [[*lesson, train[lesson], val[lesson]] for lesson in sorted(train | val)]
    show("Conversations", ["role", "game", "train", "val"], lessons)
    if made.left_out:
        show("Left out", ["what and why", "count"], sorted(made.left_out.items()))
    for name, rows in files.items():
        _say(f"{output / name}: {len(rows)} conversations")


def _print_report(report: Report) -> None:
    from medserl_agentloop.data.verify import Check

    for _, problem in report.problems:
        _say(problem)
    if hidden := (report.failures + report.warnings).total() - len(report.problems):
        _say(f"and {hidden} more of the same kinds")
    numbers = ["rows", "harmful", "safe"]
    files = [
        [name, *(counts[number] for number in numbers)] for name, counts in report.files.items()
    ]
    show("Files", ["file", *numbers], files)
    results = []
    for check in Check:
        counts = {"failed": report.failures[check], "warnings": report.warnings[check]}
        result = [f"{name}: {n}" for name, n in counts.items() if n]
        result += [f"not checked: {why}" for of, why in report.unchecked.items() if of is check]
        results.append([check.value, ", ".join(result) or "holds"])
    show("Checks", ["check", "result"], results)


def _say(line: str) -> None:
    say(Console(), line)
