"""Measure the game's share of a training step on the CPU, beside the model's work of the same step.

    python benchmarks/cpu_step.py [--games 64] [--rounds 5]

The model's work is a step of the tiny player by the code that a run uses: sampling a turn of every
game, log-probs of the games, an update. The game's parts are timed one by one. Printed are medians
of CPU seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

if __name__ == "__main__":  # what verl's single controller sets for a worker, in a world of one
    os.environ |= {
        "VERL_PLATFORM": "cpu",
        "WG_BACKEND": "ray",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    os.environ |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}

import torch
from adapters import LENGTHS, batch, game, worker
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.utils import tensordict_utils

from medserl_agentloop.backends import cpu_sampling
from medserl_agentloop.core.advantages import ROLE_ESTIMATORS, Baselines, RoleBatch
from medserl_agentloop.core.config import CreditSettings
from medserl_agentloop.core.encoding import ChatEncoder, Message
from medserl_agentloop.core.interaction import Reply, Turn, play_game
from medserl_agentloop.core.step_file import to_line
from medserl_agentloop.core.trajectory import RECORD_KEY, Trajectory, TrajectoryTurn
from medserl_agentloop.games.medical.case import Category, ErrorType, GameSpec, Role
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.metrics import role_metrics
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import MedicalRecord
from medserl_agentloop.paths import resource
from medserl_agentloop.terminal import table

WORDS, WORDS_PER_SENTENCE, REASONING_WORDS = 120, 12, 200  # notes of MEDEC's median length
REUSED, LARGE = "update with selfplay.reuse_log_probs", "log-probs in one micro-batch"
PLAYER = str(resource("assets/tiny_player"))


def spec(number: int, rng: random.Random) -> GameSpec:
    """A game on a correct note of random words, into which an error is to be put."""
    words = [
        "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 10)))
        for _ in range(WORDS)
    ]
    starts = range(0, WORDS, WORDS_PER_SENTENCE)
    note = " ".join(
        " ".join(words[at : at + WORDS_PER_SENTENCE]).capitalize() + "." for at in starts
    )
    return GameSpec(
        category=Category.ADVERSARIAL_BENIGN,
        target_label=Category.ADVERSARIAL_BENIGN.default_target_label,
        seed_note=note,
        error_note=note,
        clean_note=note,
        error_type=ErrorType.DIAGNOSIS,
        error_sentence=note.split(". ")[0],
        corrected_sentence=note.split(". ")[0],
        text_id=f"toy-{number}",
        vignette_id=f"toy-{number}",
        index=number,
    )


class ScriptedPlayer:
    """Writes whole turns of random words."""

    name = "scripted"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def reply(self, turn: Turn, messages: Sequence[Message]) -> Reply:
        words = turn.prompt.data["note"].split()
        reasoning = " ".join(self._rng.choices(words, k=REASONING_WORDS))
        if turn.role == Role.ATTACKER:
            words[self._rng.randrange(len(words))] = "anotherword"
            return Reply(
                f"<think>{reasoning}</think>\n<note>{' '.join(words)}</note>", tokens=len(words)
            )
        answer = "verdict: harmful\nsentence: none\nerror_type: diagnosis\ncorrection: none"
        return Reply(
            f"<think>{reasoning}</think>\n<answer>\n{answer}\n</answer>", tokens=len(words)
        )


async def play_all(specs: Sequence[GameSpec]) -> list[MedicalRecord]:
    """Play, judge by label and score every game."""
    interaction = MedicalGameInteraction(MedicalConfig(judge="labels"))
    players = dict.fromkeys(interaction.roles, ScriptedPlayer(random.Random(0)))
    records = []
    for facts in specs:
        game = interaction.start(facts)
        await play_game(interaction, game, players)
        await interaction.score(game.record)
        records.append(game.record)
    return records


def role_batch(games: int, tokens: int) -> RoleBatch:
    """Two turns of equal length around an observation, a reward on each last token."""
    third = tokens // 3
    lengths = ((third, Role.ATTACKER.id), (third, 0), (third, Role.ASSESSOR.id))
    role_ids = torch.cat([torch.full((games, length), role) for length, role in lengths], dim=1)
    rewards = torch.zeros(role_ids.shape)
    rewards[:, third - 1], rewards[:, -1] = -1.0, 1.0
    roles, groups, kinds = (
        [role.value for role in Role],
        list(map(str, range(games))),
        ["adversarial_benign"] * games,
    )
    return RoleBatch(rewards, (role_ids > 0).long(), role_ids, roles, groups=groups, kinds=kinds)


def game_parts(games: int) -> dict[str, Callable[[], Any]]:
    """Return the parts of a step that the game adds, to be timed."""
    rng = random.Random(0)
    specs = [spec(number, rng) for number in range(games)]
    records = asyncio.run(play_all(specs))
    for record in records:
        record.step = 1
    encoder, profile = ChatEncoder(AutoTokenizer.from_pretrained(PLAYER)), load_profile()
    answer = TrajectoryTurn(Role.ATTACKER.value, [5] * 150, [7] * 120, None)
    trajectory = Trajectory([role.value for role in Role], isolated=True, has_log_probs=False)
    trajectory.turns = [replace(answer, conversation=str(turn), number=turn) for turn in range(2)]
    scored = {"reward_extra_info": {RECORD_KEY: records[0]}}
    credited = role_batch(games, 400)

    def encode() -> None:
        for facts in specs:
            for role in Role:
                encoder.opening(profile.turn(role, facts.category, facts.seed_note))

    def columns() -> None:
        for record in records:
            trajectory.to_output(record, 0, extra_fields=scored).as_dict()

    def write_and_read() -> None:
        for record in records:
            MedicalRecord.model_validate(json.loads(to_line(record.to_json())))

    def advantages() -> None:
        ROLE_ESTIMATORS["role_reinforce_pp"](credited, CreditSettings(), Baselines())

    return {
        "prompts: render and encode": encode,
        "play: parse, compare, judge by label, reward": lambda: asyncio.run(play_all(specs)),
        "trajectory: columns of roles and contexts": columns,
        "advantages (role_reinforce_pp)": advantages,
        "metrics of the step": lambda: role_metrics(records),
        "records: write and read": write_and_read,
    }


def model_parts(count: int, tokens: int) -> dict[str, Callable[[], Any]]:
    """The model's work in a step, by the code of a run."""
    trainer = worker("all weights")
    games = [game(LENGTHS, seed, {1: 1.0, 2: -1.0}) for seed in range(count)]
    player = AutoModelForCausalLM.from_pretrained(PLAYER, dtype=torch.float32).eval()
    settings = cpu_sampling.SamplingSettings(ignore_eos=True)

    def generate() -> None:
        requests = [
            cpu_sampling.SamplingRequest(
                row["prompts"].tolist(), tokens, torch.Generator().manual_seed(seed)
            )
            for seed, row in enumerate(games)
        ]
        cpu_sampling.sample_batch(player, requests, settings, eos_token_ids=frozenset())

    def rows(size: int = 2) -> Any:  # 2 as in recipes/tiny.yaml
        made = batch(games)
        tensordict_utils.assign_non_tensor(made, micro_batch_size_per_gpu=size)
        return made

    def update_with_its_own_log_probs() -> None:
        made = rows()
        made["rollout_log_probs"] = made.pop("old_log_probs")
        trainer.update_actor(made)

    return {
        "generation": generate,
        "log-probs": lambda: trainer.compute_log_prob(rows()),
        "update": lambda: trainer.update_actor(rows()),
        LARGE: lambda: trainer.compute_log_prob(rows(count)),
        REUSED: update_with_its_own_log_probs,
    }


