"""Processor time of SmolLM2's update as the recipe ``learn_smollm2`` has it, and without one of its savings at a time.

    python -m benchmarks.smollm2_step [--tokens 2048] [--rounds 3]

One micro-batch of conversations of 128 tokens, forward and backward, on one thread, each way in a process of its own.
Processor time, user and system, is hardly moved by other work on the machine. The model needs no warm start for it.
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
from transformers import AutoModelForCausalLM

CONTEXT = 128
KEPT = {f"MALLOC_{of}_THRESHOLD_": "4294967296" for of in ("MMAP", "TRIM")}
WAYS = {
    "as in the recipe": "",
    "glibc gives memory back": "gives back",
    "log-probs in a pass of their own": "own pass",
    "fp32": "fp32",
}


def measure(model_path: Path, way: str, tokens: int, rounds: int) -> float:
    """Seconds of processor time of one micro-batch, the mean of some after one that warms up."""
    torch.set_num_threads(1)
    dtype = torch.float32 if way == "fp32" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype)
    inputs = {
        "input_ids": torch.randint(model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0)),
        "position_ids": torch.arange(tokens)[None] % CONTEXT,
        "use_cache": False,
    }

    def log_probs() -> torch.Tensor:
        logits = model(**inputs).logits[0, :-1].float()
        return -torch.nn.functional.cross_entropy(logits, inputs["input_ids"][0, 1:], reduction="none")

    def step() -> None:
        if way == "own pass":
            with torch.no_grad():
                log_probs()
        log_probs().mean().backward()
        model.zero_grad()

    step()
    started = process_time()
    for _ in range(rounds):
        step()
    return (process_time() - started) / rounds


def main(model: Path = Path("models/smollm2"), tokens: int = 2048, rounds: int = 3, way: str | None = None) -> None:
    if way is not None:
        print(measure(model, way, tokens, rounds))
        return
    recipe = 0.0
    for name, changed in WAYS.items():
        command = [sys.executable, __file__, f"--model={model}", f"--tokens={tokens}", f"--rounds={rounds}"]
        env = {**os.environ, **({} if changed == "gives back" else KEPT)}
        run = subprocess.run([*command, f"--way={changed}"], env=env, stdout=subprocess.PIPE, text=True, check=True)
        seconds = float(run.stdout.splitlines()[-1])
        recipe = recipe or seconds
        print(f"{name}: {seconds / recipe:.2f} x, {1000 * seconds / tokens:.1f} ms a token", flush=True)


if __name__ == "__main__":
    typer.run(main)
