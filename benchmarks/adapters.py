"""Measure the cost of an adapter for each role in an update, beside one adapter and beside all
weights.

    python benchmarks/adapters.py [--rounds 7] [--games 32]

One packed batch of two-turn games on the tiny player, through verl's worker, engine and optimizer.
Each round times all three; printed are the medians, and ratios within the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
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
from omegaconf import open_dict
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.workers.engine_workers import ActorRolloutRefWorker

from medserl_agentloop.core.columns import TOKEN_ROLES, restarted, token_roles
from medserl_agentloop.core.config import ROLE_ADAPTERS
from medserl_agentloop.core.loss import selfplay_loss
from medserl_agentloop.testing import compose_run

LENGTHS = (150, 120, 150, 60)  # prompt and answer of the attacker's context, then of the assessor's
LORA = ("lora_rank=32", "lora_alpha=64", "target_modules=all-linear")
VARIANTS = {
    "all weights": (),
    "one adapter": (
        "actor_rollout_ref.model.lora.merge=true",
        *(f"actor_rollout_ref.model.{of}" for of in LORA),
    ),
    "an adapter for each role": (
        "selfplay.adapters=per_role",
        *(f"actor_rollout_ref.model.{of}" for of in LORA),
    ),
}


def worker(name: str) -> Any:
    run = compose_run("+recipes=own_notes", *VARIANTS[name])
    if name == "an adapter for each role":
        with open_dict(run.actor_rollout_ref.model.lora) as lora:
            lora[ROLE_ADAPTERS] = {"attacker": True, "assessor": True}
    made = ActorRolloutRefWorker(config=run.actor_rollout_ref, role="actor")
    made.init_model()
    made.set_loss_fn(partial(selfplay_loss, made.loss_fn.keywords["config"], (1, 2)))
    return made


def game(
    lengths: tuple[int, int, int, int], seed: int, advantages: Mapping[int, float]
) -> dict[str, torch.Tensor]:
    """The columns of a game of random tokens: prompts and answers of two roles.

    ``advantages`` of those trained.
    """
    first, answer, second, last = lengths
    ids = torch.randint(10, 90, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    role_ids = torch.cat(
        [torch.full((n,), role) for n, role in ((answer, 1), (second, 0), (last, 2))]
    )
    contexts = torch.tensor([first + answer, second + last])
    mask = sum((role_ids == role).long() for role in advantages)
    return {
        "prompts": ids[:first],
        "responses": ids[first:],
        "input_ids": ids,
        "position_ids": restarted(contexts),
        "role_ids": role_ids,
        TOKEN_ROLES: token_roles(contexts, role_ids),
        "response_mask": mask,
        "loss_mask": mask,
        "old_log_probs": torch.full(role_ids.shape, -3.0),
        "advantages": torch.tensor([advantages.get(int(role), 0.0) for role in role_ids]),
    }


def batch(games: Sequence[Mapping[str, torch.Tensor]]) -> TensorDict:
    """The games as verl's worker gets them, one mini-batch with one micro-batch for each."""
    columns = {name: [row[name] for row in games] for name in games[0]}
    nested = {
        name: torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        for name, rows in columns.items()
    }
    found = TensorDict(nested, batch_size=len(games))
    tensordict_utils.assign_non_tensor(
        found,
        calculate_entropy=False,
        temperature=1.0,
        global_batch_size=len(games),
        mini_batch_size=len(games),
        epochs=1,
        seed=0,
        micro_batch_size_per_gpu=1,
        dataloader_kwargs={},
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--games", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds, signs = range(options.games), [1.0 - 2 * (seed % 2) for seed in range(options.games)]
    workers = {name: worker(name) for name in VARIANTS}
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(options.rounds + 1):
        for name, of in workers.items():
            rows = batch(
                [
                    game(LENGTHS, seed, {1: sign, 2: sign})
                    for seed, sign in zip(seeds, signs, strict=True)
                ]
            )
            started = time.process_time()
            of.update_actor(rows)
            seconds[name].append(time.process_time() - started)
    print(
        f"{options.games} games of {sum(LENGTHS)} tokens; seconds of a core per update, medians of "
        "the rounds"
    )
    for name, of in workers.items():
        engine, times = of.actor.engine, seconds[name][1:]  # the first round warms up
        trained = [weight for weight in engine.module.parameters() if weight.requires_grad]
        ratio = statistics.median(
            a / b for a, b in zip(times, seconds["one adapter"][1:], strict=True)
        )
        state = sum(
            w.numel() * 16 for w in trained
        )  # weight, gradient, AdamW's two moments: 4 bytes each
        print(
            f"{name:26} {statistics.median(times):6.2f} s   {ratio:5.2f} of one adapter   "
            f"{sum(w.numel() for w in trained):9,} trained parameters   {state / 2**20:5.1f} MiB "
            "of training state"
        )


if __name__ == "__main__":
    main()
