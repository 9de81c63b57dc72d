"""Where the time of a training step on the CPU goes: what the backend's own parts save, what the game's parts cost.

    python benchmarks/cpu_step.py [--games 64] [--rounds 5]

First the model's work in one step of the tiny player, by the code that a run uses: sampling a turn of every game,
log-probs of the games, an update. Each is timed with all parts, and with one part as verl or Transformers has it, in
turns; printed are medians of CPU seconds and the ratios.

Then what the game adds to a step, part by part, as a share of that work, and how each part grows: its time at eight
times the games, at notes or turns eight times as long, against eight.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from statistics import median
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":  # what verl's single controller sets for a worker, in a world of one
    os.environ |= {"VERL_PLATFORM": "cpu", "WG_BACKEND": "ray", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}

import advantages
import game_core
import torch
from adapters import LENGTHS, batch, game, worker
from agent_loop_games import ENCODER
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicLayer
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics
from verl.utils import tensordict_utils
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from medserl_agentloop.backends import cpu_sampling
from medserl_agentloop.backends.engines import CpuFSDP2EngineWithLMHead
from medserl_agentloop.core.advantages import BaselineState
from medserl_agentloop.core.config import CreditSettings
from medserl_agentloop.core.step_file import to_line
from medserl_agentloop.core.trajectory import GAME_KEY, Trajectory, TrajectoryTurn
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.metrics import role_metrics
from medserl_agentloop.games.medical.records import MedicalRecord
from medserl_agentloop.games.medical.types import Role
from medserl_agentloop.paths import resource

ALL = "all parts"


@contextmanager
def rows_of_the_pack() -> Iterator[None]:
    """verl's log-probs of logits: a loop over tokens."""
    names = ("prepare_model_outputs", "_gather_and_unpad_packed")
    with patch.multiple(CpuFSDP2EngineWithLMHead, **{name: getattr(FSDPEngineWithLMHead, name) for name in names}):
        yield


@contextmanager
def attention_over_the_pack(engine: Any) -> Iterator[None]:
    """Transformers' SDPA: every token of a micro-batch looks at every other one behind a mask."""
    config = engine.module.config
    own, config._attn_implementation = config._attn_implementation, "sdpa"
    try:
        yield
    finally:
        config._attn_implementation = own


