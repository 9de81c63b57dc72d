"""Files of notes -> data files for verl: ``medserl data convert``.

Reads the input, writes the rows of both splits with their account, or one file of evaluation rows,
and prints what was made and what was left out.
"""

from __future__ import annotations

import inspect
import json
import platform
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.console import Console
from typer import Option

from medserl_agentloop.data.cases import near_duplicates
from medserl_agentloop.data.reader import FIELDS, ReadReport, ReadResult, read_files
from medserl_agentloop.data.rows import (
    AS_GIVEN,
    DEFAULT_MIX,
    NOT_FOR_TRAINING,
    UW_AGREEMENT,
    Exclusions,
    RowPlan,
    SplitRows,
    build_eval_rows,
    build_rows,
    format_mix,
    labels_of,
    mix_of,
    parse_mix,
    refuse_uw,
    write_parquet,
)
from medserl_agentloop.paths import MANIFEST, all_or_none, did_you_mean, sha256_of
from medserl_agentloop.terminal import errors_in_one_line, say, table

COLUMN = "Which column has what in your own table, such as note=TEXT. Repeatable."
SHOWN = 3  # ids in a line of the summary
_PACKAGES = ("medserl-agentloop", "pyarrow")


class ConvertOptions(RowPlan):
    input: list[Path] = Field(
        min_length=1,
        description=".csv, .jsonl, .xlsx or .parquet, or the folder of a saved Hugging Face data "
        "set. Repeatable.",
    )
    output: Path = Field(
        description="Folder for train.parquet, val.parquet and manifest.json; or a file that ends "
        "in .parquet, for evaluation rows."
    )
    column: list[str] | None = Field(None, description=COLUMN)
    val_input: list[Path] | None = Field(
        None, description="Input whose cases all go to the validation split."
    )
    join: list[Path] | None = Field(
        None, description="File to look up the cases of OpenRLHF rows in. Repeatable."
    )
    exclude_near_duplicates_of: list[Path] | None = Field(
        None,
        description="Leave out cases that are nearly the same as one of this file. Repeatable.",
    )
    i_have_the_uw_agreement: bool = Field(False, description=UW_AGREEMENT)


def named_columns(options: Sequence[str] | None) -> dict[str, str]:
    """The columns by field, of options such as ``note=TEXT``; a ValueError names a wrong one."""
    named = dict(each.partition("=")[::2] for each in options or ())
    for name, column in named.items():
        if name not in FIELDS or not column:
            raise ValueError(
                f"--column {name}={column}{did_you_mean(name, FIELDS)}: write FIELD=COLUMN, with "
                f"one of the fields {', '.join(FIELDS)}."
            )
    return named


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
    for why, count in made.left_out.items():
        _say(f"left out: {why} ({count})")
    for report in read.reports:
        say_why(f"left out: {report.file}", report.contradictions)
        say_why(f"not joined: {report.file}", report.not_joined)
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
            f"--{name.replace('_', '-')} belongs to training rows: leave it out, or give --output "
            "a folder."
        )
    rows, read = build_eval_rows(options.input, named_columns(options.column))
    refuse_uw(read.uw_rows, options.i_have_the_uw_agreement)
    with all_or_none(options.output.parent) as place:
        write_parquet(rows, place / options.output.name)
    show(
        "Rows", ["data_source", "rows"], sorted(Counter(row["data_source"] for row in rows).items())
    )
    for report in read.reports:
        say_why(f"warning: kept as published: {report.file}", report.contradictions)
    _say(f"{options.output}: {len(rows)} rows; {read.dropped_empty} empty records dropped")


