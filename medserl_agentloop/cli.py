"""The ``medserl`` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from medserl_agentloop.play.cli import play

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Play games, look at runs, score games again.")
app.command()(play)


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="Folder of a run: its selfplay.records.")],
    game: Annotated[Optional[int], typer.Option(help="Line of games.jsonl to show, from 1.")] = None,  # noqa: UP045
) -> None:
    """Print one game as text and the role metrics of the first and last step."""
    from medserl_agentloop.report.terminal import show_run

    try:
        show_run(run, Console(), game=game)
    except ValueError as error:
        typer.echo(f"medserl: {error}", err=True)
        raise typer.Exit(2) from None