def cpu_seconds(work: Callable[[], Any]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def game_parts(games: int, times_as_long: int = 1, turns: int = 1) -> dict[str, Callable[[], Any]]:
    """What the game adds to a step. Notes have ``times_as_long`` the words of MEDEC's median."""
    rng = random.Random(0)
    specs = [game_core.spec(number, rng, game_core.WORDS * times_as_long) for number in range(games)]
    lines = asyncio.run(game_core.play_all(specs, MedicalConfig()))
    records = [MedicalRecord.model_validate(json.loads(line)) for line in lines]
    for record in records:
        record.step = 1
    answer = TrajectoryTurn(Role.ATTACKER.value, [5] * 150 * times_as_long, [7] * 120 * times_as_long, None)
    trajectory = Trajectory([role.value for role in Role], isolated=True, has_log_probs=False)
    trajectory.turns = [replace(answer, conversation=str(turn), number=turn) for turn in range(2 * turns)]
    scored = {"reward_extra_info": {GAME_KEY: records[0].to_json()}}
    batch = advantages.synthetic_batch(games, 400 * times_as_long)

    def encode() -> None:
        for spec in specs:
            ENCODER.of(Role.ATTACKER, spec.category, spec.seed_note)
            ENCODER.of(Role.ASSESSOR, spec.category, spec.seed_note)

    def columns() -> None:
        for record in records:
            trajectory.to_output(record, AgentLoopMetrics(), scored, 0).as_dict()

    def write_and_read() -> None:
        for record in records:
            MedicalRecord.model_validate(json.loads(to_line(record.to_json())))

    return {
        "prompts: render and encode": encode,
        "play: parse, compare, judge by label, reward": lambda: asyncio.run(game_core.play_all(specs, MedicalConfig())),
        "trajectory: columns of roles and contexts": columns,
        "advantages (role_reinforce_pp)": lambda: advantages.ROLE_ESTIMATORS["role_reinforce_pp"](
            batch, CreditSettings(), BaselineState()
        ),
        "metrics of the step": lambda: role_metrics(records),
        "records: write and read": write_and_read,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--games", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=100, help="sampled in each turn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    trainer = worker("all weights")
    games = [game(LENGTHS, seed, {1: 1.0, 2: -1.0}) for seed in range(options.games)]
    player = AutoModelForCausalLM.from_pretrained(str(resource("assets/tiny_player")), dtype=torch.float32).eval()
    settings = cpu_sampling.SamplingSettings(ignore_eos=True)

    def generate() -> None:
        requests = [
            cpu_sampling.SamplingRequest(row["prompts"].tolist(), options.tokens, torch.Generator().manual_seed(seed))
            for seed, row in enumerate(games)
        ]
        cpu_sampling.sample_batch(player, requests, settings, eos_token_ids=frozenset())

    def rows() -> Any:
        made = batch(games)
        tensordict_utils.assign_non_tensor(made, micro_batch_size_per_gpu=2)  # as in recipes/tiny.yaml
        return made

    def log_probs() -> None:
        trainer.compute_log_prob(rows())

    def update() -> None:
        trainer.update_actor(rows())

    engine = trainer.actor.engine
    without: dict[str, dict[str, Callable[[], Any]]] = {
        "generation": {"room for keys and values": lambda: patch.object(cpu_sampling, "LayerWithRoom", DynamicLayer)},
        "log-probs": {"one row of log-probs": rows_of_the_pack, "attention": lambda: attention_over_the_pack(engine)},
        "update": {"one row of log-probs": rows_of_the_pack, "attention": lambda: attention_over_the_pack(engine)},
    }
    work = {"generation": generate, "log-probs": log_probs, "update": update}
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(options.rounds + 1):
        for phase, parts in without.items():
            for part, switched_off in {ALL: nullcontext, **parts}.items():
                with switched_off():
                    seconds[phase, part].append(cpu_seconds(work[phase]))
    table = Table(title=f"{options.games} games of {sum(LENGTHS)} tokens, {options.tokens} sampled in a turn")
    for name in ("phase", "without", "CPU s", "times as long"):
        table.add_column(name)
    for (phase, part), times in seconds.items():
        whole = median(seconds[phase, ALL][1:])  # the first round warms up
        ratio = "" if part == ALL else f"{median(times[1:]) / whole:.2f}"
        table.add_row(phase, "" if part == ALL else part, f"{median(times[1:]):.2f}", ratio)
    Console().print(table)
    whole = sum(median(times[1:]) for (_, part), times in seconds.items() if part == ALL)
    show_game_parts(options.games, options.rounds, whole)


def show_game_parts(games: int, rounds: int, model_seconds: float) -> None:
    """Print what each part costs, and its growth."""
    larger = {"games": {"games": 8 * games}, "notes": {"times_as_long": 8}, "turns": {"turns": 8}}
    sizes = {"": game_parts(games), **{of: game_parts(**{"games": games, **size}) for of, size in larger.items()}}
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(rounds + 1):
        for size, parts in sizes.items():
            for part, work in parts.items():
                seconds[part, size].append(cpu_seconds(work))
    table = Table(
        title=f"{games} games with notes of {game_core.WORDS} words; the model's work takes {model_seconds:.2f} s"
    )
    for name in ("part", "CPU ms", "share", *(f"8 times the {of}" for of in larger)):
        table.add_column(name, justify="left" if name == "part" else "right")
    for part in sizes[""]:
        took = {size: median(seconds[part, size][1:]) for size in sizes}
        share = f"{took[''] / model_seconds:.2%}"
        table.add_row(part, f"{1000 * took['']:.1f}", share, *(f"{took[of] / took['']:.1f} x" for of in larger))
    total = sum(median(seconds[part, ""][1:]) for part in sizes[""])
    table.add_row("all of them", f"{1000 * total:.1f}", f"{total / model_seconds:.2%}", *[""] * len(larger))
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
