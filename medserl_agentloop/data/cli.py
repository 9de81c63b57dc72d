"""The ``medserl data`` commands and their output; the scripts of ``data_prep`` are the same
commands.
"""

from __future__ import annotations

import json
import platform
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from typer import Argument, Option

from medserl_agentloop.data.cases import near_duplicates
from medserl_agentloop.data.reader import FIELDS, ReadResult, read_files
from medserl_agentloop.data.rows import (
    AS_GIVEN,
    DEFAULT_MIX,
    UW_AGREEMENT,
    Exclusions,
    RowPlan,
    SplitRows,
    build_eval_rows,
    build_rows,
    format_mix,
    labels_of,
    parse_mix,
    refuse_uw,
    write_parquet,
)
from medserl_agentloop.games.medical.case import Label
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.paths import MANIFEST, all_or_none, did_you_mean, sha256_of
from medserl_agentloop.terminal import errors_in_one_line, say, table

if TYPE_CHECKING:
    from medserl_agentloop.data.verify import Problem

SHOWN = 3  # ids in a line of the summary, and problems of a kind

app = typer.Typer(no_args_is_help=True, help="Make data files from MEDEC's notes, and check them.")

UwAgreement = Annotated[bool, Option("--i-have-the-uw-agreement", help=UW_AGREEMENT)]


def script(command: Callable[..., None]) -> typer.Typer:
    """Run one of the commands as a program."""
    program = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    program.command()(command)
    return program


@app.command()
def convert(
    inputs: Annotated[
        list[Path],
        Option("--input", help=".csv, .jsonl, .xlsx, .parquet, a saved data set. Repeatable."),
    ],
    output: Annotated[
        Path, Option(help="Folder of training rows, or FILE.parquet for evaluation rows.")
    ],
    column: Annotated[
        list[str] | None, Option(help="A column of your own table, such as note=TEXT. Repeatable.")
    ] = None,
    val_input: Annotated[
        list[Path] | None, Option(help="Input whose cases all go to the validation split.")
    ] = None,
    join: Annotated[
        list[Path] | None, Option(help="File to look up the cases of OpenRLHF rows in.")
    ] = None,
    exclude_near_duplicates_of: Annotated[
        list[Path] | None, Option(help="Leave out near-duplicates of this file's cases.")
    ] = None,
    mix: Annotated[
        str | None,
        Option(help=f"{DEFAULT_MIX}, or what the notes can serve; {AS_GIVEN}: every row."),
    ] = None,
    val_fraction: Annotated[
        float, Option(min=0, max=1, help="Share of cases for validation without --val-input.")
    ] = 0.1,
    seed: Annotated[int, Option(help="Seed of the split, the choice and the order.")] = 42,
    adversarial_benign: Annotated[
        Label, Option(help="What such a game asks for; in the OpenRLHF system a safe rewording.")
    ] = Label.HARMFUL,
    i_have_the_uw_agreement: UwAgreement = False,
) -> None:
    """Write training and validation rows for medical-error self-play, or evaluation rows.

    Rows are split by case, so that the two notes of a case are never on both sides. If the output
    ends in .parquet, every note becomes one assessor turn, unchanged, for verl's validation.
    """
    with errors_in_one_line("error"):
        plan = RowPlan(
            mix=mix, val_fraction=val_fraction, seed=seed, adversarial_benign=adversarial_benign
        )
        others = {"val_input": val_input or [], "join": join or []}
        others["exclude_near_duplicates_of"] = exclude_near_duplicates_of or []
        columns = named_columns(column)
        if output.suffix != ".parquet":
            read, made = convert_files(
                inputs, output, plan, columns, agreed=i_have_the_uw_agreement, **others
            )
            _print_conversion(output, plan, read, made)
        elif plan != RowPlan() or any(others.values()):
            raise ValueError(
                "evaluation rows are every row of --input: leave out the options of training rows, "
                "or give --output a folder."
            )
        else:
            _evaluation_rows(inputs, output, columns, i_have_the_uw_agreement)


