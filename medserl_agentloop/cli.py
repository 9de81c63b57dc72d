"""The ``medserl`` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from medserl_agentloop.judges.cli import app as judge_app

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Look at self-play runs.")
app.add_typer(judge_app, name="judge")


@app.callback()
def _commands() -> None:
    """Look at self-play runs."""  # a callback keeps `medserl show` a subcommand while it is the only one


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
