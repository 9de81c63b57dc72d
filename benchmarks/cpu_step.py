"""What the CPU backend's own parts save in a training step.

    python benchmarks/cpu_step.py [--games 64] [--rounds 5]

One step's work on the tiny player, by the code that a run uses: sampling a turn of every game, log-probs of the games,
an update. Each is timed with all parts, and with one part as verl or Transformers has it, in turns; printed are medians
of CPU seconds and the ratios.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":  # what verl's single controller sets for a worker, in a world of one
    os.environ |= {"VERL_PLATFORM": "cpu", "WG_BACKEND": "ray", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}

import torch
from adapters import LENGTHS, batch, game, worker
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicLayer
from verl.utils import tensordict_utils
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from medserl_agentloop.backends import cpu_sampling
from medserl_agentloop.backends.cpu_engine import CpuFSDP2EngineWithLMHead
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


if __name__ == "__main__":
    main()
