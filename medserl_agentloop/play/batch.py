"""Many games at once: played, judged, scored and written as they finish. Called by ``medserl play``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from medserl_agentloop.core.step_file import StepFile
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.judges import Judge, judge_game
from medserl_agentloop.games.medical.records import GameRecord
from medserl_agentloop.games.medical.rewards import load_scheme
from medserl_agentloop.games.medical.types import GameSpec, Role
from medserl_agentloop.play.driver import Player, play_game


async def play_batch(
    specs: Sequence[GameSpec],
    players: Mapping[Role, Player],
    judge: Judge,
    config: MedicalConfig,
    output: StepFile,
    *,
    concurrency: int,
    on_game: Callable[[GameRecord], None] = lambda record: None,
) -> list[GameRecord]:
    """Play a game for each of ``specs``.

    Args:
        specs: The rows.
        players: Who plays each role.
        judge: Decides the games; one that fails or abstains makes a game void.
        config: The rules, the reward scheme, and what the records say of the run.
        output: Gets every record as soon as its game is scored.
        concurrency: Most games in progress at once.
        on_game: Called with every record once it is written.

    Returns:
        The records in the order of ``specs``.
    """
    scheme = load_scheme(config.reward, config.reward_terms)
    places = asyncio.Semaphore(concurrency)

    async def one(number: int, spec: GameSpec) -> GameRecord:
        async with places:
            record = await play_game(spec, players, config.edits, config.vanilla_attacker)
            await judge_game(judge, record)
        record.rewards, record.scheme = scheme(record), config.scheme_name
        record.profile, record.context = config.profile, "isolated"
        record.uid, record.step = f"play-{number}", 0
        output.append([record.to_json()])
        on_game(record)
        return record

    tasks = [asyncio.create_task(one(number, spec)) for number, spec in enumerate(specs)]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