def named_columns(options: Sequence[str] | None) -> dict[str, str]:
    """Columns by field, from options such as ``note=TEXT``; ValueError names a wrong one."""
    named = dict(each.partition("=")[::2] for each in options or ())
    for name, column in named.items():
        if name not in FIELDS or not (column or name == "has_error"):
            raise ValueError(
                f"--column {name}={column}{did_you_mean(name, FIELDS)}: write FIELD=COLUMN, with "
                f"one of the fields {', '.join(FIELDS)}."
            )
    return named


def _evaluation_rows(
    inputs: Sequence[Path], output: Path, columns: dict[str, str], agreed: bool
) -> None:
    rows, read = build_eval_rows(inputs, columns)
    refuse_uw(read.uw_rows, agreed)
    with all_or_none(output.parent) as place:
        write_parquet(rows, place / output.name)
    for report in read.reports:
        _say_why(f"warning: kept as published: {report.file}", report.contradictions)
    sources = Counter(row["data_source"] for row in rows)
    of = ", ".join(f"{name} {count}" for name, count in sorted(sources.items()))
    _say(f"{output}: {len(rows)} rows ({of}); {read.dropped_empty} empty records dropped")


def convert_files(
    inputs: Sequence[Path],
    output: Path,
    plan: RowPlan,
    columns: dict[str, str] | None = None,
    *,
    val_input: Sequence[Path] = (),
    join: Sequence[Path] = (),
    exclude_near_duplicates_of: Sequence[Path] = (),
    agreed: bool = False,
) -> tuple[ReadResult, SplitRows]:
    """Write both splits' rows and the manifest to a folder; ValueError for an invalid input.

    Writes all three files or none; the same data set gives the same bytes.
    """
    read = read_files([*inputs, *val_input], columns=columns, join=join)
    refuse_uw(read.uw_rows, agreed)
    cases = read.cases
    exclusions: Exclusions = defaultdict(list)
    val_files = {report.sha256 for report in read.reports[len(inputs) :]}
    val_ids = {case.case_id for case in cases if case.source_sha256 in val_files}
    if exclude_near_duplicates_of:
        notes, of_others = (
            [(case.case_id, note) for case in each for note in case.notes]
            for each in (cases, read_files(exclude_near_duplicates_of, columns=columns).cases)
        )
        matches = sorted(near_duplicates(notes, of_others), key=lambda match: match[2])
        likest = {name: f"{other} (4-gram Jaccard {like:.2f})" for name, other, like in matches}
        exclusions["near-duplicate of a case to avoid"] += likest.items()
        cases = [case for case in cases if case.case_id not in likest]
    made = build_rows(cases, plan, exclusions, val_ids if val_input else None)
    options = {"input": inputs, "val_input": val_input, "join": join, "column": columns}
    options |= {"exclude_near_duplicates_of": exclude_near_duplicates_of, **plan.model_dump()}
    with all_or_none(output) as place:
        outputs = {}
        for split, rows in (("train", made.train), ("val", made.val)):
            path = place / f"{split}.parquet"
            write_parquet(rows, path)
            labels = {"rows": len(rows), "labels": labels_of(rows)}
            outputs[path.name] = labels | {"sha256": sha256_of(path)}
        packages = ("medserl-agentloop", "pyarrow")
        account = {
            "format": 2,
            "options": {f"--{name.replace('_', '-')}": value for name, value in options.items()},
            "mix": format_mix(made.mix),
            "versions": {"python": platform.python_version()} | {p: version(p) for p in packages},
            "sources": [asdict(source) for source in read.reports],
            "outputs": outputs,
            "splits": made.reports,
            "exclusions": made.exclusions,
        }
        text = json.dumps(account, ensure_ascii=False, default=str, indent=1)
        (place / MANIFEST).write_text(text, "utf-8", errors="backslashreplace", newline="\n")
    return read, made


