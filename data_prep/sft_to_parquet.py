"""MEDEC pairs -> ``sft_train.parquet`` and ``sft_val.parquet``, a warm start for both roles with verl's SFT trainer.

Run from the command line: ``python data_prep/sft_to_parquet.py --help``.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

from installed import or_say_how_to_install

with or_say_how_to_install():
    import typer
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from medserl_agentloop.data.reader import read_files, refuse_uw
    from medserl_agentloop.data.sft import SFT_SCHEMA, SftRows, build_sft_rows, read_splits
    from medserl_agentloop.data.writing import all_or_none, write_parquet

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    inputs: Annotated[
        list[Path], typer.Option("--input", help="MEDEC's CSV or a .jsonl of pairs; give it again for more files.")
    ],
    output: Annotated[Path, typer.Option(help="Folder for sft_train.parquet and sft_val.parquet.")],
    val_fraction: Annotated[float, typer.Option(help="Share of vignettes for validation, 0 to 1.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of the split and the order.")] = 42,
    profile: Annotated[str, typer.Option(help="Prompt profile: a name, or the path of a folder.")] = "medserl",
    splits_of: Annotated[
        Path | None,
        typer.Option(help="Folder written by medec_to_parquet.py: every case keeps the split it has there."),
    ] = None,
    i_have_the_uw_agreement: Annotated[
        bool,
        typer.Option("--i-have-the-uw-agreement", help="Accept MEDEC-UW rows; you have signed its data use agreement."),
    ] = False,
) -> None:
    """Write conversations to imitate: an attack, and an assessment of either note, for every pair.

    What self-play validates on must not be taught here. With the same input, --val-fraction and --seed,
    medec_to_parquet.py puts a case on the same side; if it was told to leave cases out, or given files
    for validation, give its folder with --splits-of.
    """
    try:
        read = read_files(inputs)
        refuse_uw(sum(report.uw_rows for report in read.reports), i_have_the_uw_agreement)
        made = build_sft_rows(
            read.vignettes,
            val_fraction=val_fraction,
            seed=seed,
            profile=profile,
            split_of=read_splits(splits_of) if splits_of else None,
        )
        files = {"sft_train.parquet": made.train, "sft_val.parquet": made.val}
        with all_or_none(output) as place:
            for name, rows in files.items():
                write_parquet(rows, place / name, SFT_SCHEMA)
    except ValueError as error:
        typer.echo("error: " + " ".join(str(error).split()), err=True)
        raise typer.Exit(2) from None
    _print_summary(made)
    for name, rows in files.items():
        Console().print(Text(f"{output / name}: {len(rows)} conversations"), soft_wrap=True)


def _print_summary(made: SftRows) -> None:
    console = Console()
    table = Table(title="Conversations", title_justify="left")
    for heading in ("role", "game", "train", "val"):
        table.add_column(heading, justify="right" if heading in ("train", "val") else "left")
    counts = [Counter((row["game_role"], row["category"]) for row in rows) for rows in (made.train, made.val)]
    for role, category in sorted(counts[0] | counts[1]):
        table.add_row(role, category, *(str(count[role, category]) for count in counts))
    console.print(table)
    if made.left_out:
        table = Table(title="Left out", title_justify="left")
        table.add_column("what and why")
        table.add_column("count", justify="right")
        for reason, count in sorted(made.left_out.items()):
            table.add_row(Text(reason), str(count))
        console.print(table)


if __name__ == "__main__":
    app()
