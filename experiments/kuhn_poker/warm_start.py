"""A tiny model that plays Kuhn poker by the rules and otherwise at random. Writes
``models/kuhn_poker``.

It is taught one random policy of the twelve information sets after the other, so that it learns to
tell them apart, and at last both legal moves equally often. A model that was only taught the last
cannot find its card in forty steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from experiments.kuhn_poker.exploitability import (
    context_of,
    information_sets,
    nash_conv,
    policy_of,
    said_as,
)
from medserl_agentloop.games.kuhn_poker import ACTIONS
from medserl_agentloop.testing import tiny_tokenizer

STEPS, RANDOM, OF_ONE_POLICY = 4000, 3400, 170
"""Steps in all, those on random policies, and how many of them each random policy gets."""


def main(folder: str = "models/kuhn_poker") -> None:
    """Train the model and write it.

    Args:
        folder: Where to.
    """
    torch.set_num_threads(1)  # small matrices: more threads only wait for each other
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=1024,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            attn_implementation="sdpa",
        )
    ).float()
    lessons = [
        (context_of(place, tokenizer), said_as(move, tokenizer))
        for place in information_sets()
        for move in ACTIONS["bet" in place[1].split()]
    ]
    width = max(len(context) + len(answer) for context, answer in lessons)
    ids = torch.full((len(lessons), width), tokenizer.pad_token_id)
    said = torch.zeros(len(lessons), width)
    for row, (context, answer) in enumerate(lessons):
        ids[row, : len(context) + len(answer)] = torch.tensor(context + answer)
        said[row, len(context) : len(context) + len(answer)] = 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in range(STEPS):
        if step % OF_ONE_POLICY == 0:
            active = (
                torch.rand(len(lessons) // 2)
                if step < RANDOM
                else torch.full((len(lessons) // 2,), 0.5)
            )
            chances = torch.stack([1 - active, active], 1).flatten()
        logits = model(ids, attention_mask=(ids != tokenizer.pad_token_id).long()).logits[:, :-1]
        log_probs = (logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0] * said[:, 1:]).sum(
            -1
        )
        loss = -(chances * log_probs).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    model.eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(
        f"{Path(folder)}: NashConv {nash_conv(policy_of(model, tokenizer)):.3f} (uniform play has "
        "0.917)"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