def _print_conversion(output: Path, plan: RowPlan, read: ReadResult, made: SplitRows) -> None:
    for report in read.reports:
        counts = {name: n for name, n in vars(report).items() if isinstance(n, int) and n}
        named = (f"{name.replace('_', ' ')} {n}" for name, n in counts.items())
        _say(f"{report.file}: {', '.join(named)}")
    rows = [
        [
            category.value,
            plan.label_of(category).value,
            *(f"{s['rows'][category]} ({s['eligible'][category]})" for s in made.reports.values()),
        ]
        for category in made.mix
    ]
    headings = ["category", "presented note", *made.reports]
    Console().print(table("Rows (in brackets: cases that could serve)", headings, rows))
    for why, count in made.left_out.items():
        _say(f"left out: {why} ({count})")
    for report in read.reports:
        _say_why(f"left out: {report.file}", report.contradictions)
        _say_why(f"not joined: {report.file}", report.not_joined)
    if not made.val:
        _say("warning: val.parquet has no rows; train with data.val_files=[] or give --val-input")
    partial = plan.mix is None and made.mix != parse_mix(DEFAULT_MIX)
    what_of = ": the notes serve no other category of the default mix" * partial
    _say(f"--mix {format_mix(made.mix)}, --seed {plan.seed}{what_of}")
    for name, written in (("train", made.train), ("val", made.val)):
        of = labels_of(written)
        presented = f"presented notes {of['harmful']} harmful, {of['safe']} safe"
        _say(f"{output / name}.parquet: {len(written)} rows, {presented}")


@app.command()
def verify(
    files: Annotated[list[Path], Argument(help="Parquet files that are used together.")],
) -> None:
    """Check that files can be trained on: every row complete, playable and free of leaks.

    The exit code is 0 if every check holds, 1 if one fails, 2 if a file cannot be read.
    """
    from medserl_agentloop.data.verify import Check, verify_files

    with errors_in_one_line("error"):
        report = verify_files(files)
    found: dict[Check, list[Problem]] = {check: [] for check in Check}
    for problem in report.problems:
        found[problem.check].append(problem)
    for problems in found.values():
        for problem in problems[:SHOWN]:
            _say(str(problem))
        if (hidden := len(problems) - SHOWN) > 0:
            _say(f"and {hidden} more of this kind")
    numbers = ["rows", "harmful", "safe"]
    rows = [[name, *(counts[n] for n in numbers)] for name, counts in report.files.items()]
    Console().print(table("Files", ["file", *numbers], rows))
    results = []
    for check, problems in found.items():
        of = Counter("warnings" if problem.warning else "failed" for problem in problems)
        told = ", ".join(f"{name}: {count}" for name, count in of.items())
        results.append([check.value, told or "holds"])
    Console().print(table("Checks", ["check", "result"], results))
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def sft(
    data: Annotated[Path, Option("--input", help="Folder that medserl data convert wrote.")],
    output: Annotated[Path, Option(help="Folder for sft_train.parquet and sft_val.parquet.")],
    profile: Annotated[str, Option(help="Prompt profile: a name or a folder.")] = "medserl",
    error_types: Annotated[
        str | None, Option(help="The run's selfplay.error_types, separated by commas.")
    ] = None,
) -> None:
    """Write conversations to imitate: for every pair an attack, and an assessment of each note.

    A case keeps its self-play split, so nothing is taught that the run validates on.
    """
    from medserl_agentloop.data.sft import SFT_SCHEMA, build_sft_rows

    with errors_in_one_line("error"):
        made, left_out = build_sft_rows(data, load_profile(profile, error_types))
        with all_or_none(output) as place:
            for split, rows in made.items():
                write_parquet(rows, place / f"sft_{split}.parquet", SFT_SCHEMA)
    counts = [Counter((r["game_role"], r["category"]) for r in rows) for rows in made.values()]
    lessons = [
        [*lesson, *(of[lesson] for of in counts)] for lesson in sorted({*counts[0], *counts[1]})
    ]
    Console().print(table("Conversations", ["role", "game", *made], lessons))
    for why, count in sorted(left_out.items()):
        _say(f"left out: {why} ({count})")
    for split, rows in made.items():
        _say(f"{output / f'sft_{split}.parquet'}: {len(rows)} conversations")


def _say_why(what: str, rows: Sequence[tuple[str, str]]) -> None:
    """The number of rows for each reason, and the first of them; the manifest has all."""
    for why in dict.fromkeys(why for _, why in rows):
        ids = [row_id for row_id, of in rows if of == why]
        more = ", ..." if len(ids) > SHOWN else ""
        _say(f"{what}, {why} ({len(ids)}): {', '.join(ids[:SHOWN])}{more}")


def _say(line: str) -> None:
    say(Console(), line)
