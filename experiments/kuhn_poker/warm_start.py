"""A tiny model that plays Kuhn poker by the rules and otherwise at random. Writes ``models/kuhn_poker``.

It is taught both legal moves at each of the twelve information sets, equally often, and to name its card.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from experiments.kuhn_poker.exploitability import context_of, information_sets, nash_conv, policy_of, said_as
from medserl_agentloop.core.encoding import ChatEncoder
from medserl_agentloop.core.interaction import Prompt, Turn
from medserl_agentloop.games.kuhn_poker import ACTIONS, CARDS
from medserl_agentloop.testing.tiny import tiny_tokenizer

STEPS = 400


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
    # Without these it would not look at its card, and forty steps are too few to find out that cards matter.
    question = {"role": "user", "content": "You hold {}. Which card?"}
    for card in CARDS:
        prompt = Prompt(({**question, "content": question["content"].format(card)},))
        lessons += [(ChatEncoder(tokenizer).opening(Turn("first", prompt, 8)).ids, said_as(card, tokenizer))] * 4
    width = max(len(context) + len(answer) for context, answer in lessons)
    ids = torch.full((len(lessons), width), tokenizer.pad_token_id)
    labels = torch.full((len(lessons), width), -100)
    for row, (context, answer) in enumerate(lessons):
        ids[row, : len(context) + len(answer)] = torch.tensor(context + answer)
        labels[row, len(context) : len(context) + len(answer)] = torch.tensor(answer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in range(STEPS):
        loss = model(ids, attention_mask=(ids != tokenizer.pad_token_id).long(), labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    model.eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{Path(folder)}: NashConv {nash_conv(policy_of(model, tokenizer)):.3f} (uniform play has 0.917)")


if __name__ == "__main__":
    main(*sys.argv[1:])
