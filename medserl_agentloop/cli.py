"""The ``medserl`` command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from omegaconf import OmegaConf
from rich import box
from rich.console import Console
from rich.text import Text

from medserl_agentloop.data.cli import app as data_app
from medserl_agentloop.evaluation.evaluate import evaluate
from medserl_agentloop.evaluation.judge_calibration import app as judge_app
from medserl_agentloop.evaluation.play import play
from medserl_agentloop.evaluation.score import score
from medserl_agentloop.evaluation.tournament import progress, tournament
from medserl_agentloop.medical_team.remote_judge import serve
from medserl_agentloop.terminal import errors_in_one_line, plain, table
from medserl_agentloop.tools.plan import plan
from medserl_agentloop.tools.quickstart import quickstart

_SIDE = "Folder of one or several runs, a log of the OpenRLHF system (.jsonl), or a quoted pattern."


def show(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="Folder of a run (its selfplay.records), or a file of game records; without one, "
            "the runs below runs/ are listed."
        ),
    ] = None,
    game: Annotated[int | None, typer.Option(help="Its line in the file, counted from 1.")] = None,
) -> None:
    """Print a game and the metrics of a run, or list all runs."""
    from medserl_agentloop.report import list_runs, show_run

    with errors_in_one_line():
        if run is None:
            list_runs(Path("runs"), Console())
        else:
            show_run(run, Console(), number=game)


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs: their selfplay.records.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="By default report.html in the run.")
    ] = None,
) -> None:
    """Write the games of runs as one HTML page."""
    from medserl_agentloop.report.page import write_page

    page = output or (runs[0] if runs[0].is_dir() else runs[0].parent) / "report.html"
    with errors_in_one_line():
        typer.echo(f"{write_page(runs, page, Console(stderr=True))} games: {page}")


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help=_SIDE)],
    b: Annotated[str, typer.Argument(metavar="B", help="Run to compare it with.")],
    steps: Annotated[
        tuple[int, int] | None, typer.Option(help="First and last step of the games to compare.")
    ] = None,
) -> None:
    """Compare two runs in Markdown and say what differs."""
    from medserl_agentloop.report import compare as comparison

    with errors_in_one_line():
        sides = (comparison.read_side(side, steps) for side in (a, b))
        sections, verdict = comparison.compare(*sides)
    # A file has no edge at which to break lines.
    console = Console(width=None if sys.stdout.isatty() else 1000)
    for title, columns, rows, note in sections:
        cells = [[cell.replace("|", r"\|") for cell in row] for row in rows]
        console.print(f"## {title}", table("", columns, cells, box=box.MARKDOWN), plain(note), "")
    console.print(plain(verdict), soft_wrap=True)


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run (its trainer.default_local_dir).")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="New folder; else RUN/export/STEP.")
    ] = None,
    step: Annotated[
        str, typer.Option(help="best (by validation), newest, or the number of a step.")
    ] = "best",
    role: Annotated[
        str, typer.Option(help="Whose adapter is merged, in a run with an adapter for each role.")
    ] = "assessor",
) -> None:
    """Write a checkpoint as a Hugging Face folder, with a model card."""
    from medserl_agentloop.core.step_file import choose

    with errors_in_one_line():
        checkpoint = choose(run, step)
        target = output or run / "export" / f"step_{checkpoint.step}"
        if target.exists() and any(target.iterdir()):
            raise ValueError(f"{target} is not empty: name a new folder with --output")
        from medserl_agentloop.evaluation import local_models  # loads verl

        local_models.export(run, checkpoint, target, role)
    typer.echo(f"{checkpoint}: {target}")


def doctor(
    recipe: Annotated[
        str | None, typer.Argument(help="Recipe of a run; without one, only the machine.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides, as for verl's main_ppo.")
    ] = None,
    config: Annotated[
        bool, typer.Option("--config", help="Print the run's selfplay node, with its defaults.")
    ] = False,
    compile_: Annotated[
        bool, typer.Option("--compile", help="Compile what the first start would; takes minutes.")
    ] = False,
) -> None:
    """Check whether a run can start and keep running on this machine.

    Every problem comes with a remedy. The exit code is 1 if one blocks the run.
    """
    from medserl_agentloop.core.config import SelfPlayConfig
    from medserl_agentloop.core.run_check import compose_recipe
    from medserl_agentloop.tools.doctor import diagnose

    console, failed = Console(), False
    with errors_in_one_line():
        composed, schema = compose_recipe(recipe, overrides or []) if recipe else (None, None)
        if config and composed is not None:
            node = OmegaConf.create(SelfPlayConfig.from_run(composed).model_dump(mode="json"))
            console.print(plain(OmegaConf.to_yaml(node)), soft_wrap=True)
    for finding in diagnose(composed, schema, compile_on=console if compile_ else None):
        failed |= finding.status == "fail"
        style = {"ok": "green", "warn": "yellow", "fail": "red", "note": ""}[finding.status]
        start = Text(f"{finding.status:4}  {finding.check}: ", style)
        console.print(start, plain(finding.text), sep="", soft_wrap=True)
    raise typer.Exit(1 if failed else 0)


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # they may hold API keys
    help="Play games, look at runs, score predictions on MEDEC.",
)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        names = ("medserl-agentloop", "verl")
        typer.echo(", ".join(f"{name} {metadata.version(name)}" for name in names))
        raise typer.Exit


_PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Before a run": (quickstart, doctor, plan),
    "Look at a run": (show, report, compare, progress, export),
    "Play and measure": (play, evaluate, score, tournament),
}
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        _takes_overrides = _command in (doctor, quickstart)
        _settings = {"ignore_unknown_options": _takes_overrides}
        app.command(rich_help_panel=_panel, context_settings=_settings)(_command)
app.add_typer(data_app, name="data", rich_help_panel="Data and judges")
judge_app.command()(serve)
app.add_typer(judge_app, name="judge", rich_help_panel="Data and judges")
