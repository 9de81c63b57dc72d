"""Processor time of a self-play step of SmolLM2 with edits, as a share of one with whole notes.

    python -m benchmarks.edits_step [--games 8]

A step as ``cpu_smollm2`` has it: both roles' turns sampled together, then one pass forward and
backward over each role's context. Tokens are random, as many as turns on MEDEC's notes have
(experiments/real_notes): the model needs no warm start. One thread, fp32. Processor time, user and
system, is hardly moved by other work.
"""

from __future__ import annotations

from pathlib import Path
from time import process_time
from typing import Any

import torch
import typer
import verl  # noqa: F401  (its plugin makes torchvision importable where SGLang is installed)
from transformers import AutoModelForCausalLM

from medserl_agentloop.backends.cpu_sampling import SamplingRequest, SamplingSettings, sample_batch

TURNS = {
    "whole notes (brief)": ((239, 259), (232, 80)),
    "edits": ((415, 76), (398, 80)),
    "edits, asked for in one line": ((266, 76), (269, 80)),  # those of brief, with `parser: edits`
}
"""By format, the tokens of the prompt and of the answer, of the attacker's turn and of the
assessor's.
"""


def measure(model: Any, turns: tuple[tuple[int, int], ...], games: int) -> dict[str, float]:
    """Seconds of processor time of generation and of the update."""
    generator, vocabulary = torch.Generator().manual_seed(0), model.config.vocab_size

    def tokens(length: int) -> list[int]:
        ids: list[int] = torch.randint(vocabulary, (length,), generator=generator).tolist()
        return ids

    started = process_time()
    for prompt, answer in turns:
        requests = [SamplingRequest(tokens(prompt), answer, generator) for _ in range(games)]
        sample_batch(
            model.eval(),
            requests,
            SamplingSettings(ignore_eos=True),
            eos_token_ids=frozenset(),
            tokenizer=None,
        )
    sampled = process_time()
    for prompt, answer in turns * games:
        ids = torch.tensor([tokens(prompt + answer)])
        logits = model.train()(input_ids=ids, use_cache=False).logits[0, prompt - 1 : -1]
        torch.nn.functional.cross_entropy(logits, ids[0, prompt:]).backward()
    model.zero_grad()
    return {"generation": sampled - started, "update": process_time() - sampled}


def main(model: Path = Path("models/smollm2"), games: int = 8) -> None:
    torch.set_num_threads(1)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    measure(loaded, ((8, 2),), 1)
    first: dict[str, float] = {}
    for name, turns in TURNS.items():
        seconds = measure(loaded, turns, games)
        first = first or seconds
        ratios = [f"{part} {seconds[part] / first[part]:.2f} x" for part in seconds]
        print(
            f"{name}: {sum(seconds.values()) / sum(first.values()):.2f} x, {', '.join(ratios)}",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)
