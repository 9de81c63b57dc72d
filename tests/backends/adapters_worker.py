"""verl's real worker and engine with an adapter for each role, in this process and without Ray.

Writes a checkpoint whose adapters are not zero, and log-probs, gradients, changes and answers.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch
from adapters import batch, game
from adapters import worker as all_weights
from omegaconf import open_dict
from safetensors.torch import save_file
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.workers.config import RolloutConfig
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.padding import response_from_nested

from medserl_agentloop.backends.cpu_rollout import CpuRolloutServer, adapter_states
from medserl_agentloop.core.config import ADAPTERS_FOLDER, ROLE_ADAPTERS
from medserl_agentloop.testing import compose_run

LORA = ("lora_rank=4", "lora_alpha=8", "target_modules=all-linear")
LENGTHS = (7, 9, 6, 11)  # prompt and answer of the first role's context, then of the second's


def engine(trained: dict[str, float], start: Path | None = None) -> Any:
    """verl's worker, with random adapters or ``start``; one for both roles if none is named."""
    run = compose_run(
        "+recipes=own_notes",
        f"selfplay.adapters={'per_role' if trained else 'shared'}",
        "actor_rollout_ref.actor.optim.weight_decay=0.1",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
        *(f"actor_rollout_ref.model.{override}" for override in LORA),
        *(() if start is None else (f"actor_rollout_ref.model.lora_adapter_path={start}",)),
    )
    if trained:
        with open_dict(run.actor_rollout_ref.model.lora) as lora:
            lora[ROLE_ADAPTERS] = trained
    worker = ActorRolloutRefWorker(config=run.actor_rollout_ref, role="actor")
    worker.init_model()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in worker.actor.engine.module.named_parameters():
            if "lora_B" in name and start is None:
                own = weight.to_local()
                own += torch.randn_like(own) * 0.05
    return worker


def row(first: float | None = 1.0, second: float | None = 1.0) -> TensorDict:
    """A game with an advantage of each role that is trained."""
    advantages = {1: first, 2: second}
    return batch([game(LENGTHS, 1, {k: v for k, v in advantages.items() if v is not None})])


def adapters(worker: Any) -> dict[str, torch.Tensor]:
    weights, _ = worker.actor.engine.get_per_tensor_param(base_sync_done=True)
    return {name: tensor.clone() for name, tensor in weights}


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


def changed(worker: Any) -> dict[str, float]:
    """By adapter: the largest change of a weight in one update."""
    before = adapters(worker)
    worker.update_actor(row())
    largest: dict[str, float] = {}
    for name, tensor in adapters(worker).items():
        adapter, moved = name.partition(":")[0], float((tensor - before[name]).abs().max())
        largest[adapter] = max(largest.get(adapter, 0.0), moved)
    return largest


async def answers(worker: Any, updates: int) -> dict[str, list[list[Any]]]:
    """By adapter: ids and log-probs of the rollout, before the updates and after."""
    engine = worker.actor.engine
    server = CpuRolloutServer(RolloutConfig(name="cpu_hf", load_format="auto"), engine.model_config)
    prompt = row()["input_ids"].unbind()[0].tolist()
    greedy = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    found: dict[str, list[list[Any]]] = {}
    for step in range(updates + 1):
        weights, config = engine.get_per_tensor_param(base_sync_done=True)
        await server.update_adapters(adapter_states(weights), config, step)
        for adapter in (None, "default", "assessor") if step in (0, updates) else ():
            said = await server.generate(prompt, {**greedy, "adapter": adapter}, "asked")
            found.setdefault(str(adapter), []).append([said.token_ids, said.log_probs])
        worker.update_actor(row())
    return found


def gradients_with(old_log_probs: str) -> list[torch.Tensor]:
    """Of one update of all weights, with any old log-probs, computed ones, or its own."""
    worker, rows = all_weights("all weights"), row()
    if old_log_probs == "own":
        rows["rollout_log_probs"] = rows.pop("old_log_probs")
    if old_log_probs == "computed":
        found = worker.compute_log_prob(rows.copy())["log_probs"]
        rows["old_log_probs"] = response_from_nested(found, rows["response_mask"])
    gradients = []
    weights = list(worker.actor.engine.module.parameters())
    worker.actor.engine.optimizer.step = lambda: gradients.extend(
        weight.grad.full_tensor() for weight in weights
    )
    worker.update_actor(rows)
    return gradients


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    both: dict[str, float] = {"attacker": 1, "assessor": 1}
    worker = engine(both)
    worker.save_checkpoint(f"{folder}/actor", global_step=1)
    found: dict[str, Any] = {"ids": row()["input_ids"].unbind()[0].tolist()}
    found["log_probs"] = worker.compute_log_prob(row())["log_probs"].unbind()[0].tolist()
    base = row()
    tensordict_utils.assign_non_tensor(base, no_lora_adapter=True, compute_loss=False)
    found["of_base"] = worker.compute_log_prob(base)["log_probs"].unbind()[0].tolist()
    found["answers"] = asyncio.run(answers(engine(both), updates=10))
    found["gradients_of_the_first_alone"] = gradients(engine(both), row(second=None))
    found["gradients"] = gradients(engine(both), row())
    found["gradients_beside_a_huge_one"] = gradients(engine(both), row(second=1e7))
    computed, own, others = map(gradients_with, ("computed", "own", "any"))
    found["own_log_probs"] = [all(map(torch.equal, computed, of)) for of in (own, others)]
    found["frozen"] = changed(engine({"attacker": 1, "assessor": 0}))
    found["at_a_quarter"] = changed(engine({"attacker": 1, "assessor": 0.25}))
    one = engine({})
    one.save_checkpoint(f"{folder}/one/actor", global_step=1)
    found["log_probs_of_one"] = one.compute_log_prob(row())["log_probs"].unbind()[0].tolist()
    started = engine(both, start=folder / "actor" / ADAPTERS_FOLDER / "attacker")
    save_file(adapters(started), folder / "started.safetensors")
    (folder / "answers.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
