"""The ``medserl data`` commands and their output.

The scripts of ``data_prep`` are the same commands.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer import Argument, Option

from medserl_agentloop.data.reader import ReadReport, read_files
from medserl_agentloop.data.rows import (
    AS_GIVEN,
    DEFAULT_MIX,
    UW_AGREEMENT,
    ConvertOptions,
    RowPlan,
    SplitRows,
    build_eval_rows,
    convert_files,
    format_mix,
    labels_of,
    mix_of,
    parse_mix,
    refuse_uw,
    write_parquet,
)
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.paths import MANIFEST, all_or_none
from medserl_agentloop.terminal import errors_in_one_line, say, table

if TYPE_CHECKING:
    from medserl_agentloop.data.verify import Report

SHOWN = 3  # ids in a line of the summary

app = typer.Typer(no_args_is_help=True, help="Make data files from MEDEC's notes, and check them.")

UwAgreement = Annotated[bool, Option("--i-have-the-uw-agreement", help=UW_AGREEMENT)]


def script(command: Callable[..., None]) -> typer.Typer:
    """One of the commands as a program of its own."""
    program = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    program.command()(command)
    return program


def _asked(command: Callable[[ConvertOptions], None]) -> Callable[..., None]:
    """A command that has an option for each field of ``ConvertOptions``, those that must be given
    first.
    """

    def with_options(**values: Any) -> None:
        with errors_in_one_line("error"):
            command(ConvertOptions(**values))

    options = []
    known = ConvertOptions.model_fields
    for name, about in sorted(known.items(), key=lambda field: not field[1].is_required()):
        default = ... if about.is_required() else about.default
        option = Option(default, "--" + name.replace("_", "-"), help=about.description)
        kind = inspect.Parameter.KEYWORD_ONLY
        options.append(inspect.Parameter(name, kind, default=option, annotation=about.annotation))
    with_options.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    with_options.__annotations__ = {option.name: option.annotation for option in options}
    with_options.__doc__, with_options.__name__ = command.__doc__, command.__name__
    return with_options


@app.command()
@_asked
def convert(options: ConvertOptions) -> None:
    """Write training and validation rows for medical-error self-play, or evaluation rows.

    Rows are split by case, so that the two notes of a case are never on both sides. With an output
    that ends in .parquet, every note becomes a single assessor turn, as it is, for verl's
    validation.
    """
    if options.output.suffix == ".parquet":
        _evaluation_rows(options)
        return
    read, made = convert_files(options)
    _print_input(read.reports)
    _print_rows(made, options)
    counts = {"records dropped: every field is empty": read.dropped_empty, **made.left_out}
    _show("Left out", ["what and why", "count"], [item for item in counts.items() if item[1]])
    for report in read.reports:
        _say_why(f"left out: {report.file}", report.contradictions)
        _say_why(f"not joined: {report.file}", report.not_joined)
        if untyped := report.error_types.get("unknown"):
            _say(
                f"{report.file}: {untyped} error notes have no error type; look it up with --join "
                "and MEDEC's file"
            )
    for name in made.off_mix:
        _say(
            f"warning: {name}.parquet has too few cases for the mix, so its categories are not in "
            "proportion"
        )
    if not made.val:
        _say("warning: val.parquet has no rows; train with data.val_files=[] or give --val-input")
    available = sum(sum(split["eligible"].values()) for split in made.reports.values())
    unused = options.rows is None and len(made.train) + len(made.val) < available
    if unused and options.mix is None and mix_of(read.cases):
        _say(
            f"--mix {AS_GIVEN} keeps all {available} rows, each in the category that the input "
            "names"
        )
    partial = options.mix is None and made.mix != parse_mix(DEFAULT_MIX)
    what_of = ": the notes serve no other category of the default mix" * partial
    _say(f"--mix {format_mix(made.mix)}, --seed {options.seed}{what_of}")
    for name, written in (("train", made.train), ("val", made.val)):
        of = labels_of(written)
        labels = f"presented notes {of['harmful']} harmful, {of['safe']} safe"
        _say(f"{options.output / name}.parquet: {len(written)} rows, {labels}")
    _say(f"{options.output / MANIFEST}: the account")


def _evaluation_rows(options: ConvertOptions) -> None:
    """Write the rows of a set that is validated on to one file; nothing is stripped or left out."""
    read_here = ("input", "output", "column", "i_have_the_uw_agreement")
    for name, about in ConvertOptions.model_fields.items():
        if name in read_here or getattr(options, name) == about.default:
            continue
        raise ValueError(
            f"--{name.replace('_', '-')} belongs to training rows; give --output a folder, or "
            "leave it out for evaluation rows."
        )
    rows, read = build_eval_rows(options.input, options.columns)
    refuse_uw(read.uw_rows, options.i_have_the_uw_agreement)
    with all_or_none(options.output.parent) as place:
        write_parquet(rows, place / options.output.name)
    _show(
        "Rows", ["data_source", "rows"], sorted(Counter(row["data_source"] for row in rows).items())
    )
    for report in read.reports:
        _say_why(f"warning: kept as published: {report.file}", report.contradictions)
    _say(f"{options.output}: {len(rows)} rows; {read.dropped_empty} empty records dropped")


@app.command()
def verify(
    files: Annotated[list[Path], Argument(help="Parquet files that are used together.")],
) -> None:
    """Check that files can be trained on: opened by verl, every row complete, playable and free of
    leaks.

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
        list[Path], Option("--input", help="MEDEC's CSV or a .jsonl of pairs. Repeatable.")
    ] = [],  # noqa: B006
    from_games: Annotated[
        list[Path], Option(help="Games of a model: its right turns in place of templates.")
    ] = [],  # noqa: B006
    rest_of: Annotated[
        Path | None,
        Option(
            help="A file for self-play, of which the cases that are not taught go to "
            "selfplay_train.parquet."
        ),
    ] = None,
    val_fraction: Annotated[float, Option(help="Share of cases for validation, 0 to 1.")] = 0.1,
    seed: Annotated[int, Option(help="Seed of the split and the order.")] = 42,
    profile: Annotated[
        str | None, Option(help="Prompt profile of the messages: a name or a folder; else medserl.")
    ] = None,
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

    With --from-games they are a model's own turns instead, those that were valid, readable and
    right.

    What self-play validates on must not be taught here. With the same input, --val-fraction and
    --seed, medserl data convert puts a case on the same side; if it was told to leave cases out, or
    given files for validation, give its folder with --splits-of.
    """
    import pyarrow.parquet as pq

    from medserl_agentloop.core.step_file import GAMES_FILE
    from medserl_agentloop.data.sft import (
        SFT_SCHEMA,
        build_sft_rows,
        read_splits,
        rows_for_self_play,
        rows_of_games,
    )
    from medserl_agentloop.games.medical.records import read_games

    with errors_in_one_line("error"):
        if bool(inputs) == bool(from_games):
            raise ValueError(
                "give --input, for answers from templates, or --from-games, for a model's own; not "
                "both."
            )
        split: Any = {"val_fraction": val_fraction, "seed": seed}
        if from_games:
            if splits_of is not None:
                raise ValueError(
                    "--splits-of belongs to --input; with --from-games, use --rest-of."
                )
            if profile is not None:
                raise ValueError(
                    "--profile belongs to --input; with --from-games, leave it out: a game names "
                    "its own."
                )
            paths = [path / GAMES_FILE if path.is_dir() else path for path in from_games]
            made = rows_of_games(chain(*map(read_games, paths)), error_types=error_types, **split)
        else:
            read = read_files(inputs)
            refuse_uw(read.uw_rows, i_have_the_uw_agreement)
            for report in read.reports:
                _say_why(f"left out: {report.file}", report.contradictions)
            split_of = read_splits(splits_of) if splits_of else None
            prompts = load_profile(profile or "medserl", error_types)
            made = build_sft_rows(read.cases, prompts=prompts, split_of=split_of, **split)
        files = {"sft_train.parquet": made.train, "sft_val.parquet": made.val}
        rest = rows_for_self_play(rest_of, made.train + made.val) if rest_of is not None else None
        with all_or_none(output) as place:
            for name, rows in files.items():
                write_parquet(rows, place / name, SFT_SCHEMA)
            if rest is not None:
                pq.write_table(rest, place / "selfplay_train.parquet")
    train, val = (
        Counter((row["game_role"], row["category"]) for row in rows) for rows in files.values()
    )
    lessons = [[*lesson, train[lesson], val[lesson]] for lesson in sorted(train | val)]
    _show("Conversations", ["role", "game", "train", "val"], lessons)
    if made.left_out:
        _show("Left out", ["what and why", "count"], sorted(made.left_out.items()))
    for name, rows in files.items():
        _say(f"{output / name}: {len(rows)} conversations")
    if rest is not None:
        _say(
            f"{output / 'selfplay_train.parquet'}: {rest.num_rows} rows of the cases that are not "
            "taught"
        )


def _print_input(reports: Sequence[ReadReport]) -> None:
    counts = {field.name: field.metadata["label"] for field in fields(ReadReport) if field.metadata}
    rows = [
        [label, *(getattr(report, name) for report in reports)] for name, label in counts.items()
    ]
    _show(
        "Input", ["", *(report.file for report in reports)], [row for row in rows if any(row[1:])]
    )
    types = sum((Counter(report.error_types) for report in reports), Counter[str]())
    _show("Error types", ["type", "cases"], types.most_common())


def _print_rows(made: SplitRows, plan: RowPlan) -> None:
    splits = made.reports.values()
    rows = []
    for category in made.mix:
        counts = (f"{split['rows'][category]} ({split['eligible'][category]})" for split in splits)
        rows.append([category.value, plan.label_of(category).value, *counts])
    total = ["total", "", *(str(sum(split["rows"].values())) for split in splits)]
    _show(
        "Rows (in brackets: cases that could serve)",
        ["category", "presented note", *made.reports],
        [*rows, total],
    )


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
    _show("Files", ["file", *numbers], files)
    results = []
    for check in Check:
        counts = {"failed": report.failures[check], "warnings": report.warnings[check]}
        result = [f"{name}: {n}" for name, n in counts.items() if n]
        result += [f"not checked: {why}" for of, why in report.unchecked.items() if of is check]
        results.append([check.value, ", ".join(result) or "holds"])
    _show("Checks", ["check", "result"], results)


def _say_why(what: str, rows: Sequence[tuple[str, str]]) -> None:
    """For each reason how many rows there are, and the first of them; the manifest has all."""
    for why in dict.fromkeys(why for _, why in rows):
        ids = [row_id for row_id, of in rows if of == why]
        _say(
            f"{what}, {why} ({len(ids)}): "
            f"{', '.join(ids[:SHOWN])}{', ...' if len(ids) > SHOWN else ''}"
        )


def _say(line: str) -> None:
    say(Console(), line)


def _show(title: str, headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    Console().print(table(title, headings, rows))
