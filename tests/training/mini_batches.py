"""Writes how many games of each mini-batch have two turns, loaded into every process of a run
through
VERL_USE_EXTERNAL_MODULES. Verl makes its mini-batches inside the workers, so they are counted
there."""

import os  # noqa: I001
from typing import Any

# first: verl looks for its platform while it is being imported
import medserl_agentloop.plugin  # noqa: F401
from verl.workers.engine.base import BaseEngine

train_batch = BaseEngine.train_batch


def counted(self: Any, data: Any, loss_function: Any) -> Any:
    two_turns = sum({1, 2} <= set(row.tolist()) for row in data["role_ids"].unbind())
    with open(os.environ["MINI_BATCHES"], "a") as file:
        file.write(f"{two_turns} {len(data)}\n")
    return train_batch(self, data, loss_function)


BaseEngine.train_batch = counted
