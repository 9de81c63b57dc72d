"""An official MEDEC set -> one parquet file of assessor turns, for validation during training.

Every row of the CSV becomes one row, its note exactly as published. Run from the command line:
``python data_prep/medec_eval_to_parquet.py --help``.
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

    from medserl_agentloop.data.eval_rows import FIRST_INDEX, build_eval_rows
    from medserl_agentloop.data.reader import refuse_uw
    from medserl_agentloop.data.writing import all_or_none, write_parquet
    from medserl_agentloop.games.medical.types import EVAL_SPLIT

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    inputs: Annotated[list[Path], typer.Option("--input", help="MEDEC's CSV; give it again for more files.")],
    output: Annotated[Path, typer.Option(help="Parquet file to write.")],
    profile: Annotated[str, typer.Option(help="Prompt profile: a name, or the path of a folder.")] = "medserl",
    split: Annotated[str, typer.Option(help="What extra_info.split says.")] = EVAL_SPLIT,
    first_index: Annotated[
        int, typer.Option(min=0, help="Index of the first row; indices of files used together must differ.")
    ] = FIRST_INDEX,
    i_have_the_uw_agreement: Annotated[
        bool,
        typer.Option("--i-have-the-uw-agreement", help="Accept MEDEC-UW rows; you have signed its data use agreement."),
    ] = False,
) -> None:
    """Write every row of an official set as a single assessor turn; nothing is stripped or left out."""
    try:
        if output.suffix != ".parquet":
            raise ValueError(f"{output}: verl reads files that end in .parquet; give such a name.")
        made = build_eval_rows(inputs, profile=profile, first_index=first_index, split=split)
        refuse_uw(sum(row["extra_info"]["subset"] == "medec_uw" for row in made.rows), i_have_the_uw_agreement)
        with all_or_none(output.parent) as place:
            write_parquet(made.rows, place / output.name)
    except ValueError as error:
        typer.echo("error: " + " ".join(str(error).split()), err=True)
        raise typer.Exit(2) from None
    table = Table(title="Rows", title_justify="left")
    table.add_column("data_source")
    table.add_column("rows", justify="right")
    for name, count in sorted(Counter(row["data_source"] for row in made.rows).items()):
        table.add_row(Text(name), str(count))
    console = Console()
    console.print(table)
    console.print(Text(f"{output}: {len(made.rows)} rows; {made.dropped_empty} empty records dropped"), soft_wrap=True)


if __name__ == "__main__":
    app()
