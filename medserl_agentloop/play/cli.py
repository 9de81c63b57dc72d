"""``medserl play``: the options, the progress, and what is said at the end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any, cast

import pyarrow.parquet as pq
import typer
from pyarrow import ArrowException
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from medserl_agentloop.command_line import errors_in_one_line, plain, say
from medserl_agentloop.core.config import SelfPlayConfig, game_class, selfplay_config
from medserl_agentloop.core.interaction import Interaction, play_game
from medserl_agentloop.core.records import GameRecord
from medserl_agentloop.core.step_file import StepFile
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.judges import build_judge
from medserl_agentloop.games.medical.types import Category
from medserl_agentloop.play.endpoint import EndpointOptions, EndpointPlayer


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
    with errors_in_one_line(stopped=f"the games finished so far are in {output}"):
        if output.exists():
            raise ValueError(f"{output} exists already; name a new file with --output")
        config: Any = selfplay_config(SelfPlayConfig, given, settings or [])
        interaction: Interaction[Any, Any] = game_class(config.game)(config)
        started = draw_games(interaction, data, games, seed)
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
            concurrency=concurrency,
        )
        served = EndpointPlayer(options)
        records = asyncio.run(_play(interaction, started, served, StepFile(output), console))
    table = Table("metric", "value", title="role metrics")
    metrics = interaction.metrics(records)
    for name, value in metrics.items():
        table.add_row(plain(name), f"{value:.4g}")  # components have names of a user's own
    console.print(table)
    void = Counter(record.void for record in records if record.void is not None)
    for line in (*interaction.remarks(metrics), *(f"void: {n} x {reason}" for reason, n in void.most_common())):
        say(console, line)
    say(console, f"games: {output}")
    if void.total() == len(records):
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


def draw_games(interaction: Interaction[Any, Any], file: Path, count: int, seed: int) -> list[Any]:
    """Start a game on each of ``count`` different rows; the same seed draws the same ones in the same order.

    A ValueError says what is wrong with the file.
    """
    try:
        columns = [name for name in ("extra_info", "prompt") if name in pq.read_schema(file).names]
        if "extra_info" not in columns:
            raise ValueError(f"{file} has no column extra_info; write it with data_prep/medec_to_parquet.py")
        rows = pq.read_table(file, columns=columns)
    except (OSError, ArrowException) as error:
        raise ValueError(f"{file} cannot be read as a parquet file of games: {' '.join(str(error).split())}") from None
    if len(rows) < count:
        raise ValueError(f"{file} holds {len(rows)} rows; --games can be at most that")
    games: list[Any] = []
    for number in random.Random(seed).sample(range(len(rows)), len(rows))[:count]:
        (row,) = rows.slice(number, 1).to_pylist()
        try:
            games.append(interaction.new_game(row["extra_info"] or {}))
            if row.get("prompt") and isinstance(interaction, MedicalGameInteraction):
                interaction.check_prompt(row["extra_info"], row["prompt"])
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
    return games


async def _play(
    interaction: Interaction[Any, Any],
    games: Sequence[Any],
    served: EndpointPlayer,
    output: StepFile,
    console: Console,
) -> list[GameRecord]:
    """Play and score all games; each record is written as soon as its game is scored."""
    columns = ("games", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    progress = Progress(*columns, console=console)
    bar = progress.add_task("", total=len(games))
    players = dict.fromkeys(interaction.roles, served)
    places = asyncio.Semaphore(served.options.concurrency)
    void = 0

    async def one(number: int, game: Any) -> GameRecord:
        nonlocal void
        record: Any = game.record
        async with places:
            await play_game(interaction, game, players)
            await interaction.score(record)
        record.context, record.uid, record.step = "isolated", f"play-{number}", 0
        output.append([record.to_json()])
        void += record.void is not None
        progress.update(bar, advance=1, description=f"{void} void" if void else "")
        return cast(GameRecord, record)

    async with aclosing(served):
        await served.check()
        with progress:
            tasks = [asyncio.create_task(one(number, game)) for number, game in enumerate(games)]
            try:
                return await asyncio.gather(*tasks)
            finally:  # of one that failed, or of Ctrl-C: the others must not go on without a server
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
