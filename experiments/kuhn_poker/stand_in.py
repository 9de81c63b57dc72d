"""Settings for self-play in Kuhn poker, in minutes: ``python -m experiments.kuhn_poker.stand_in
--beta1 0.9``.

Trains the shipped model as a run does, with ``role_rae``, an anchor and one update of sampled games
a step, but asks the model only for its twelve policies, in one batch, and draws whole answers. verl
has no part in it.
"""

from __future__ import annotations

import argparse
import math
import random
from itertools import permutations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.kuhn_poker import exploitability as exact
from medserl_agentloop.games.kuhn_poker import ACTIONS, CARDS, winnings

PLACES = exact.information_sets()
DEALS = list(permutations(CARDS, 2))
ILLEGAL, ITS_TOKENS = 2, 5


class Answers:
    """The three things a player may do at each information set: the passive move, the active one,
    anything else.
    """

    def __init__(self, model: str) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model)
        moves = [(place, move) for place in PLACES for move in ACTIONS["bet" in place[1].split()]]
        rows = [
            (exact.context_of(place, tokenizer), exact.said_as(move, tokenizer))
            for place, move in moves
        ]
        width = max(len(context) + len(answer) for context, answer in rows)
        self.ids = torch.full((len(rows), width), tokenizer.pad_token_id)
        self.said = torch.zeros(len(rows), width)
        for row, (context, answer) in enumerate(rows):
            self.ids[row, : len(context) + len(answer)] = torch.tensor(context + answer)
            self.said[row, len(context) : len(context) + len(answer)] = 1
        self.tokens = torch.nn.functional.pad(
            self.said.sum(-1).view(-1, 2), (0, 1), value=ITS_TOKENS
        )

    def log_probs(self, model: torch.nn.Module) -> torch.Tensor:
        """(12, 3)."""
        log_probs = (
            model(input_ids=self.ids)
            .logits[:, :-1]
            .log_softmax(-1)
            .gather(-1, self.ids[:, 1:, None])[..., 0]
        )
        legal = (log_probs * self.said[:, 1:]).sum(-1).view(-1, 2)
        return torch.cat(
            [legal, torch.log1p(-legal.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))], 1
        )


def play(
    cards: tuple[str, str], chances: list[list[float]], rng: random.Random
) -> tuple[list[tuple[int, int]], int]:
    """The moves of a game, each as the numbers of its place and its answer, and what the first
    player wins.
    """
    made, moves = list[tuple[int, int]](), tuple[str, ...]()
    while (won := winnings(cards, moves)) is None:
        mover = len(moves) % 2
        at = PLACES.index((cards[mover], " ".join(moves)))
        answer = rng.choices(range(3), chances[at])[0]
        made.append((at, answer))
        if answer == ILLEGAL:
            return made, (-2, 2)[mover]
        moves += (ACTIONS["bet" in moves][answer],)
    return made, won


def train(options: argparse.Namespace, seed: int) -> list[exact.Policy]:
    """The policies before each step and after the last."""
    rng = random.Random(seed)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    answers = Answers(options.model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.lr, betas=(options.beta1, options.beta2)
    )
    start = answers.log_probs(model).detach()
    baselines: dict[tuple[int, tuple[str, str]], float] = {}
    policies: list[exact.Policy] = []
    for step in range(options.steps + 1):
        log_probs = answers.log_probs(model)
        chances = log_probs.detach().exp()
        policies.append(
            dict(zip(PLACES, (chances[:, 1] / chances[:, :2].sum(-1)).tolist(), strict=True))
        )
        times, paid = torch.zeros(len(PLACES), 3), torch.zeros(len(PLACES), 3)
        earned: dict[tuple[int, tuple[str, str]], list[float]] = {}
        for number in range(options.games):
            cards = DEALS[number % len(DEALS)]
            moves, won = play(cards, chances.tolist(), rng)
            for turn, answer in enumerate(moves):
                player = turn % 2
                reward = won * (1 - 2 * player)
                times[answer] += 1
                paid[answer] += reward - baselines.get((player, cards), 0.0)
                if turn == player:  # its first turn
                    earned.setdefault((player, cards), []).append(reward)
        for kind, rewards in earned.items():
            kept = options.rae_decay ** len(rewards)
            baselines[kind] = kept * baselines.get(kind, 0.0) + (1 - kept) * sum(rewards) / len(
                rewards
            )
        done = step / options.steps
        apart = log_probs - start
        anchor = (
            options.anchor * (1 + (options.anchor_end - 1) * done) * ((-apart).exp() + apart - 1)
        )  # low_var_kl
        loss = (times * anchor - paid * log_probs).sum() / (times * answers.tokens).sum()
        least = options.min_lr_ratio
        falling = least + (1 - least) * (1 + math.cos(math.pi * done)) / 2
        optimizer.param_groups[0]["lr"] = options.lr * falling * min(1.0, step / options.warmup)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return policies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/kuhn_poker")
    numbers = {
        "steps": 200,
        "games": 240,
        "lr": 7e-4,
        "min-lr-ratio": 0.05,
        "warmup": 5,
        "beta1": 0.0,
        "beta2": 0.95,
    }
    for name, default in {
        **numbers,
        "anchor": 0.2,
        "anchor-end": 0.5,
        "rae-decay": 0.95,
        "seeds": 3,
    }.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)  # small matrices: more threads only wait for each other
    for seed in range(options.seeds):
        policies = train(options, seed)
        late = exact.average_policy(policies[len(policies) // 2 :])
        kinds = {
            "last": policies[-1],
            "average": exact.average_policy(policies),
            "of the second half": late,
        }
        found = (f"{kind} {exact.nash_conv(policy):.3f}" for kind, policy in kinds.items())
        print(f"seed {seed}: {', '.join(found)}, value {exact.value_of(late):.3f}", flush=True)


if __name__ == "__main__":
    main()
