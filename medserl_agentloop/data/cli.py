"""The ``medserl data`` commands. The scripts of ``data_prep`` are the same commands under names of their own."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from medserl_agentloop.data.allocation import DEFAULT_MIX, AllocationError, parse_mix, parse_split
from medserl_agentloop.data.eval_rows import FIRST_INDEX, build_eval_rows
from medserl_agentloop.data.reader import ReadOptions, read_files, refuse_uw
from medserl_agentloop.data.rows import RowPlan
from medserl_agentloop.data.sample import NEAR_DUPLICATE, SEED, VIGNETTES, write_sample
from medserl_agentloop.games.medical.clinic import Split
from medserl_agentloop.games.medical.types import EVAL_SPLIT, VanillaAttacker

app = typer.Typer(no_args_is_help=True, help="Make training and evaluation files from MEDEC's notes, and check them.")

Profile = Annotated[str, typer.Option(help="Prompt profile: a name, or the path of a folder.")]
UwAgreement = Annotated[
    bool,
    typer.Option("--i-have-the-uw-agreement", help="Accept MEDEC-UW rows; you have signed its data use agreement."),
]
_INPUTS = "MEDEC's CSV, a .jsonl of pairs or OpenRLHF rows, or a data set: a folder or hf:NAME. Repeatable."
_SECONDS_WITHOUT_BAR = 1.0
_ITEMS_PER_UPDATE = 50


class OnOverlong(str, Enum):
    """What to do with prompts that are too long."""

    ERROR = "error"
    EXCLUDE = "exclude"


def script(command: Callable[..., None], **defaults: str) -> typer.Typer:
    """One of the commands as a program of its own, with other ``defaults`` for some options."""
    program = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    program.command(context_settings={"default_map": defaults})(command)
    return program


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """Ends the program with exit code 2 and one line for the package's own errors, each of which is a sentence."""
    try:
        yield
    except ValueError as error:
        # A newline in a file name must not make it look like something else.
        typer.echo("error: " + " ".join(str(error).split()), err=True)
        raise typer.Exit(2) from None


@app.command()
def convert(
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
        int | None, typer.Option(help="Rows of both splits together; default: as many as the mix allows.")
    ] = None,
    val_fraction: Annotated[
        float | None, typer.Option(help="Share of cases for validation, 0 to 1; default 0.1.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="The same as fractions: train=0.9,val=0.1.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the split, the choice and the order.")] = 42,
    profile: Profile = "medserl",
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
    i_have_the_uw_agreement: UwAgreement = False,
) -> None:
    """Write training and validation rows for medical-error self-play.

    Rows are split by case, so that the two notes of a case are never on both sides.
    """
    from medserl_agentloop.data import conversion
    from medserl_agentloop.data.summaries import print_conversion

    console, exclude_overlong = Console(), on_overlong is OnOverlong.EXCLUDE
    with _errors_in_one_line():
        fraction = _val_fraction(val_fraction, split, val_inputs)
        read_as = ReadOptions(tuple(join or ()), repair_encoding)
        read = read_files([*inputs, *(val_inputs or ())], read_as)
        refuse_uw(sum(report.uw_rows for report in read.reports), i_have_the_uw_agreement)
        val_from = sum(report.cases for report in read.reports[: len(inputs)]) if val_inputs else None
        plan = RowPlan(parse_mix(mix), rows, fraction, seed, profile, vanilla_attacker, val_from)
        screens = []
        if exclude_near_duplicates_of:
            screens.append(conversion.near_duplicates_of(read_files(exclude_near_duplicates_of, read_as).vignettes))
        if max_prompt_tokens is not None:
            screens.append(conversion.prompt_length(max_prompt_tokens, exclude_overlong, tokenizer, plan))
        prepared = conversion.prepare(read, plan, screens, exclude_overlong, _progress(console))
        if not dry_run:
            options = _options(context)
            conversion.write(prepared, output, _command_line(context, options), options)
    print_conversion(console, prepared, plan, output, dry_run)


@app.command()
def verify(
    files: Annotated[list[Path], typer.Argument(help="Parquet files that are used together.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Folder of the model's tokenizer; default: the tiny player's, if it is installed."),
    ] = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="The run's data.max_prompt_length; default: lengths are only shown.")
    ] = None,
    profile: Annotated[str, typer.Option(help="Prompt profile the files were written with.")] = "medserl",
    vanilla_attacker: Annotated[
        VanillaAttacker, typer.Option(help="What the files were written with.")
    ] = VanillaAttacker.SKIP,
) -> None:
    """Check that files can be trained on: opened by verl, every row complete, playable and free of leaks.

    The exit code is 0 if every check holds, 1 if one fails, 2 if a file, the tokenizer or the profile cannot be read.
    """
    from medserl_agentloop.data.summaries import print_report
    from medserl_agentloop.data.verify import count_rows, load_tokenizer, verify_files

    with _errors_in_one_line(), Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("checking rows", total=count_rows(files))
        report = verify_files(
            files,
            load_tokenizer(tokenizer),
            profile=profile,
            vanilla_attacker=vanilla_attacker,
            max_prompt_tokens=max_prompt_tokens,
            on_row=lambda: progress.advance(task),
        )
    print_report(Console(), report)
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def sft(
    inputs: Annotated[
        list[Path], typer.Option("--input", help="MEDEC's CSV or a .jsonl of pairs; give it again for more files.")
    ],
    output: Annotated[Path, typer.Option(help="Folder for sft_train.parquet and sft_val.parquet.")],
    val_fraction: Annotated[float, typer.Option(help="Share of vignettes for validation, 0 to 1.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of the split and the order.")] = 42,
    profile: Profile = "medserl",
    splits_of: Annotated[
        Path | None,
        typer.Option(help="Folder written by medec_to_parquet.py: every case keeps the split it has there."),
    ] = None,
    i_have_the_uw_agreement: UwAgreement = False,
) -> None:
    """Write conversations to imitate: an attack, and an assessment of either note, for every pair.

    What self-play validates on must not be taught here. With the same input, --val-fraction and --seed,
    medec_to_parquet.py puts a case on the same side; if it was told to leave cases out, or given files
    for validation, give its folder with --splits-of.
    """
    from medserl_agentloop.data.sft import SFT_SCHEMA, build_sft_rows, read_splits
    from medserl_agentloop.data.summaries import print_conversations
    from medserl_agentloop.data.writing import all_or_none, write_parquet

    with _errors_in_one_line():
        read = read_files(inputs)
        refuse_uw(sum(report.uw_rows for report in read.reports), i_have_the_uw_agreement)
        split_of = read_splits(splits_of) if splits_of else None
        made = build_sft_rows(read.vignettes, val_fraction=val_fraction, seed=seed, profile=profile, split_of=split_of)
        files = {"sft_train.parquet": made.train, "sft_val.parquet": made.val}
        with all_or_none(output) as place:
            for name, rows in files.items():
                write_parquet(rows, place / name, SFT_SCHEMA)
    print_conversations(Console(), made, output, {name: len(rows) for name, rows in files.items()})


