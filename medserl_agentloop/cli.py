"""The ``medserl`` command."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Annotated, Literal, Optional

import typer
from rich.console import Console

from medserl_agentloop.command_line import errors_in_one_line
from medserl_agentloop.data.cli import app as data_app
from medserl_agentloop.evaluation.cli import evaluate, score
from medserl_agentloop.evaluation.judge_cli import app as judge_app
from medserl_agentloop.evaluation.probe import probe
from medserl_agentloop.evaluation.rescoring import rescore
from medserl_agentloop.play.cli import play

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # they may hold API keys
    help="Play games, look at runs, score predictions on MEDEC.",
)
app.command()(play)
app.command()(probe)
app.command()(evaluate)
app.command()(score)
app.command()(rescore)
app.add_typer(judge_app, name="judge")
app.add_typer(data_app, name="data")


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="Folder of a run: its selfplay.records.")],
    game: Annotated[Optional[int], typer.Option(help="Line of games.jsonl to show, from 1.")] = None,  # noqa: UP045
) -> None:
    """Print one game as text and the role metrics of the first and last step."""
    from medserl_agentloop.report.terminal import show_run

    with errors_in_one_line():
        show_run(run, Console(), game=game)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs: their selfplay.records.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
) -> None:
    """Write the games of one or several runs as a page for the browser, in one file that needs no network."""
    from medserl_agentloop.report.page import write_page

    with errors_in_one_line():
        games = write_page(runs, output, Console(stderr=True))
    typer.echo(f"{games} games: {output}")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run: its selfplay.records.")],
    to: Annotated[
        Literal["inspect", "dataset"],
        typer.Option(help="A log for Inspect's viewer, or a Hugging Face dataset folder."),
    ],
    output: Annotated[Optional[Path], typer.Option("--output", "-o", help="The log, or the folder.")] = None,  # noqa: UP045
) -> None:
    """Write the games of a run for another tool."""
    from medserl_agentloop.report.export import export_run

    with errors_in_one_line():
        typer.echo(str(export_run(run, to, output)))


@app.command("wandb-workspace")
def wandb_workspace(
    project: Annotated[str, typer.Argument(help="entity/project, in Weights & Biases.")],
) -> None:
    """Save a workspace with the panels to look at first to a project in Weights & Biases."""
    from medserl_agentloop.report.wandb_workspace import save_workspace

    with errors_in_one_line():
        typer.echo(save_workspace(project))


@app.command(context_settings={"ignore_unknown_options": True})
def certify(
    recipe: Annotated[str, typer.Argument(help="Recipe of the run, e.g. quickstart.")],
    overrides: Annotated[Optional[list[str]], typer.Argument(help="Overrides, as for verl's main_ppo.")] = None,  # noqa: UP045
) -> None:
    """Measure isolation, credit and loss of a run on its own workers, without training."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo", f"+recipes={recipe}", *(overrides or [])]
    command.append("selfplay.certify=only")
    last: deque[str] = deque(maxlen=40)
    certified = False
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            last.append(line)
            _, own, text = line.partition("[medserl] ")
            if own:
                typer.echo(own + text.rstrip())
            certified |= text.startswith("certificate: ")
    if run.returncode and not certified:
        typer.echo("".join(last), err=True)
    raise typer.Exit(1 if run.returncode else 0)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a line of a games file."""
    import json

    from medserl_agentloop.games.medical.records import record_schema

    typer.echo(json.dumps(record_schema(), indent=2))
