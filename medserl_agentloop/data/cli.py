"""The ``medserl data`` commands and what they print. The scripts of ``data_prep`` are the same commands."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from medserl_agentloop.command_line import errors_in_one_line, plain, say
from medserl_agentloop.data.intake import ReadReport
from medserl_agentloop.data.reader import ReadResult, read_files
from medserl_agentloop.data.rows import (
    AS_GIVEN,
    DEFAULT_MIX,
    FIRST_INDEX,
    NOT_FOR_TRAINING,
    Exclusions,
    GameRows,
    RowPlan,
    build_eval_rows,
    build_rows,
    format_mix,
    labels_of,
    mix_of,
    parse_mix,
)
from medserl_agentloop.games.medical.types import VanillaAttacker
from medserl_agentloop.paths import MANIFEST, all_or_none, resource

if TYPE_CHECKING:
    from medserl_agentloop.data.verify import Report

SHOWN = 3  # ids in a line of the summary

app = typer.Typer(no_args_is_help=True, help="Make data files from MEDEC's notes, and check them.")

Profile = Annotated[str, Option(help="Prompt profile: a name, or the path of a folder.")]
UwAgreement = Annotated[
    bool,
    Option("--i-have-the-uw-agreement", help="Accept MEDEC-UW rows; you have signed its data use agreement."),
]
NotUw = Annotated[bool, Option("--not-medec-uw", help="State that no OpenRLHF row of unknown origin is from MEDEC-UW.")]
_INPUTS = "MEDEC's CSV, a .jsonl of pairs or OpenRLHF rows, or a data set: a folder or hf:NAME. Repeatable."
_INPUT_MEASURES: dict[str, Callable[[ReadReport], int]] = {
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


def script(command: Callable[..., None], **defaults: str) -> typer.Typer:
    """One of the commands as a program of its own, with other ``defaults`` for some options."""
    program = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    program.command(context_settings={"default_map": defaults})(command)
    return program


@app.command()
def convert(
    context: typer.Context,
    inputs: Annotated[list[str], Option("--input", help=_INPUTS)],
    output: Annotated[Path, Option(help="Folder for train.parquet, val.parquet and manifest.json.")],
    val_inputs: Annotated[
        list[str] | None, Option("--val-input", help="Input whose cases all go to the validation split.")
    ] = None,
    join: Annotated[
        list[Path] | None, Option(help="File to look up the cases of OpenRLHF rows in. Repeatable.")
    ] = None,
    mix: Annotated[
        str, Option(help=f"Share of each category, or {AS_GIVEN}: every row of an input that names categories.")
    ] = DEFAULT_MIX,
    rows: Annotated[int | None, Option(help="Rows of both splits; default: as many as the mix allows.")] = None,
    val_fraction: Annotated[float | None, Option(help="Share of cases for validation, 0 to 1; default 0.1.")] = None,
    seed: Annotated[int, Option(help="Seed of the split, the choice and the order.")] = 42,
    profile: Profile = "medserl",
    vanilla_attacker: Annotated[
        VanillaAttacker,
        Option(help="Whether the attacker copies the note in vanilla games, as the run's selfplay key says."),
    ] = VanillaAttacker.SKIP,
    exclude_near_duplicates_of: Annotated[
        list[Path] | None, Option(help="Leave out cases that are nearly the same as one of this file. Repeatable.")
    ] = None,
    repair_encoding: Annotated[
        bool, Option("--repair-encoding", help="Put right UTF-8 that was read as another encoding, in all fields.")
    ] = False,
    max_prompt_tokens: Annotated[int | None, Option(min=1, help="Longest first prompt, in tokens.")] = None,
    tokenizer: Annotated[str | None, Option(help="Name or folder of the tokenizer that counts.")] = None,
    on_overlong: Annotated[Literal["error", "exclude"], Option(help="What to do with longer prompts.")] = "error",
    dry_run: Annotated[bool, Option("--dry-run", help="Show the summary and write nothing.")] = False,
    i_have_the_uw_agreement: UwAgreement = False,
    not_medec_uw: NotUw = False,
) -> None:
    """Write training and validation rows for medical-error self-play.

    Rows are split by case, so that the two notes of a case are never on both sides.
    """
    from medserl_agentloop.data import conversion

    exclusions: Exclusions = defaultdict(list)
    with errors_in_one_line("error"):
        if val_inputs and val_fraction is not None:
            raise ValueError("--val-fraction and --val-input contradict each other; give one of them.")
        read = read_files([*inputs, *(val_inputs or ())], join=join or (), repair_encoding=repair_encoding)
        _refuse_uw(read, i_have_the_uw_agreement, not_medec_uw)
        vignettes = read.vignettes
        first = sum(r.pairs + r.clean_only + r.error_only for r in read.reports[: len(inputs)])
        val_ids = frozenset(vignette.vignette_id for vignette in vignettes[first:]) if val_inputs else None
        fraction = 0.1 if val_fraction is None else val_fraction
        given, keep_all = mix_of(vignettes), mix == AS_GIVEN
        if keep_all and (rows is not None or not given):
            why = "it keeps every row, so leave out --rows" if given else "no row of the input names its category"
            raise ValueError(f"--mix {AS_GIVEN}: {why}; or write shares such as {DEFAULT_MIX}.")
        shares = given if keep_all else parse_mix(mix)
        plan = RowPlan(shares, rows, keep_all, fraction, seed, profile, vanilla_attacker, val_ids)
        if exclude_near_duplicates_of:
            others = read_files(exclude_near_duplicates_of, join=join or (), repair_encoding=repair_encoding)
            vignettes = conversion.without_near_duplicates(vignettes, others.vignettes, exclusions)
        if max_prompt_tokens is not None:
            listed = exclusions if on_overlong == "exclude" else None
            vignettes = conversion.without_overlong(vignettes, plan, max_prompt_tokens, tokenizer, listed)
        try:
            games = build_rows(vignettes, plan, exclusions)
        except ValueError as error:
            hint = "" if keep_all or not given else f" Or give --mix {AS_GIVEN}: every row in its own category."
            if not (overlap := exclusions[NOT_FOR_TRAINING]):
                raise ValueError(f"{error}{hint}") from error
            raise ValueError(
                f"{len(overlap)} of the {first} cases of {', '.join(inputs)} share a note with a case of "
                f"{', '.join(val_inputs or ())} and cannot be trained on as well ({overlap[0][0]} is {overlap[0][1]}): "
                f"leave out --val-input, or give it a file of other cases."
                + (f" {error}" if len(overlap) < first else "")
            ) from error
        across_splits = conversion.near_duplicates(vignettes, games)
        if not dry_run:
            options = {p.opts[0]: context.params[p.name] for p in context.command.params if p.name in context.params}
            conversion.write(output, games, read.reports, across_splits, options)
    console = Console()
    _print_input(console, read.reports)
    _print_rows(console, games, plan)
    counts = {
        "records dropped: every field is empty": sum(report.dropped_empty for report in read.reports),
        **{reason: len(rows) for reason, rows in games.exclusions.items()},
        "vignettes kept in one split because they share a note": games.sharing_a_note,
    }
    _show_left_out(console, counts)
    for report in read.reports:
        for why in dict.fromkeys(why for _, why in report.not_joined):
            _say_some(console, f"not joined: {report.file}, {why}", [i for i, of in report.not_joined if of == why])
    similar = [f"train {p['train']}, val {p['val']} (4-gram Jaccard {p['similarity']:.2f})" for p in across_splits]
    if similar:
        _say_some(console, "warning: near-duplicates across the splits", similar)
    if games.no_validation:
        say(
            console,
            "warning: the input is too small for a validation split at this mix, so every case is for training and "
            "val.parquet has no rows; give more input or --val-input, or train with data.val_files=train.parquet",
        )
    available = sum(sum(split.eligible.values()) for split in games.reports.values())
    if given and mix == DEFAULT_MIX and rows is None and len(games.train) + len(games.val) < available:
        say(console, f"all {available} rows, each in the category that the input names: {_command(context)}")
    say(console, f"mix {format_mix(plan.mix)}, seed {seed}, profile {profile}")
    for name, written in (("train", games.train), ("val", games.val)):
        of = labels_of(written)
        labels = f"presented notes {of['harmful']} harmful, {of['safe']} safe"
        say(console, f"{output / name}.parquet: {len(written)} rows, {labels}")
    say(console, "nothing was written: --dry-run" if dry_run else f"{output / MANIFEST}: the account")


@app.command()
def verify(
    files: Annotated[list[Path], Argument(help="Parquet files that are used together.")],
    tokenizer: Annotated[
        str | None, Option(help="Folder of the model's tokenizer; default: the tiny player's, if it is installed.")
    ] = None,
    max_prompt_tokens: Annotated[
        int | None, Option(min=1, help="The run's data.max_prompt_length; default: lengths are only shown.")
    ] = None,
    profile: Annotated[
        str | None, Option(help="Prompt profile the files were written with; default: what their manifest says.")
    ] = None,
    vanilla_attacker: Annotated[
        VanillaAttacker | None, Option(help="What they were written with; default: what their manifest says.")
    ] = None,
) -> None:
    """Check that files can be trained on: opened by verl, every row complete, playable and free of leaks.

    The exit code is 0 if every check holds, 1 if one fails, 2 if a file, the tokenizer or the profile cannot be read.
    """
    from medserl_agentloop.data.conversion import load_tokenizer
    from medserl_agentloop.data.verify import verify_files

    with errors_in_one_line("error"):
        report = verify_files(
            files,
            load_tokenizer(tokenizer or str(resource("assets/tiny_player"))),
            profile=profile,
            vanilla_attacker=vanilla_attacker,
            max_prompt_tokens=max_prompt_tokens,
        )
    _print_report(Console(), report)
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def sft(
    output: Annotated[Path, Option(help="Folder for sft_train.parquet and sft_val.parquet.")],
    inputs: Annotated[list[Path], Option("--input", help="MEDEC's CSV or a .jsonl of pairs. Repeatable.")] = [],  # noqa: B006
    from_games: Annotated[
        list[Path],
        Option(help="Games that a model played (medserl play, or a run): its right turns in place of templates."),
    ] = [],  # noqa: B006
    rest_of: Annotated[
        Path | None,
        Option(help="A file for self-play, of which the cases that are not taught go to selfplay_train.parquet."),
    ] = None,
    val_fraction: Annotated[float, Option(help="Share of vignettes for validation, 0 to 1.")] = 0.1,
    seed: Annotated[int, Option(help="Seed of the split and the order.")] = 42,
    profile: Profile = "medserl",
    splits_of: Annotated[
        Path | None, Option(help="Folder written by medec_to_parquet.py: every case keeps the split it has there.")
    ] = None,
    i_have_the_uw_agreement: UwAgreement = False,
    not_medec_uw: NotUw = False,
) -> None:
    """Write conversations to imitate: an attack, and an assessment of either note, for every pair of --input.

    With --from-games they are a model's own turns instead, those that were valid, readable and right.

    What self-play validates on must not be taught here. With the same input, --val-fraction and --seed,
    medec_to_parquet.py puts a case on the same side; if it was told to leave cases out, or given files
    for validation, give its folder with --splits-of.
    """
    import pyarrow.parquet as pq

    from medserl_agentloop.core.step_file import GAMES_FILE
    from medserl_agentloop.data.conversion import write_parquet
    from medserl_agentloop.data.sft import SFT_SCHEMA, build_sft_rows, read_splits, rows_for_self_play, rows_of_games
    from medserl_agentloop.games.medical.records import read_games

    with errors_in_one_line("error"):
        if bool(inputs) == bool(from_games):
            raise ValueError("give --input, for answers from templates, or --from-games, for a model's own; not both.")
        if from_games:
            if splits_of is not None:
                raise ValueError("--splits-of belongs to --input; with --from-games, use --rest-of.")
            paths = [path / GAMES_FILE if path.is_dir() else path for path in from_games]
            games = (game for path in paths for game in read_games(path))
            made = rows_of_games(games, val_fraction=val_fraction, seed=seed)
        else:
            read = read_files(inputs)
            _refuse_uw(read, i_have_the_uw_agreement, not_medec_uw)
            split_of = read_splits(splits_of) if splits_of else None
            made = build_sft_rows(
                read.vignettes, val_fraction=val_fraction, seed=seed, profile=profile, split_of=split_of
            )
        files = {"sft_train.parquet": made.train, "sft_val.parquet": made.val}
        rest = rows_for_self_play(rest_of, made.train + made.val) if rest_of is not None else None
        with all_or_none(output) as place:
            for name, rows in files.items():
                write_parquet(rows, place / name, SFT_SCHEMA)
            if rest is not None:
                pq.write_table(rest, place / "selfplay_train.parquet")
    console = Console()
    train, val = (Counter((row["game_role"], row["category"]) for row in rows) for rows in files.values())
    lessons = [[*lesson, train[lesson], val[lesson]] for lesson in sorted(train | val)]
    _show(console, "Conversations", ["role", "game"], ["train", "val"], lessons)
    if made.left_out:
        _show_left_out(console, dict(sorted(made.left_out.items())))
    for name, rows in files.items():
        say(console, f"{output / name}: {len(rows)} conversations")
    if rest is not None:
        say(console, f"{output / 'selfplay_train.parquet'}: {rest.num_rows} rows of the cases that are not taught")


@app.command("eval")
def evaluation_rows(
    inputs: Annotated[list[Path], Option("--input", help="MEDEC's CSV. Repeatable.")],
    output: Annotated[Path, Option(help="Parquet file to write.")],
    profile: Profile = "medserl",
    name: Annotated[
        str, Option(help="What the metrics call the set, e.g. panel; by default each note's collection.")
    ] = "",
    first_index: Annotated[
        int, Option(min=0, help="Index of the first row; indices of files used together must differ.")
    ] = FIRST_INDEX,
    i_have_the_uw_agreement: UwAgreement = False,
) -> None:
    """Write every row of an official set as a single assessor turn; nothing is stripped or left out."""
    from medserl_agentloop.data.conversion import write_parquet

    with errors_in_one_line("error"):
        if output.suffix != ".parquet":
            raise ValueError(f"{output}: verl reads files that end in .parquet; give such a name.")
        rows, read = build_eval_rows(inputs, profile=profile, first_index=first_index, name=name)
        _refuse_uw(read, i_have_the_uw_agreement)
        with all_or_none(output.parent) as place:
            write_parquet(rows, place / output.name)
    console, sources = Console(), Counter(row["data_source"] for row in rows)
    _show(console, "Rows", ["data_source"], ["rows"], sorted(sources.items()))
    dropped = sum(report.dropped_empty for report in read.reports)
    say(console, f"{output}: {len(rows)} rows; {dropped} empty records dropped")


def _command(context: typer.Context) -> str:
    """The command of this call, with the mix that keeps every row."""
    words = ["medserl", "data", "convert"]
    for option in context.command.params:
        name, value = option.name or "", context.params.get(option.name or "")
        if name != "mix" and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE":
            for each in value if isinstance(value, list | tuple) else [value]:
                words += [option.opts[0]] if each is True else [option.opts[0], str(getattr(each, "value", each))]
    return shlex.join([*words, "--mix", AS_GIVEN])


def _refuse_uw(read: ReadResult, agreed: bool, not_uw: bool = False) -> None:
    rows, unknown = (sum(getattr(r, name) for r in read.reports) for name in ("uw_rows", "unknown_origin"))
    if rows and not agreed:
        raise ValueError(
            f"the input has {rows} MEDEC-UW rows, which may be used only under a signed agreement; "
            "if you have signed it, add --i-have-the-uw-agreement."
        )
    if unknown and not (agreed or not_uw):
        files = ", ".join(report.file for report in read.reports if report.unknown_origin)
        raise ValueError(
            f"{files}: {unknown} rows without an id, and neither a name (ms, uw) nor --join says which collection they "
            "are from; add --not-medec-uw if none is from MEDEC-UW, or --i-have-the-uw-agreement if you have signed it."
        )


def _print_input(console: Console, reports: Sequence[ReadReport]) -> None:
    measured = ([name, *map(measure, reports)] for name, measure in _INPUT_MEASURES.items())
    _show(console, "Input", [""], [report.file for report in reports], measured)
    types = sum((Counter(report.error_types) for report in reports), Counter[str]())
    _show(console, "Error types", ["type"], ["vignettes"], types.most_common())


def _print_rows(console: Console, games: GameRows, plan: RowPlan) -> None:
    splits = games.reports.values()
    rows: list[list[Any]] = [
        [category.value, category.default_target_label.value]
        + [f"{split.rows[category]} ({split.eligible[category]})" for split in splits]
        for category in plan.mix
    ]
    total = ["total", "", *(sum(split.rows.values()) for split in splits)]
    title = "Rows (in brackets: vignettes that could serve)"
    _show(console, title, ["category", "presented note"], games.reports, rows, total)


def _print_report(console: Console, report: Report) -> None:
    """Problems in words, files, checks."""
    from medserl_agentloop.data.verify import Check

    for problem in report.problems:
        say(console, f"{'warning' if problem.warning else 'failed'}: {problem}")
    shown = sum(1 for problem in report.problems if not problem.warning)
    if hidden := sum(report.failures.values()) - shown:
        say(console, f"and {hidden} more failures of the same kinds")
    files = ([f.file, f.rows, f.labels["harmful"], f.labels["safe"], f.longest_prompt] for f in report.files)
    _show(console, "Files", ["file"], ["rows", "harmful", "safe", "longest prompt, tokens"], files)
    results = []
    for check in Check:
        counts = {"failed": report.failures[check], "warnings": report.warnings[check]}
        why = report.unchecked.get(check)
        result = [f"{name}: {n}" for name, n in counts.items() if n] or ([] if why else ["holds"])
        results.append([check.value, ", ".join([*result, *([f"not checked: {why}"] if why else [])])])
    _show(console, "Checks", ["check", "result"], [], results)


def _say_some(console: Console, what: str, items: Sequence[str]) -> None:
    """How many there are, and the first of them; the manifest has all."""
    more = ", ..." if len(items) > SHOWN else ""
    say(console, f"{what} ({len(items)}): {', '.join(items[:SHOWN])}{more}")


def _show(
    console: Console,
    title: str,
    words: Iterable[str],
    numbers: Iterable[str],
    rows: Iterable[Sequence[Any]],
    total: Sequence[Any] = (),
) -> None:
    """Prints a table with columns of words, then columns of numbers."""
    table = Table(title=title, title_justify="left")
    for heading in words:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(Text(heading), justify="right", overflow="fold")
    for row in rows:
        table.add_row(*(plain(str(cell)) for cell in row))
    if total:
        table.add_section()
        table.add_row(*map(str, total))
    console.print(table)


def _show_left_out(console: Console, counts: Mapping[str, int]) -> None:
    """What gives no row, or not every row it could, and why; the manifest has the ids."""
    _show(console, "Left out", ["what and why"], ["count"], [item for item in counts.items() if item[1]])
