"""The games of a parquet file: drawn, played, scored, and written as they finish. Called by ``medserl play``."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped, unused-ignore]
from pyarrow import ArrowException  # type: ignore[import-untyped, unused-ignore]

from medserl_agentloop.core.driver import Player, play_game
from medserl_agentloop.core.interaction import Interaction
from medserl_agentloop.core.records import GameRecord
from medserl_agentloop.core.step_file import StepFile


def draw_games(
    interaction: Interaction[Any, Any], file: Path, count: int, seed: int, *, opener: str | None = None
) -> list[Any]:
    """Start a game on each of ``count`` different rows; the same seed draws the same ones in the same order.

    ``opener`` draws only rows whose first turn is that role's. A ValueError says what is wrong with the file.
    """
    try:
        if "extra_info" not in pq.read_schema(file).names:
            raise ValueError(f"{file} has no column extra_info; write it with data_prep/medec_to_parquet.py")
        rows = pq.read_table(file, columns=["extra_info"])["extra_info"]
    except (OSError, ArrowException) as error:
        raise ValueError(f"{file} cannot be read as a parquet file of games: {' '.join(str(error).split())}") from None
    games: list[Any] = []
    for number in random.Random(seed).sample(range(len(rows)), len(rows)):
        try:
            game = interaction.new_game(rows[number].as_py() or {})
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        first = interaction.next_turn(game)
        if opener is None or (first is not None and first.role == opener):
            games.append(game)
        if len(games) == count:
            break
    else:
        kind = "rows" if opener is None else f"rows that begin with the {opener}'s turn"
        raise ValueError(f"{file} holds {len(games)} {kind}; --games can be at most that")
    return games


async def play_batch(
    interaction: Interaction[Any, Any],
    games: Sequence[Any],
    players: Mapping[str, Player],
    output: StepFile,
    *,
    concurrency: int,
    on_game: Callable[[Any], None],
) -> list[GameRecord]:
    """Play and score all games, at most ``concurrency`` at once, and return their records in the same order.

    Each record goes to ``output``, and then to ``on_game``, as soon as its game is scored.
    """
    places = asyncio.Semaphore(concurrency)

    async def one(number: int, game: Any) -> GameRecord:
        record: GameRecord = game.record
        async with places:
            await play_game(interaction, game, players)
            await interaction.score(record)
        record.context, record.uid, record.step = "isolated", f"play-{number}", 0
        output.append([record.to_json()])
        on_game(record)
        return record

    tasks = [asyncio.create_task(one(number, game)) for number, game in enumerate(games)]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
