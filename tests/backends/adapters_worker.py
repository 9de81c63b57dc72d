"""verl's real worker and engine with an adapter for each role, in this process and without Ray.

    python adapters_worker.py FOLDER

Writes to FOLDER a checkpoint of a step whose adapters have been updated, the log-probs of a packed row and its
contexts, what an update for each role alone changed, and what one changed that trains the first role only.
"""

import json
import os
import pickle
import sys
from functools import cache
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # What verl's single controller sets for a worker, for a world of one.
    os.environ |= {"VERL_PLATFORM": "cpu", "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WG_BACKEND": "ray"}

import torch
from omegaconf import open_dict
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.workers.engine_workers import ActorRolloutRefWorker

from medserl_agentloop.core.columns import TOKEN_ROLES, restarted, token_roles
from medserl_agentloop.core.config import ROLE_ADAPTERS
from medserl_agentloop.testing.tiny import compose_run

LORA = ("lora_rank=4", "lora_alpha=8", "target_modules=all-linear")
LENGTHS = (7, 9, 6, 11)  # prompt and answer of the first role's context, then of the second's


@cache
def composed() -> bytes:
    return pickle.dumps(
        compose_run(
            "+recipes=quickstart",
            "selfplay.adapters=per_role",
            "actor_rollout_ref.actor.optim.weight_decay=0.1",
            "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
            *(f"actor_rollout_ref.model.{override}" for override in LORA),
        )
    )


def engine(trained: dict[str, bool]) -> Any:
    run = pickle.loads(composed())
    with open_dict(run.actor_rollout_ref.model.lora) as lora:
        lora[ROLE_ADAPTERS] = trained
    worker = ActorRolloutRefWorker(config=run.actor_rollout_ref, role="actor")
    worker.init_model()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in worker.actor.engine.module.named_parameters():
            if "lora_B" in name:
                own = weight.to_local()
                own += torch.randn_like(own) * 0.05
    return worker


def row(trained_roles: tuple[int, ...] = (1, 2), advantage_of_the_second: float = 1.0) -> TensorDict:
    ids = torch.randint(10, 90, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    first, answer, second, last = LENGTHS
    role_ids = torch.cat([torch.full((n,), role) for n, role in ((answer, 1), (second, 0), (last, 2))])
    lengths = torch.tensor([first + answer, second + last])
    mask = sum((role_ids == role).long() for role in trained_roles)
    columns = {
        "prompts": ids[:first],
        "responses": ids[first:],
        "input_ids": ids,
        "position_ids": restarted(lengths),
        TOKEN_ROLES: token_roles(lengths, role_ids),
        "response_mask": mask,
        "loss_mask": mask,
        "old_log_probs": torch.full(mask.shape, -3.0),
        "advantages": torch.where(role_ids == 2, advantage_of_the_second, 1.0),
    }
    nested = {name: torch.nested.as_nested_tensor([column], layout=torch.jagged) for name, column in columns.items()}
    batch = TensorDict(nested, batch_size=1)
    tensordict_utils.assign_non_tensor(
        batch,
        calculate_entropy=False,
        temperature=1.0,
        global_batch_size=1,
        mini_batch_size=1,
        epochs=1,
        seed=0,
        micro_batch_size_per_gpu=1,
        dataloader_kwargs={},
    )
    return batch


def adapters(worker: Any) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in worker.actor.engine._adapters()}


def gradients(worker: Any, batch: TensorDict) -> dict[str, float]:
    """By adapter: the largest gradient, after clipping, of one update."""
    found: dict[str, float] = {"default": 0.0, "assessor": 0.0}
    step = worker.actor.engine.optimizer.step

    def watched() -> None:
        for name, weight in worker.actor.engine.module.named_parameters():
            if weight.grad is not None:
                adapter = "assessor" if ".assessor." in name else "default"
                found[adapter] = max(found[adapter], float(weight.grad.full_tensor().abs().max()))
        step()

    worker.actor.engine.optimizer.step = watched
    worker.update_actor(batch)
    return found


def changed(worker: Any, roles: tuple[int, ...]) -> dict[str, float]:
    """By adapter: the largest change of a weight in one update on the tokens of these roles."""
    before = adapters(worker)
    worker.update_actor(row(roles))
    after = adapters(worker)
    largest: dict[str, float] = {}
    for name, tensor in after.items():
        adapter = name.partition(":")[0]
        largest[adapter] = max(largest.get(adapter, 0.0), float((tensor - before[name]).abs().max()))
    return largest


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    both = {"attacker": True, "assessor": True}
    worker = engine(both)
    worker.update_actor(row())  # so that the optimizer, too, would move both adapters on
    worker.save_checkpoint(f"{folder}/global_step_1/actor", global_step=1)
    found: dict[str, Any] = {"ids": row()["input_ids"].unbind()[0].tolist()}
    found["log_probs"] = worker.compute_log_prob(row())["log_probs"].unbind()[0].tolist()
    base = row()
    tensordict_utils.assign_non_tensor(base, no_lora_adapter=True, compute_loss=False)
    found["of_base"] = worker.compute_log_prob(base)["log_probs"].unbind()[0].tolist()
    found["gradients_of_the_first_alone"] = gradients(engine(both), row((1,)))
    found["gradients"] = gradients(engine(both), row())
    found["gradients_beside_a_huge_one"] = gradients(engine(both), row(advantage_of_the_second=1e7))
    found["frozen"] = changed(engine({"attacker": True, "assessor": False}), (1, 2))
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
