"""What the agent loop costs, and what its schedule saves. Run by hand: ``python benchmarks/agent_loop.py``.

Throughput: games per second of one of verl's agent-loop workers whose server answers at once, beside
verl's own tool agent loop on as many tokens: the attacker's turn ends in a tool call of the same
length, the tool returns the assessor's prompt, the assessor's turn is the same. Repeats alternate
between the two, so that a busy machine slows both.

Schedule: wall time of one step's games on a server that takes its time, with a judge that takes half a second
for a rewritten note, beside playing all attackers, then all assessors, then judging in one request, and beside a bound
that no schedule can beat: the longest game with its judge's answer, or all generation divided by the
server's slots, whichever is more. With few slots no order that does not know the lengths beforehand
comes near that bound: a long turn may start last.

Measured on two CPU cores without a GPU:

One of verl's agent-loop workers with a server that answers at once, 256 games of about 1,005 tokens, seven repeats,
while other work kept both cores busy (load 3 to 6):

| | games/s (from, to) | CPU ms per game |
|---|---|---|
| self-play | 106 (60, 168) | 5.5 |
| verl's tool agent, transcripts of the same tokens | 87 (61, 111) | 7.7 |

That is 1.22 times the games per second and 0.72 times the CPU time. About a third of a game's CPU time is verl's own
`hydra.instantiate`. verl's worker class and both loops are real; the model server, the TransferQueue's storage and
Ray's call of the reward loop are stood in for.

The schedule, with log-normal generation times and a judge that takes 0.5 s for a rewritten note (untouched notes are
not judged): every game goes on by itself, and the judge overlaps with other games' generation. Beside it a schedule in
phases (all attackers, then all assessors, then one judge request for the batch, the OpenRLHF baseline's), and the lower
bound: the longest game and its judge, or all generation divided by the server's slots, whichever is longer.

| slots of the server | self-play s | in phases s | bound s | phases / self-play | self-play / bound |
|---|---|---|---|---|---|
| 256 | 17.73 | 31.47 | 17.07 | 1.78 | 1.04 |
| 128 | 18.41 | 31.72 | 17.07 | 1.72 | 1.08 |
| 64 | 20.90 | 33.10 | 17.07 | 1.58 | 1.22 |

The slots model an engine that runs so many sequences at once, first come, first served, each at a speed that does
not depend on the others. With fewer slots than games, waiting for a slot is what the last column shows: in a batch
of which every game fits, the schedule is within 4 % of the bound.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import time
from dataclasses import dataclass
from typing import Any

from agent_loop_games import (
    AGENT_NAME,
    ENCODER,
    JUDGE_S,
    TOKENIZER,
    TOOL_AGENT,
    RewardLoop,
    ScriptedGame,
    ScriptedServer,
    play,
    run_config,
    scripted_games,
)
from rich.console import Console
from rich.table import Table
from verl import DataProto

from medserl_agentloop.core.reward_manager import PerTurnRewardManager
from medserl_agentloop.games.medical.types import Category, Role

SPREAD = 1.0  # of the log-normal times: one turn in forty takes more than seven times the median


@dataclass(frozen=True)
class Throughput:
    """One repeat: games per second, CPU milliseconds per game, tokens per game."""

    rate: float
    cpu_ms: float
    tokens: int


def throughput(games: list[ScriptedGame], repeats: int) -> dict[str, list[Throughput]]:
    """Games per second, and tokens per game, of each repeat of each loop."""
    run = run_config()
    # The reward loop is another process in a run: its answers are made beforehand.
    manager = PerTurnRewardManager(run, TOKENIZER)
    answers: dict[str, Any] = {}

    async def judge_and_remember(data: DataProto) -> dict[str, Any]:
        answers[data.non_tensor_batch["uid"][0]] = answer = await manager.run_single(data)
        return answer

    async def remembered(data: DataProto) -> dict[str, Any]:
        return dict(answers[data.non_tensor_batch["uid"][0]])

    async def nothing(data: DataProto) -> dict[str, Any]:
        return {"reward_score": 0.0, "reward_extra_info": {}}

    asyncio.run(play(games, run, ScriptedServer(games), RewardLoop(judge_and_remember), AGENT_NAME))
    assert all(answer["reward_extra_info"]["void"] == 0.0 for answer in answers.values())
    asyncio.run(play(games, run, ScriptedServer(games, tool_agent=True), RewardLoop(nothing), TOOL_AGENT))
    results: dict[str, list[Throughput]] = {AGENT_NAME: [], TOOL_AGENT: []}
    for _ in range(repeats):
        for agent, reward in ((AGENT_NAME, remembered), (TOOL_AGENT, nothing)):
            server = ScriptedServer(games, tool_agent=agent == TOOL_AGENT)
            done = asyncio.run(play(games, run, server, RewardLoop(reward), agent))
            cpu_ms = 1000 * done.cpu_s / len(games)
            results[agent].append(Throughput(len(games) / done.wall_s, cpu_ms, done.tokens // len(games)))
    return results


def print_throughput(console: Console, results: dict[str, list[Throughput]]) -> None:
    table = Table(title="One agent-loop worker, a server that answers at once; medians")
    for column in ("agent loop", "tokens per game", "games/s", "from", "to", "CPU ms per game"):
        table.add_column(column, justify="right" if column != "agent loop" else "left")
    rates, cpu = {}, {}
    for agent, runs in results.items():
        rates[agent] = statistics.median(run.rate for run in runs)
        cpu[agent] = statistics.median(run.cpu_ms for run in runs)
        shown = (rates[agent], min(run.rate for run in runs), max(run.rate for run in runs))
        table.add_row(agent, str(runs[0].tokens), *(f"{x:.0f}" for x in shown), f"{cpu[agent]:.1f}")
    console.print(table)
    ratio, cost = rates[AGENT_NAME] / rates[TOOL_AGENT], cpu[AGENT_NAME] / cpu[TOOL_AGENT]
    console.print(f"self-play has [bold]{ratio:.2f}[/] times the games per second of verl's tool agent (target: 1)")
    console.print(f"and, whatever else the machine does, takes {cost:.2f} times its CPU time")


@dataclass(frozen=True)
class Schedules:
    """Wall seconds of one step's games."""

    slots: int
    ours: float
    phases: float
    bound: float


