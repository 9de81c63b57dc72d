"""``medserl play``: the options, the progress, and what is said at the end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import aclosing, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from medserl_agentloop.command_line import errors_in_one_line, visible
from medserl_agentloop.core.config import SelfPlayConfig, game_class, selfplay_config
from medserl_agentloop.core.driver import Player
from medserl_agentloop.core.interaction import Interaction
from medserl_agentloop.core.records import GameRecord
from medserl_agentloop.core.step_file import StepFile
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.judges import build_judge
from medserl_agentloop.games.medical.types import Category, Role
from medserl_agentloop.play.batch import draw_games, play_batch
from medserl_agentloop.play.endpoint import EndpointOptions, EndpointPlayer
from medserl_agentloop.play.human import HumanGame, HumanPlayer


def play(
    endpoint: Annotated[str, typer.Option(help="OpenAI-compatible server, e.g. http://localhost:30000.")],
    model: Annotated[str, typer.Option(help="Name of the model it serves.")],
    data: Annotated[Path, typer.Option(help="Parquet file of games (data_prep/medec_to_parquet.py).")],
    games: Annotated[int, typer.Option(min=1, help="Rows to play, drawn by the seed.")] = 20,
    output: Annotated[Path, typer.Option(help="New file for the game records.")] = Path("games.jsonl"),
    game: Annotated[str, typer.Option(help="The game: medical, kuhn_poker, or package.module:Class.")] = "medical",
    profile: Annotated[str | None, typer.Option(help="Prompt profile by name or path; else medserl.")] = None,
    judge: Annotated[str | None, typer.Option(help="Who says whether a rewritten note is wrong; else labels.")] = None,
    reward: Annotated[str | None, typer.Option(help="Reward scheme, or package.module:function; else medserl.")] = None,
    human: Annotated[Role | None, typer.Option(help="Role that you take, at the terminal.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Games in progress at once.")] = 16,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one turn.")] = 4096,
    seed: Annotated[int, typer.Option(help="Draws the rows, and seeds the sampling of every turn.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that one request may take.")] = 300.0,
    api_key_env: Annotated[str | None, typer.Option(help="Environment variable with the API key.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="A key of the selfplay node: KEY=VALUE.")] = None,
) -> None:
    """Play games against a served model, judge and score them, and write their records."""
    console = Console()
    named = {"game": game, "profile": profile, "judge": judge, "reward": reward}
    given = {key: name for key, name in named.items() if name is not None}
    try:
        with errors_in_one_line():
            if output.exists():
                raise ValueError(f"{output} exists already; name a new file with --output")
            config: Any = selfplay_config(SelfPlayConfig, given, settings or [])
            if human is not None and not isinstance(config, MedicalConfig):
                raise ValueError(f"--human {human.value} is a role of the medical game, and --game is {config.game}")
            interaction: Interaction[Any, Any] = HumanGame(config, human) if human else game_class(config.game)(config)
            person: dict[str, Player] = {human: HumanPlayer(console)} if human else {}
            opener = human.value if human is Role.ATTACKER else None  # an assessor plays in every game
            started = draw_games(interaction, data, games, seed, opener=opener)
            if isinstance(config, MedicalConfig):
                check_judge(config, started)
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
            served = EndpointPlayer(options)
            records = asyncio.run(_play(interaction, started, served, person, StepFile(output), console))
    except (KeyboardInterrupt, EOFError):
        typer.echo(f"medserl: stopped; the games finished so far are in {output}", err=True)
        raise typer.Exit(130) from None
    _summary(interaction, records, console)
    console.print(Text(f"games: {output}"), soft_wrap=True)
    if all(record.void is not None for record in records):
        raise typer.Exit(1)


def check_judge(config: MedicalConfig, games: Sequence[Any]) -> None:
    """ValueError if the judge lacks an option that it needs, or cannot judge these games."""
    build_judge(config)
    decoys = sum(game.record.spec.task is Category.DECOY_BENIGN for game in games)
    if decoys and config.judge == "labels":
        raise ValueError(
            f"{decoys} of the games are decoy_benign, and --judge labels cannot see a real error in a decoy: "
            "use another judge, or data without the category"
        )


async def _play(
    interaction: Interaction[Any, Any],
    games: Sequence[Any],
    served: EndpointPlayer,
    person: Mapping[str, Player],
    output: StepFile,
    console: Console,
) -> list[GameRecord]:
    columns = ("games", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    progress = Progress(*columns, console=console)
    bar = progress.add_task("", total=len(games))
    void = 0

    def on_game(record: Any) -> None:
        nonlocal void
        void += record.void is not None
        progress.update(bar, advance=1, description=f"{void} void" if void else "")
        if person:
            from medserl_agentloop.report.terminal import render_game  # loads pandas

            console.print(render_game(record, title="the game you played"))

    async with aclosing(served):
        await served.check()
        players: dict[str, Player] = {**dict.fromkeys(interaction.roles, served), **person}
        with nullcontext() if person else progress:  # a live bar and a prompt share no terminal
            return await play_batch(
                interaction, games, players, output, concurrency=served.options.concurrency, on_game=on_game
            )


def _summary(interaction: Interaction[Any, Any], records: list[GameRecord], console: Console) -> None:
    table = Table("metric", "value", title="role metrics")
    metrics = interaction.metrics(records)
    for name, value in metrics.items():
        table.add_row(Text(visible(name)), f"{value:.4g}")  # components have names of a user's own
    console.print(table)
    for remark in interaction.remarks(metrics):
        console.print(Text(remark), soft_wrap=True)
    for reason, count in Counter(r.void for r in records if r.void is not None).most_common():
        console.print(Text(visible(f"void: {count} x {reason}")), soft_wrap=True)
