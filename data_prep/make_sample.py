"""Write notes of the toy clinic in MEDEC's format, by default the committed sample once more.

Their facts are simplified for a game and are NOT medical advice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from medserl_agentloop.data.cases import NEAR_DUPLICATE
from medserl_agentloop.data.sample import CASES, SEED, write_sample
from medserl_agentloop.games.clinic import Split
from medserl_agentloop.terminal import errors_in_one_line

HERE = Path(__file__).parent

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def sample(
    output: Annotated[Path, Option(help="CSV file to write.")] = HERE
    / "sample"
    / "medserl_sample.csv",
    cases: Annotated[int, Option(help="Number of distinct cases.")] = CASES,
    seed: Annotated[int, Option(help="Seed of all choices.")] = SEED,
    split: Annotated[Split, Option(help="Wordings and facts to use.")] = Split.ANY,
    overlap: Annotated[
        float,
        Option(help="Share of 4-grams from which on two notes are too much alike; 1 allows any."),
    ] = NEAR_DUPLICATE,
) -> None:
    """Write notes of the toy clinic in MEDEC's format.

    Their facts are simplified and are NOT medical advice.
    """
    with errors_in_one_line("error"):
        rows = write_sample(output, cases=cases, seed=seed, split=split, overlap=overlap)
    typer.echo(f"{output}: {rows} rows of {cases} cases")


if __name__ == "__main__":
    app()
