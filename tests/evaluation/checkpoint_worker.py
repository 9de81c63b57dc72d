"""Checkpoints by verl's real worker and engine, in this process and without Ray: the tiny player, slightly changed.

A program of its own because verl binds a process to one platform and one process group.

    python checkpoint_worker.py '{"FOLDER": ["OVERRIDE", ...], ...}'
"""

import json
import os
import sys

# What verl's single controller sets for a worker, for a world of one.
os.environ |= {"VERL_PLATFORM": "cpu", "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WG_BACKEND": "ray"}

import torch
from verl.workers.engine_workers import ActorRolloutRefWorker

from medserl_agentloop.testing.tiny import compose_run

CHANGE = 0.015  # standard deviation; enough to change answers, and small enough that the player still plays


def save(folder: str, overrides: list[str]) -> None:
    run = compose_run("+recipes=quickstart", *overrides)
    worker = ActorRolloutRefWorker(config=run.actor_rollout_ref, role="actor")
    worker.init_model()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in worker.actor.engine.module.named_parameters():
            if weight.requires_grad:
                own = weight.to_local() if hasattr(weight, "to_local") else weight
                own += torch.randn_like(own) * CHANGE * (4 if "lora_" in name else 1)
    worker.save_checkpoint(f"{folder}/actor", global_step=1)


def main() -> None:
    torch.set_num_threads(1)
    for folder, overrides in json.loads(sys.argv[1]).items():
        save(folder, overrides)


if __name__ == "__main__":
    main()
