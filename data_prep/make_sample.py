"""Write notes of the toy clinic in MEDEC's format, by default the committed sample once more.

Their facts are simplified for a game and are NOT medical advice.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

HERE = Path(__file__).parent
sys.path.insert(
    0, str(HERE.parent)
)  # experiments/ is in the checkout and not in the installed package

from experiments.clinic import Split  # noqa: E402
from experiments.clinic_sample import CASES, SEED, write_sample  # noqa: E402
from medserl_agentloop.data.cases import NEAR_DUPLICATE  # noqa: E402
from medserl_agentloop.terminal import errors_in_one_line  # noqa: E402

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
