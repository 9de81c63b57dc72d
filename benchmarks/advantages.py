"""Time of each role-separated estimator beside verl's ``reinforce_plus_plus`` and ``grpo``.

Run by hand: ``python benchmarks/advantages.py``. One thread by default: Ray gives the process that
computes advantages one. All take turns in every repeat, and the median of their CPU time counts, so that
other load on the machine changes little.

Measured on two CPU cores without a GPU:

512 trajectories of 4,096 response tokens (`--rows 512`), CPU time on one thread, while other work used the cores too:

| estimator | CPU ms | times faster than verl's `reinforce_plus_plus` | than verl's `grpo` |
|---|---|---|---|
| verl's `reinforce_plus_plus` | 314 | 1 | 0.04 |
| verl's `grpo` | 14 | 22 | 1 |
| `role_rae` | 63 | 5.0 | 0.22 |
| `role_rloo` | 73 | 4.3 | 0.19 |
| `role_grpo`, with and without KL in the reward | 79 | 4.0 | 0.18 |
| `role_reinforce_pp`, with and without KL in the reward | 159 | 2.0 | 0.09 |
| `role_gae`, lambda 1 and 0.95 | 188 | 1.7 | 0.07 |

They run once in a step of minutes, so they are written as plainly as their formulas: the tokens of a role stand one
after the other in float64, and groups are compared in a loop over them.
"""

from __future__ import annotations

import argparse
import statistics
import time
import types
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from medserl_agentloop.core.advantages import ROLE_ESTIMATORS, BaselineState, RoleBatch
from medserl_agentloop.core.config import CreditSettings
from medserl_agentloop.games.medical.types import Category, Role

GAMES_PER_PROMPT = 8
FAR = "reinforce_plus_plus"
NEAR = "grpo"


def synthetic_batch(rows: int, tokens: int, seed: int = 0) -> RoleBatch:
    """Games as they come: two turns of random length around an observation, a reward on each last token."""
    generator = torch.Generator().manual_seed(seed)
    position = torch.arange(tokens)
    lengths = torch.randint(tokens // 8, 3 * tokens // 8, (3, rows, 1), generator=generator)
    attacked, observed, assessed = lengths.cumsum(0).clamp_max(tokens)
    role_ids = torch.zeros(rows, tokens, dtype=torch.int64)
    role_ids[position < attacked] = Role.ATTACKER.id
    role_ids[(position >= observed) & (position < assessed)] = Role.ASSESSOR.id
    rewards = torch.zeros(rows, tokens)
    won = torch.randint(0, 2, (rows, 1), generator=generator) * 2.0 - 1.0
    rewards.scatter_(1, attacked - 1, -won)
    rewards.scatter_(1, assessed - 1, won)
    categories = list(Category)
    prompts = [row // GAMES_PER_PROMPT for row in range(rows)]
    return RoleBatch(
        rewards=rewards,
        mask=(role_ids > 0).long(),
        role_ids=role_ids,
        groups=[str(prompt) for prompt in prompts],
        roles=[role.value for role in Role],
        kinds=[categories[prompt % len(categories)].value for prompt in prompts],
        values=torch.randn(rows, tokens, generator=generator),
    )


def contestants(sparse: RoleBatch) -> dict[str, Callable[[], object]]:
    """What is timed, by the name it has in the table; verl's two first."""
    config = types.SimpleNamespace(gamma=1.0)
    index = np.array(sparse.groups, dtype=object)
    kl = 0.01 * torch.rand(sparse.rewards.shape, generator=torch.Generator().manual_seed(1))
    dense = replace(sparse, rewards=sparse.rewards - kl * sparse.mask)

    def verls(name: str) -> Callable[[], object]:
        estimator = get_adv_estimator_fn(name)
        return lambda: estimator(
            token_level_rewards=sparse.rewards, response_mask=sparse.mask, index=index, config=config
        )

    def ours(name: str, batch: RoleBatch) -> Callable[[], object]:
        return lambda: ROLE_ESTIMATORS[name](batch, CreditSettings(), BaselineState())

    return {
        f"verl {FAR}": verls(FAR),
        f"verl {NEAR}": verls(NEAR),
        **{name: ours(name, sparse) for name in sorted(ROLE_ESTIMATORS)},
        "role_gae, lambda 0.95": ours("role_gae", replace(sparse, lam=0.95)),
        "role_reinforce_pp, KL in reward": ours("role_reinforce_pp", dense),
        "role_grpo, KL in reward": ours("role_grpo", dense),
    }


def medians(timed: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Seconds of CPU time of the median of ``repeats`` calls, after one that is not counted."""
    took: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(repeats + 1):
        for name, call in timed.items():
            started = time.process_time()
            call()
            took[name].append(time.process_time() - started)
    return {name: statistics.median(all_of_it[1:]) for name, all_of_it in took.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024, help="trajectories")
    parser.add_argument("--tokens", type=int, default=4096, help="response tokens of each")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    seconds = medians(contestants(synthetic_batch(options.rows, options.tokens)), options.repeats)
    table = Table(
        title=f"{options.rows} x {options.tokens} tokens, {options.threads} thread(s), {options.repeats} times"
    )
    table.add_column("estimator")
    for header in ("CPU ms", f"times faster than {FAR}", f"times faster than {NEAR}"):
        table.add_column(header, justify="right")
    for name, took in seconds.items():
        ratios = [f"{seconds[f'verl {other}'] / took:.2f}" for other in (FAR, NEAR)]
        table.add_row(name, f"{took * 1e3:.1f}", *ratios)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
