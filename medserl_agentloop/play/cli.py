"""``medserl play``: the options, the progress, and what is said at the end."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from medserl_agentloop.core.config import selfplay_config
from medserl_agentloop.core.step_file import StepFile
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.judges import WHAT_IT_CANNOT_SEE, build_judge
from medserl_agentloop.games.medical.metrics import UNREAD_RATE, role_metrics
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import GameRecord
from medserl_agentloop.games.medical.types import Category, GameSpec, Role
from medserl_agentloop.play.batch import play_batch
from medserl_agentloop.play.driver import Player
from medserl_agentloop.play.endpoint import EndpointOptions, EndpointPlayer
from medserl_agentloop.play.human import HumanPlayer
from medserl_agentloop.play.rows import draw_rows
from medserl_agentloop.report.terminal import render_game


@dataclass(frozen=True)
class _Session:
    """What one call of the command plays."""

    specs: list[GameSpec]
    config: MedicalConfig
    served: EndpointPlayer
    concurrency: int
    output: StepFile
    human: Role | None


def play(
    endpoint: Annotated[str, typer.Option(help="OpenAI-compatible server, e.g. http://localhost:30000.")],
    model: Annotated[str, typer.Option(help="Name of the model it serves.")],
    data: Annotated[Path, typer.Option(help="Parquet file of games (data_prep/medec_to_parquet.py).")],
    games: Annotated[int, typer.Option(min=1, help="Rows to play, drawn by the seed.")] = 20,
    output: Annotated[Path, typer.Option(help="New file for the game records.")] = Path("games.jsonl"),
    profile: Annotated[str, typer.Option(help="Prompt profile: a folder of prompts/, or a path.")] = "medserl",
    judge: Annotated[str, typer.Option(help="Who decides whether a rewritten note holds an error.")] = "labels",
    reward: Annotated[str, typer.Option(help="Reward scheme, or package.module:function.")] = "medserl",
    human: Annotated[Role | None, typer.Option(help="Role that you take, at the terminal.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Games in progress at once.")] = 16,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one turn.")] = 4096,
    seed: Annotated[int, typer.Option(help="Draws the rows, and seeds the sampling of every turn.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that one request may take.")] = 300.0,
    api_key_env: Annotated[str | None, typer.Option(help="Environment variable with the API key.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any key of the selfplay node, e.g. edits.max_changed_words=40.")
    ] = None,
) -> None:
    """Play games against a served model, judge and score them, and write their records."""
    console = Console()
    try:
        specs = draw_rows(data, games, seed, attacked=human is Role.ATTACKER)
        config = selfplay_config(MedicalConfig, {"profile": profile, "judge": judge, "reward": reward}, settings or [])
        options = EndpointOptions(
            url=endpoint,
            model=model,
            api_key_env=api_key_env,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            timeout_s=timeout,
            concurrency=1 if human else concurrency,
        )
        served = EndpointPlayer(options, load_profile(profile))
        session = _Session(specs, config, served, options.concurrency, output=_new_file(output), human=human)
        _check_decoys(session)
        records = asyncio.run(_play(session, console))
    except ValueError as error:
        typer.echo(f"medserl: {error}", err=True)
        raise typer.Exit(2) from None
    except (KeyboardInterrupt, EOFError):
        typer.echo(f"medserl: stopped; the games finished so far are in {output}", err=True)
        raise typer.Exit(130) from None
    _summary(records, console)
    console.print(Text(f"games: {output}"), soft_wrap=True)
    if all(record.void is not None for record in records):
        raise typer.Exit(1)


async def _play(session: _Session, console: Console) -> list[GameRecord]:
    judge = build_judge(session.config)
    progress = Progress(
        TextColumn("games"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"),
        console=console,
    )  # fmt: skip
    bar = progress.add_task("", total=len(session.specs))
    void = 0

    def on_game(record: GameRecord) -> None:
        nonlocal void
        void += record.void is not None
        progress.update(bar, advance=1, description=f"{void} void" if void else "")
        if session.human is not None:
            console.print(render_game(record, title="the game you played"))

    async with aclosing(session.served) as served:
        await served.check()
        players: dict[Role, Player] = dict.fromkeys(Role, served)
        if session.human is not None:
            players[session.human] = HumanPlayer(console)
        with progress if session.human is None else nullcontext():  # a live bar and a prompt share no terminal
            return await play_batch(
                session.specs,
                players,
                judge,
                session.config,
                session.output,
                concurrency=session.concurrency,
                on_game=on_game,
            )


def _summary(records: list[GameRecord], console: Console) -> None:
    table = Table("metric", "value", title="role metrics")
    metrics = role_metrics(records)
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4g}")
    console.print(table)
    if metrics.get(UNREAD_RATE):
        console.print(Text(WHAT_IT_CANNOT_SEE), soft_wrap=True)
    for reason, count in Counter(r.void for r in records if r.void is not None).most_common():
        console.print(Text(f"void: {count} x {reason}"), soft_wrap=True)


def _check_decoys(session: _Session) -> None:
    decoys = sum(spec.task is Category.DECOY_BENIGN for spec in session.specs)
    if decoys and session.config.judge == "labels":
        raise ValueError(
            f"{decoys} of the games are decoy_benign, and --judge labels cannot see a real error in a decoy: "
            "use another judge, or data without the category"
        )


def _new_file(path: Path) -> StepFile:
    if path.exists():
        raise ValueError(f"{path} exists already; name a new file with --output")
    try:
        return StepFile(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error}") from None