@app.command("eval")
def evaluation_rows(
    inputs: Annotated[list[Path], typer.Option("--input", help="MEDEC's CSV; give it again for more files.")],
    output: Annotated[Path, typer.Option(help="Parquet file to write.")],
    profile: Profile = "medserl",
    split: Annotated[str, typer.Option(help="What extra_info.split says.")] = EVAL_SPLIT,
    first_index: Annotated[
        int, typer.Option(min=0, help="Index of the first row; indices of files used together must differ.")
    ] = FIRST_INDEX,
    i_have_the_uw_agreement: UwAgreement = False,
) -> None:
    """Write every row of an official set as a single assessor turn; nothing is stripped or left out."""
    from medserl_agentloop.data.summaries import print_eval_rows
    from medserl_agentloop.data.writing import all_or_none, write_parquet

    with _errors_in_one_line():
        if output.suffix != ".parquet":
            raise ValueError(f"{output}: verl reads files that end in .parquet; give such a name.")
        made = build_eval_rows(inputs, profile=profile, first_index=first_index, split=split)
        refuse_uw(sum(row["extra_info"]["subset"] == "medec_uw" for row in made.rows), i_have_the_uw_agreement)
        with all_or_none(output.parent) as place:
            write_parquet(made.rows, place / output.name)
    print_eval_rows(Console(), made, output)


@app.command()
def sample(
    output: Annotated[Path, typer.Option(help="CSV file to write.")],
    vignettes: Annotated[int, typer.Option(help="Number of distinct cases.")] = VIGNETTES,
    seed: Annotated[int, typer.Option(help="Seed of all choices.")] = SEED,
    split: Annotated[Split, typer.Option(help="Wordings and facts to use.")] = Split.ANY,
    overlap: Annotated[
        float, typer.Option(help="Share of 4-grams from which on two notes are too much alike; 1 allows any.")
    ] = NEAR_DUPLICATE,
) -> None:
    """Write notes of the toy clinic in MEDEC's format. Their facts are simplified and are NOT medical advice."""
    with _errors_in_one_line():
        rows = write_sample(output, vignettes, seed, split=split, overlap=overlap)
    typer.echo(f"{output}: {rows} rows of {vignettes} vignettes")


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
    return {names[name]: value for name, value in sorted(context.params.items()) if name in names}


def _command_line(context: typer.Context, options: dict[str, Any]) -> str:
    """The command for the manifest: the script's, or that of ``medserl``."""
    words = ["medserl", "data", "convert"] if context.parent else ["python", "data_prep/medec_to_parquet.py"]
    for name, value in options.items():
        if value is True:
            words.append(name)
        elif value is not None and value is not False:
            for item in value if isinstance(value, (list, tuple)) else [value]:
                words += [name, str(item.value if isinstance(item, Enum) else item)]
    return shlex.join(words)


def _progress(console: Console) -> Callable[[Iterable[Any], str, int | None], Iterator[Any]]:
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