def schedules(games: list[ScriptedGame], slots: int) -> Schedules:
    """The same games with the same times, in both orders."""
    run = run_config("selfplay.judge=agent_loop_games:SlowJudge")
    reward_loop = RewardLoop(PerTurnRewardManager(run, TOKENIZER).run_single)
    ours = asyncio.run(play(games, run, ScriptedServer(games, slots=slots), reward_loop, AGENT_NAME))
    phases = asyncio.run(play_in_phases(games, ScriptedServer(games, slots=slots)))
    longest = max(sum(game.seconds) + (JUDGE_S if game.attack is not None else 0.0) for game in games)
    work = sum(sum(game.seconds) for game in games) / slots
    return Schedules(slots, ours.wall_s, phases, max(longest, work))


async def play_in_phases(games: list[ScriptedGame], server: ScriptedServer) -> float:
    """Wall seconds of all attackers, then all assessors, then one request to the judge for the whole batch.

    Favourable to this order: nothing but the server takes time, and the judge answers all at once.
    """
    attacks, assessments = [], []
    for game in games:
        if game.attack is not None:
            attacks.append(ENCODER.of(Role.ATTACKER, Category.ADVERSARIAL_BENIGN, game.row["extra_info"]["seed_note"]))
        assessments.append(ENCODER.of(Role.ASSESSOR, Category.VANILLA_BENIGN, game.presented))
    started = time.perf_counter()
    for prompts in (attacks, assessments):
        await asyncio.gather(*(server.generate("", prompt_ids=prompt.ids) for prompt in prompts))
    await asyncio.sleep(JUDGE_S)
    return time.perf_counter() - started


def print_schedules(console: Console, title: str, results: list[Schedules]) -> None:
    table = Table(title=title)
    for column in ("slots", "ours, s", "in phases, s", "bound, s", "in phases / ours", "ours / bound"):
        table.add_column(column, justify="right")
    for r in results:
        times = (f"{r.ours:.2f}", f"{r.phases:.2f}", f"{r.bound:.2f}")
        table.add_row(str(r.slots), *times, f"{r.phases / r.ours:.2f}", f"{r.ours / r.bound:.2f}")
    console.print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=int, default=256, help="games of one step")
    parser.add_argument("--repeats", type=int, default=7, help="repeats of each throughput measurement")
    parser.add_argument(
        "--slots", default="256,128,64", help="turns the server generates at a time, with commas between"
    )
    parser.add_argument("--median", type=float, default=1.0, help="seconds of the schedule's median turn")
    parser.add_argument("--only", choices=["throughput", "schedule"], help="measure one of the two")
    options = parser.parse_args()
    logging.getLogger("verl").setLevel(logging.ERROR)
    console = Console(width=120)
    if options.only != "schedule":
        print_throughput(console, throughput(scripted_games(options.games), options.repeats))
    if options.only != "throughput":
        games = scripted_games(options.games, attacked=0.5, spread=SPREAD, median=options.median)
        results = [schedules(games, int(slots)) for slots in options.slots.split(",")]
        times = f"log-normal turns (median {options.median:g} s), judge {JUDGE_S} s"
        print_schedules(console, f"{options.games} games, half with an attack; {times}", results)
        console.print("targets: in phases / ours at least 1.5, ours / bound at most 1.1")


if __name__ == "__main__":
    main()
