"""MEDEC files -> ``train.parquet`` and ``val.parquet`` for self-play training with verl.

Run from the command line: ``python data_prep/medec_to_parquet.py --help``.
"""

from __future__ import annotations

import shlex
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from installed import or_say_how_to_install

with or_say_how_to_install():
    import typer
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text

    from medserl_agentloop.core.manifest import MANIFEST
    from medserl_agentloop.data import conversion
    from medserl_agentloop.data.allocation import DEFAULT_MIX, AllocationError, format_mix, parse_mix, parse_split
    from medserl_agentloop.data.conversion import Prepared, ScreenOptions
    from medserl_agentloop.data.reader import ReadOptions, ReadReport, ReadResult, read_files, refuse_uw
    from medserl_agentloop.data.rows import RowPlan
    from medserl_agentloop.games.medical.types import Category, VanillaAttacker

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_INPUTS = "MEDEC's CSV, a .jsonl of pairs or OpenRLHF rows, or a data set: a folder or hf:NAME. Repeatable."
_SECONDS_WITHOUT_BAR = 1.0
_ITEMS_PER_UPDATE = 50


class OnOverlong(str, Enum):
    """What to do with prompts that are too long."""

    ERROR = "error"
    EXCLUDE = "exclude"


@app.command()
def main(
    context: typer.Context,
    inputs: Annotated[list[str], typer.Option("--input", help=_INPUTS)],
    output: Annotated[Path, typer.Option(help="Folder for train.parquet, val.parquet and manifest.json.")],
    val_inputs: Annotated[
        list[str] | None, typer.Option("--val-input", help="Input whose cases all go to the validation split.")
    ] = None,
    join: Annotated[
        list[Path] | None, typer.Option(help="File in which the cases of OpenRLHF rows are looked up. Repeatable.")
    ] = None,
    mix: Annotated[str, typer.Option(help="Share of each category.")] = DEFAULT_MIX,
    rows: Annotated[
        int | None,
        typer.Option(help="Rows of both splits together; default: as many as the mix allows."),
    ] = None,
    val_fraction: Annotated[
        float | None, typer.Option(help="Share of cases for validation, 0 to 1; default 0.1.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="The same as fractions: train=0.9,val=0.1.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the split, the choice and the order.")] = 42,
    profile: Annotated[str, typer.Option(help="Prompt profile: a name, or the path of a folder.")] = "medserl",
    vanilla_attacker: Annotated[
        VanillaAttacker,
        typer.Option(help="Whether the attacker copies the note in vanilla games, as the run's selfplay key says."),
    ] = VanillaAttacker.SKIP,
    exclude_near_duplicates_of: Annotated[
        list[Path] | None,
        typer.Option(help="Leave out cases that are nearly the same as one of this file. Repeatable."),
    ] = None,
    repair_encoding: Annotated[
        bool, typer.Option("--repair-encoding", help="Put right UTF-8 that was read as cp1252, in all fields.")
    ] = False,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Longest first prompt, in tokens.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Name or folder of the tokenizer that counts.")] = None,
    on_overlong: Annotated[OnOverlong, typer.Option(help="What to do with longer prompts.")] = OnOverlong.ERROR,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the summary and write nothing.")] = False,
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
    console = Console()
    watch = _progress(console)
    try:
        fraction = _val_fraction(val_fraction, split, val_inputs)
        read_as = ReadOptions(
            tuple(join or ()), repair_encoding, lambda name, found: watch(found, f"reading {name}", None)
        )
        read = read_files([*inputs, *(val_inputs or ())], read_as, first_of=len(inputs))
        refuse_uw(sum(report.uw_rows for report in read.reports), i_have_the_uw_agreement)
        plan = RowPlan(
            parse_mix(mix), rows, fraction, seed, profile, vanilla_attacker, read.second_part if val_inputs else None
        )
        screens = ScreenOptions(
            tuple(exclude_near_duplicates_of or ()), max_prompt_tokens, tokenizer, on_overlong is OnOverlong.EXCLUDE
        )
        prepared = conversion.prepare(read, plan, screens, read_as, watch)
        if not dry_run:
            options = _options(context)
            conversion.write(prepared, output, _command(options), options, watch)
    except ValueError as error:  # the package's own errors, each a sentence: input, mix, profile, output
        # One line: a newline in a file name must not make it look like something else.
        typer.echo("error: " + " ".join(str(error).split()), err=True)
        raise typer.Exit(2) from None
    _print_summary(console, prepared, plan, output, dry_run)


def _val_fraction(fraction: float | None, split: str | None, val_inputs: list[str] | None) -> float:
    given = {"--val-fraction": fraction is not None, "--split": split is not None, "--val-input": bool(val_inputs)}
    names = [name for name, is_given in given.items() if is_given]
    if len(names) > 1:
        raise AllocationError(f"{' and '.join(names)} contradict each other; give one of them.")
    if split is not None:
        return parse_split(split)
    return 0.1 if fraction is None else fraction


def _options(context: typer.Context) -> dict[str, Any]:
    """Every option by its name on the command line, as the user typed it."""
    names = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    return {names[name]: _plain(value) for name, value in sorted(context.params.items()) if name in names}


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def _command(options: dict[str, Any]) -> str:
    words = ["python", "data_prep/medec_to_parquet.py"]
    for name, value in options.items():
        if value is True:
            words.append(name)
        elif value is not None and value is not False:
            for item in value if isinstance(value, list) else [value]:
                words += [name, str(item)]
    return shlex.join(words)


def _progress(console: Console) -> conversion.Watch:
    """Shows a bar on a terminal for whatever takes more than a second."""

    def watch(stream: Iterable[Any], what: str, length: int | None) -> Iterator[Any]:
        bar = Progress(console=console, transient=True, disable=not console.is_terminal)
        task = bar.add_task(what, total=length)
        # A timer, because the first item alone may take long: a CSV is read whole before it.
        timer = threading.Timer(_SECONDS_WITHOUT_BAR, bar.start)
        timer.daemon = True
        timer.start()
        try:
            for done, item in enumerate(stream, start=1):
                yield item
                if done % _ITEMS_PER_UPDATE == 0:
                    bar.update(task, completed=done)
        finally:
            timer.cancel()
            timer.join()
            bar.stop()

    return watch


def _print_summary(console: Console, prepared: Prepared, plan: RowPlan, output: Path, dry_run: bool) -> None:
    read, games = prepared.read, prepared.games

    def say(line: str) -> None:
        # Text and no wrapping: brackets in a name are no markup, and a line can be searched for.
        console.print(Text(line), soft_wrap=True)

    console.print(_input_table(read))
    console.print(_type_table(read))
    console.print(_category_table(prepared))
    console.print(_exclusion_table(prepared))
    for report in read.reports:
        for text_id, reason in report.not_joined:
            say(f"not joined: {report.file}, {text_id}: {reason}")
    for pair in prepared.near_duplicates:
        found = f"near-duplicates across the splits: train {pair.train}, val {pair.val}"
        say(f"{found} (4-gram Jaccard {pair.similarity:.2f})")
    say(f"mix {format_mix(plan.mix)}, seed {plan.seed}, profile {plan.profile}")
    for split, rows in (("train", games.train), ("val", games.val)):
        labels = conversion.labels(games, split)
        written = f"{output / split}.parquet: {len(rows)} rows"
        say(f"{written}, presented notes {labels['harmful']} harmful, {labels['safe']} safe")
    say("nothing was written: --dry-run" if dry_run else f"{output / MANIFEST}: the account")


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
        "OpenRLHF rows joined with their case": lambda r: r.joined,
        "OpenRLHF rows not joined: no error type": lambda r: len(r.not_joined),
        "rows in which misread characters were put right": lambda r: r.repaired,
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


def _category_table(prepared: Prepared) -> Table:
    reports = prepared.games.reports
    table = Table(title="Rows (in brackets: vignettes that could serve)", title_justify="left")
    for heading in ("category", "presented note", *reports):
        table.add_column(heading, justify="left" if heading in ("category", "presented note") else "right")
    for category in next(iter(reports.values())).rows:
        cells = (f"{r.rows[category]} ({r.eligible[category]})" for r in reports.values())
        table.add_row(category.value, Category(category).default_target_label.value, *cells)
    table.add_section()
    table.add_row("total", "", *(str(sum(r.rows.values())) for r in reports.values()))
    return table


def _exclusion_table(prepared: Prepared) -> Table:
    """What gives no row, or not every row it could, and why; the manifest has the ids."""
    counts = {
        "records dropped: every field is empty": sum(r.dropped_empty for r in prepared.read.reports),
        **prepared.games.exclusions.counts(),
        "vignettes kept in one split because they share a note": prepared.games.sharing_a_note,
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
