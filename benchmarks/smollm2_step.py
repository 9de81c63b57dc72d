"""Processor time of SmolLM2's update as the recipe ``learn_smollm2`` has it, and without one of its
savings at a time.

    python -m benchmarks.smollm2_step [--tokens 2048] [--rounds 3]

One micro-batch of conversations of 128 tokens, forward and backward, on one thread, each way in a
process of its own. Processor time, user and system, is hardly moved by other work on the machine.
The model needs no warm start for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from time import process_time

import torch
import typer
import verl  # noqa: F401  (its plugin makes torchvision importable where SGLang is installed)
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from medserl_agentloop.paths import resource

CONTEXT = 128
GLIBC, OWN_PASS, FP32 = (
    "without glibc's settings",
    "with log-probs in a pass of their own",
    "in fp32",
)
WAYS = ("the recipe", GLIBC, OWN_PASS, FP32)


def measure(model_path: Path, way: str, tokens: int, rounds: int) -> float:
    """Seconds of processor time of one micro-batch, the mean of some after one that warms up."""
    torch.set_num_threads(1)
    dtype = torch.float32 if way == FP32 else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype)
    inputs = {
        "input_ids": torch.randint(
            model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0)
        ),
        "position_ids": torch.arange(tokens)[None] % CONTEXT,
        "use_cache": False,
    }

    def log_probs() -> torch.Tensor:
        logits = model(**inputs).logits[0, :-1].float()
        return -torch.nn.functional.cross_entropy(
            logits, inputs["input_ids"][0, 1:], reduction="none"
        )

    def step() -> None:
        if way == OWN_PASS:
            with torch.no_grad():
                log_probs()
        log_probs().mean().backward()
        model.zero_grad()

    step()
    started = process_time()
    for _ in range(rounds):
        step()
    return (process_time() - started) / rounds


def main(
    model: Path = Path("models/smollm2"),
    tokens: int = 2048,
    rounds: int = 3,
    way: str | None = None,
) -> None:
    if way is not None:
        print(measure(model, way, tokens, rounds))
        return
    settings = OmegaConf.load(resource("recipes/learn_smollm2.yaml")).hydra.job.env_set
    recipe = 0.0
    for name in WAYS:
        command = [
            sys.executable,
            __file__,
            f"--model={model}",
            f"--tokens={tokens}",
            f"--rounds={rounds}",
        ]
        env = {**os.environ, **({} if name == GLIBC else settings)}
        run = subprocess.run(
            [*command, f"--way={name}"], env=env, stdout=subprocess.PIPE, text=True, check=True
        )
        seconds = float(run.stdout.splitlines()[-1])
        recipe = recipe or seconds
        print(
            f"{name}: {seconds / recipe:.2f} x, {1000 * seconds / tokens:.1f} ms a token",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)