def convert_files(options: ConvertOptions) -> tuple[ReadResult, SplitRows]:
    """Make the rows of both splits and write them; ValueError for an invalid input."""
    columns = named_columns(options.column)
    read = read_files(
        [*options.input, *(options.val_input or ())], columns=columns, join=options.join or ()
    )
    refuse_uw(read.uw_rows, options.i_have_the_uw_agreement)
    cases = read.cases
    exclusions: Exclusions = defaultdict(list)
    val_ids = None
    if options.val_input:
        val_files = {report.sha256 for report in read.reports[len(options.input) :]}
        val_ids = {case.case_id for case in cases if case.source_sha256 in val_files}
    if options.exclude_near_duplicates_of:
        others = read_files(options.exclude_near_duplicates_of, columns=columns).cases
        notes, of_others = (
            [(case.case_id, note) for case in each for note in case.notes]
            for each in (cases, others)
        )
        matches = sorted(near_duplicates(notes, of_others), key=lambda match: match[2])
        likest = {
            case_id: f"{other} (4-gram Jaccard {similarity:.2f})"
            for case_id, other, similarity in matches
        }
        exclusions["near-duplicate of a case to stay clear of"] += likest.items()
        cases = [case for case in cases if case.case_id not in likest]
    try:
        made = build_rows(cases, options, exclusions, val_ids)
    except ValueError as error:
        hint = f" Or give --mix {AS_GIVEN}: every row in its own category." if mix_of(cases) else ""
        if overlap := exclusions[NOT_FOR_TRAINING]:
            hint = (
                f" {len(overlap)} cases share a note with a case of --val-input, so they cannot be "
                f"trained on as well ({overlap[0][0]} is {overlap[0][1]}): leave out --val-input, "
                "or give it a file of other cases."
            )
        raise ValueError(f"{error}{hint}") from error
    _write(options, made, read.reports)
    return read, made


def _write(options: ConvertOptions, made: SplitRows, sources: Sequence[ReadReport]) -> None:
    """Write all three files into the output folder, or none; the same data set gives the same
    bytes.
    """
    with all_or_none(options.output) as place:
        outputs = {}
        for split, rows in (("train", made.train), ("val", made.val)):
            path = place / f"{split}.parquet"
            write_parquet(rows, path)
            outputs[path.name] = {
                "rows": len(rows),
                "labels": labels_of(rows),
                "sha256": sha256_of(path),
            }
        account = {
            "format": 1,
            "options": {
                f"--{name.replace('_', '-')}": value for name, value in options.model_dump().items()
            },
            "mix": format_mix(made.mix),
            "versions": {
                "python": platform.python_version(),
                **{package: version(package) for package in _PACKAGES},
            },
            "sources": [asdict(source) for source in sources],
            "outputs": outputs,
            "splits": made.reports,
            "exclusions": [
                {
                    "reason": reason,
                    "count": len(rows),
                    "rows": [{"id": i, "detail": d} for i, d in rows],
                }
                for reason, rows in made.exclusions.items()
            ],
        }
        text = json.dumps(account, ensure_ascii=False, default=str, indent=1)
        (place / MANIFEST).write_text(
            text, encoding="utf-8", errors="backslashreplace", newline="\n"
        )


def _print_input(reports: Sequence[ReadReport]) -> None:
    counts = {field.name: field.metadata["label"] for field in fields(ReadReport) if field.metadata}
    rows = [
        [label, *(getattr(report, name) for report in reports)] for name, label in counts.items()
    ]
    show("Input", ["", *(report.file for report in reports)], [row for row in rows if any(row[1:])])


def _print_rows(made: SplitRows, plan: RowPlan) -> None:
    splits = made.reports.values()
    rows = []
    for category in made.mix:
        counts = (f"{split['rows'][category]} ({split['eligible'][category]})" for split in splits)
        rows.append([category.value, plan.label_of(category).value, *counts])
    total = ["total", "", *(str(sum(split["rows"].values())) for split in splits)]
    show(
        "Rows (in brackets: cases that could serve)",
        ["category", "presented note", *made.reports],
        [*rows, total],
    )


def say_why(what: str, rows: Sequence[tuple[str, str]]) -> None:
    """For each reason how many rows there are, and the first of them; the manifest has all."""
    for why in dict.fromkeys(why for _, why in rows):
        ids = [row_id for row_id, of in rows if of == why]
        _say(
            f"{what}, {why} ({len(ids)}): "
            f"{', '.join(ids[:SHOWN])}{', ...' if len(ids) > SHOWN else ''}"
        )


def _say(line: str) -> None:
    say(Console(), line)


def show(title: str, headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table."""
    Console().print(table(title, headings, rows))
