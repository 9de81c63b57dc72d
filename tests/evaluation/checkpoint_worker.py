"""Checkpoints by verl's real worker and engine, in this process and without Ray: the tiny player, slightly changed.

The questions are ``{"FOLDER": ["OVERRIDE", ...], ...}``; nothing is answered.
"""

import json
import sys
from pathlib import Path

import torch
from verl.workers.engine_workers import ActorRolloutRefWorker

from medserl_agentloop.testing.tiny import compose_run

CHANGE = 0.015  # standard deviation; enough to change answers, and small enough that the player still plays


def save(folder: str, overrides: list[str]) -> None:
    run = compose_run("+recipes=own_notes", *overrides)
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
    folder = Path(sys.argv[1])
    for checkpoint, overrides in json.loads((folder / "questions.json").read_text()).items():
        save(checkpoint, overrides)
    (folder / "answers.json").write_text("{}")


if __name__ == "__main__":
    main()
