"""Attention over packs on the CPU: one sequence at a time against all behind a mask.

``python -m benchmarks.packed_attention`` prints, for packs of more and more sequences, the seconds of a forward and
backward pass of a small Qwen3 with ``sdpa`` and with ``packed_sdpa``, taken in turns, and their ratio.

Measured on two CPU cores without a GPU:

A small Qwen3 (the tiny player's size), forward and backward over a pack of sequences of 256 tokens, fp32, one thread:
Transformers' SDPA with a mask over the whole pack, and SDPA for each sequence alone, as the CPU engines do it. Two
runs, while other work used the cores too:

| sequences in the pack | SDPA over the pack, s | each sequence alone, s | ratio |
|---|---|---|---|
| 1 | 0.04 | 0.03 to 0.04 | 1.0 to 1.1 |
| 4 | 0.20 | 0.12 to 0.13 | 1.6 |
| 16 | 2.0 to 2.2 | 0.58 to 0.66 | 3.3 to 3.4 |
| 64 | 29 to 30 | 3.3 to 3.4 | 8.6 to 8.9 |
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from medserl_agentloop.backends import packed_attention

SEQUENCE, ROUNDS = 256, 5


def model_with(attention: str) -> Qwen3ForCausalLM:
    """A Qwen3 of the tiny player's size."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 4, "head_dim": 32}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=1600, **sizes, **heads, attn_implementation="sdpa")).float()
    return packed_attention.instead_of_sdpa(model) if attention == packed_attention.NAME else model


def seconds(model: Qwen3ForCausalLM, sequences: int) -> float:
    """Of one forward and backward pass over a pack."""
    positions = torch.arange(SEQUENCE).repeat(sequences)[None]
    ids = torch.randint(0, 1600, positions.shape, generator=torch.Generator().manual_seed(0))
    started = time.perf_counter()
    torch.autograd.backward(model(input_ids=ids, position_ids=positions, use_cache=False).logits.logsumexp(-1).mean())
    return time.perf_counter() - started


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16, 64])
    packs = parser.parse_args().sequences
    models = {name: model_with(name) for name in ("sdpa", packed_attention.NAME)}
    print(f"sequences of {SEQUENCE} tokens   sdpa, s   {packed_attention.NAME}, s   ratio")
    for sequences in packs:
        taken: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(ROUNDS if sequences < 64 else 1):
            for name, model in models.items():
                taken[name].append(seconds(model, sequences))
        sdpa, packed = (median(times) for times in taken.values())
        print(f"{sequences:23}   {sdpa:7.2f}   {packed:14.2f}   {sdpa / packed:5.1f}")


if __name__ == "__main__":
    main()