def cpu_seconds(parts: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median of each part, timed in turns after a round that warms up."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds + 1):
        for part, work in parts.items():
            started = time.process_time()
            work()
            seconds[part].append(time.process_time() - started)
    return {part: median(times[1:]) for part, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--games", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=100, help="sampled in each turn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = cpu_seconds(model_parts(options.games, options.tokens), options.rounds)
    reused, large = model.pop(REUSED), model.pop(LARGE)
    whole = sum(model.values())
    seconds = cpu_seconds(game_parts(options.games), options.rounds)
    rows = [(f"model: {part}", f"{1000 * took:.0f}", "") for part, took in model.items()]
    for part, took in (seconds | {"the game, all parts": sum(seconds.values())}).items():
        rows.append((part, f"{1000 * took:.1f}", f"{took / whole:.2%}"))
    title = f"{options.games} games with notes of {WORDS} words, CPU ms"
    Console(width=130).print(table(title, ["part", "CPU ms", "of the model's"], rows))
    two = model["log-probs"] + model["update"]
    print(
        f"log-probs {model['log-probs']:.2f} s, {LARGE} {large:.2f} s, "
        f"{model['log-probs'] / large:.2f} x"
    )
    print(f"log-probs and update {two:.2f} s, {REUSED} {reused:.2f} s, {two / reused:.2f} x")


if __name__ == "__main__":
    main()
