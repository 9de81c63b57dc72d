"""Whether a long run stays as it starts: ``python benchmarks/soak.py --games 100000``.

One of verl's agent-loop workers plays scripted games, each on a note of its own, on a server that answers at once. The
reward manager asks a judge over HTTP, in a process of its own, and every record is written. After each tenth it prints
the memory and the open files of this process, its connections, of which it keeps 16 to the judge open
(``judge_server.concurrency``), and games per second of wall and of CPU time. It exits with 1 where

- the memory at the end is more than 5 % above that after the first tenth,
- the second half has more files open than the first, or over 16 connections more,
- the last three tenths play fewer than three quarters of the games per CPU second of the first three (other work on
  the machine changes the wall time; tenths of fewer than 1,000 games are not compared), or
- a game has no record, more than one, or one without a judgement and rewards.

Measured on two CPU cores, beside other work: 100,000 games in 17 minutes. Memory went from 688 MB after 10,000 games to
708 (+3.0 %), open files stayed at 10 and connections between 8 and 18, games per CPU second went from 105 over 96 to
126. Every game had its record.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import psutil
import verl.trainer.ppo.v1.agent_loop_tq as agent_loop_tq
from agent_loop_games import (
    AGENT_NAME,
    TOKENIZER,
    RewardLoop,
    ScriptedServer,
    Storage,
    batch_of,
    run_config,
    scripted_games,
)
from game_core import serving_labels
from rich.console import Console
from rich.table import Table
from verl.experimental.agent_loop.agent_loop import register

from medserl_agentloop.core.agent_loop import SelfPlayAgentLoop
from medserl_agentloop.core.reward_manager import PerTurnRewardManager
from medserl_agentloop.core.step_file import GAMES_FILE, StepFile
from medserl_agentloop.core.trajectory import GAME_KEY
from medserl_agentloop.games.medical.judges import JudgeServer
from medserl_agentloop.games.medical.records import read_games

STEP = 256
"""Most games of a step."""
TIMED_GAMES = 1_000
"""Fewest games of a tenth whose rate is compared: four take 0.03 to 0.06 CPU seconds, by chance."""


class Tenth(NamedTuple):
    """What the process was like after a tenth of the games."""

    games: int
    memory_mb: float
    files: int
    connections: int
    per_s: float
    per_cpu_s: float


class RecordingStorage(Storage):
    """Writes the records as the trainer does."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.file = StepFile(path)

    async def async_kv_batch_put(self, keys: list[str], fields: Any, tags: list[dict[str, Any]], **_: Any) -> None:
        await super().async_kv_batch_put(keys, fields, tags)
        self.file.append(extra[GAME_KEY] for extra in list(fields["extra_fields"]))


class CurrentServer:
    """The server of the step that is played."""

    script: ScriptedServer

    async def generate(self, *request: Any, **parts: Any) -> Any:
        return await self.script.generate(*request, **parts)


async def soak(count: int, url: str, path: Path) -> list[Tenth]:
    """Play ``count`` games and write their records."""
    run = run_config("selfplay.judge=http", f"selfplay.judge_server.url={url}")
    register(AGENT_NAME)(SelfPlayAgentLoop)
    storage, server, process = RecordingStorage(path), CurrentServer(), psutil.Process()
    tenths = []
    with patch.object(agent_loop_tq, "tq", storage):
        worker_class = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class
        reward_loop = RewardLoop(PerTurnRewardManager(run, TOKENIZER).run_single)
        worker = worker_class(run, server, None, [reward_loop])
        for tenth in range(10):
            played, end, wall, cpu = tenth * count // 10, (tenth + 1) * count // 10, 0.0, 0.0
            size = end - played
            while played < end:
                games = scripted_games(min(STEP, end - played), first=played)
                server.script = ScriptedServer(games)
                started = time.perf_counter(), time.process_time()
                await worker.generate_sequences(batch_of(games, AGENT_NAME))
                await asyncio.gather(*worker.background_tasks)
                wall, cpu = wall + time.perf_counter() - started[0], cpu + time.process_time() - started[1]
                played += len(games)
            gc.collect()
            files, connections = process.num_fds(), len(process.net_connections(kind="all"))
            tenths.append(
                Tenth(
                    played, process.memory_info().rss / 1e6, files - connections, connections, size / wall, size / cpu
                )
            )
            print(tenths[-1], file=sys.stderr, flush=True)
    return tenths


def faults(tenths: list[Tenth], count: int, path: Path) -> list[str]:
    """What did not stay as it was, as sentences."""
    first, last = tenths[0], tenths[-1]
    found = []
    if last.memory_mb > 1.05 * first.memory_mb:
        found.append(f"memory grew from {first.memory_mb:.0f} to {last.memory_mb:.0f} MB")
    for what, more in (("files", 0), ("connections", JudgeServer().concurrency)):
        before, after = (max(getattr(tenth, what) for tenth in half) for half in (tenths[:5], tenths[5:]))
        if after > before + more:
            found.append(f"open {what} grew from {before} to {after}")
    fast, slow = (median(tenth.per_cpu_s for tenth in three) for three in (tenths[:3], tenths[-3:]))
    if count >= 10 * TIMED_GAMES and slow < 0.75 * fast:
        found.append(f"games per CPU second fell from {fast:.0f} to {slow:.0f}")
    whole = [game.uid for game in read_games(path) if game.judgement and game.rewards and game.void is None]
    if sorted(map(int, whole)) != list(range(count)):
        found.append(f"of {count} games, {len(set(whole))} have a whole record, among {len(whole)}")
    return found


def main() -> None:
    """Play, print, and exit with 1 where something grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=int, default=100_000)
    count = parser.parse_args().games
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as folder, serving_labels() as url:
        path = Path(folder) / GAMES_FILE
        tenths = asyncio.run(soak(count, url, path))
        found = faults(tenths, count, path)
    table = Table("games", "memory, MB", "open files", "connections", "games/s", "games per CPU s")
    for tenth in tenths:
        table.add_row(*(f"{value:.0f}" for value in tenth))
    console.print(table)
    for fault in found:
        console.print(fault)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
