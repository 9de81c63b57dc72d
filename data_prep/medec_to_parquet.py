"""MEDEC files -> ``train.parquet`` and ``val.parquet`` for self-play training with verl.

Run from the command line: ``python data_prep/medec_to_parquet.py --help``.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

try:
    import pyarrow.parquet as pq  # type: ignore[import-untyped, unused-ignore]
    import typer
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from medserl_agentloop.game.types import Category
    from medserl_agentloop.medec.allocation import DEFAULT_MIX, format_mix, parse_mix
    from medserl_agentloop.medec.fields import MedecFormatError
    from medserl_agentloop.medec.reader import ReadReport, ReadResult, read_files
    from medserl_agentloop.medec.rows import GameRows, RowPlan, build_rows
    from medserl_agentloop.medec.schema import to_table
except ModuleNotFoundError as missing:
    print(
        f"error: the Python module {missing.name!r} is not installed; "
        f"run `pip install -e .` in {Path(__file__).resolve().parent.parent} and try again.",
        file=sys.stderr,
    )
    sys.exit(2)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    inputs: Annotated[
        list[Path],
        typer.Option("--input", help="MEDEC's CSV or a .jsonl of pairs; give it again for more files."),
    ],
    output: Annotated[Path, typer.Option(help="Folder for train.parquet and val.parquet.")],
    mix: Annotated[str, typer.Option(help="Share of each category.")] = DEFAULT_MIX,
    rows: Annotated[
        int | None,
        typer.Option(help="Rows of both splits together; default: as many as the mix allows."),
    ] = None,
    val_fraction: Annotated[float, typer.Option(help="Share of vignettes for validation, 0 to 1.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of the split, the choice and the order.")] = 42,
    profile: Annotated[str, typer.Option(help="Prompt profile: a name, or the path of a folder.")] = "medserl",
    i_have_the_uw_agreement: Annotated[
        bool,
        typer.Option(
            "--i-have-the-uw-agreement",
            help="Accept MEDEC-UW rows; you have signed its data use agreement.",
        ),
    ] = False,
) -> None:
    """Write training and validation rows for medical-error self-play.

    Rows are split by case, so that the two notes of a case are never on both sides.
    """
    try:
        plan = RowPlan(parse_mix(mix), rows, val_fraction, seed, profile)
        read = read_files(inputs)
        if not i_have_the_uw_agreement:
            _refuse_uw(read)
        games = build_rows(read.vignettes, plan)
        _write(output, {"train.parquet": games.train, "val.parquet": games.val})
    except ValueError as error:  # the package's own errors, each a sentence: input, mix, profile, output
        # One line: a newline in a file name must not make it look like something else.
        typer.echo("error: " + " ".join(str(error).split()), err=True)
        raise typer.Exit(2) from None
    _print_summary(read, games, plan, output)


def _refuse_uw(read: ReadResult) -> None:
    count = sum(len(v.text_ids) for v in read.vignettes if v.subset == "medec_uw")
    if count:
        raise MedecFormatError(
            f"the input has {count} MEDEC-UW rows, which may be used only under a signed agreement; "
            "if you have signed it, add --i-have-the-uw-agreement."
        )


def _write(folder: Path, tables: Mapping[str, list[dict[str, Any]]]) -> None:
    """Write all files beside their final place, then move them there: no half-written data set."""
    temporary = {folder / name: folder / f".{name}.{os.getpid()}.tmp" for name in tables}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for temp, rows in zip(temporary.values(), tables.values(), strict=True):
            pq.write_table(to_table(rows), temp)
        for final, temp in temporary.items():
            os.replace(temp, final)
    except OSError as error:
        raise ValueError(
            f"{folder}: cannot be written ({error.strerror or error}); give a folder that you may write to."
        ) from error
    finally:
        for temp in temporary.values():
            with suppress(OSError):
                temp.unlink()


def _print_summary(read: ReadResult, games: GameRows, plan: RowPlan, output: Path) -> None:
    console = Console()
    console.print(_input_table(read))
    console.print(_type_table(read))
    console.print(_category_table(games))
    console.print(_exclusion_table(read, games))
    longest = max(
        (sum(len(message["content"]) for message in row["prompt"]) for row in games.train + games.val),
        default=0,
    )
    console.print(
        Text(
            f"mix {format_mix(plan.mix)}, seed {plan.seed}, profile {plan.profile}; longest prompt {longest} characters"
        )
    )
    for name, rows in (("train", games.train), ("val", games.val)):
        labels = Counter(row["reward_model"]["ground_truth"] for row in rows)
        console.print(
            Text(
                f"{output / name}.parquet: {len(rows)} rows, "
                f"presented notes {labels['harmful']} harmful, {labels['safe']} safe"
            )
        )


def _input_table(read: ReadResult) -> Table:
    measures: dict[str, Callable[[ReadReport], int]] = {
        "records read": lambda r: r.records,
        "= empty records, dropped": lambda r: r.dropped_empty,
        "+ pairs (error note and clean note)": lambda r: r.pairs,
        "+ clean rows that are a pair's twin": lambda r: r.twins,
        "+ clean notes without an error note": lambda r: r.clean_only,
        "+ error notes without a clean note": lambda r: r.error_only,
        "pairs whose clean note is the twin's": lambda r: r.pairs_by_twin,
        "pairs edited in more than one place": lambda r: r.non_local_edits,
        "pairs without a real edit (no-op)": lambda r: r.no_op_edits,
        "error sentence number not in the list": lambda r: r.unlisted_error_sentences,
    }
    table = Table(title="Input", title_justify="left")
    table.add_column("")
    for report in read.reports:
        table.add_column(Text(report.file), justify="right", overflow="fold")
    for name, measure in measures.items():
        table.add_row(name, *(str(measure(report)) for report in read.reports))
    return table


def _type_table(read: ReadResult) -> Table:
    total: Counter[str] = Counter()
    for report in read.reports:
        total.update(report.error_types)
    table = Table(title="Error types", title_justify="left")
    table.add_column("type")
    table.add_column("vignettes", justify="right")
    for name, count in total.most_common():
        table.add_row(name, str(count))
    return table


def _category_table(games: GameRows) -> Table:
    table = Table(title="Rows (in brackets: vignettes that could serve)", title_justify="left")
    for heading in ("category", "presented note", *games.reports):
        table.add_column(heading, justify="left" if heading in ("category", "presented note") else "right")
    for category in next(iter(games.reports.values())).rows:
        cells = (f"{r.rows[category]} ({r.eligible[category]})" for r in games.reports.values())
        table.add_row(category.value, Category(category).default_target_label.value, *cells)
    table.add_section()
    table.add_row("total", "", *(str(sum(r.rows.values())) for r in games.reports.values()))
    return table


def _exclusion_table(read: ReadResult, games: GameRows) -> Table:
    """What gives no row, or not every row it could, and why."""
    twins = sum(report.twins - report.pairs_by_twin for report in read.reports)
    empty = sum(report.dropped_empty for report in read.reports)
    counts = {
        "records dropped: every field is empty": empty,
        "twins' own texts not used: the pair's corrected text is its clean note": twins,
        **{f"vignettes, {reason}": count for reason, count in games.excluded.items()},
        "vignettes kept in one split because they share a note": games.sharing_a_note,
        **{
            f"vignettes of {name} without any row: the mix has no place for them": r.unused_vignettes
            for name, r in games.reports.items()
        },
    }
    table = Table(title="Left out", title_justify="left")
    table.add_column("what and why")
    table.add_column("count", justify="right")
    for reason, count in counts.items():
        if count:
            table.add_row(Text(reason), str(count))
    return table


if __name__ == "__main__":
    app()
