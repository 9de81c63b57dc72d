"""One update of the tiny player by verl's real worker and engine, in this process and without Ray.

Answers, for each variant, with the SHA-256 of the updated weights and the gradient norm. A variant is
``{"rewards": {"attacker": x, "assessor": y}, "train": ..., "anchor": {...}, "void": bool}``.
"""

import hashlib
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import ActorRolloutRefWorker

from medserl_agentloop.core.advantages import ROLE_ESTIMATORS, BaselineState, RoleBatch
from medserl_agentloop.core.config import CreditSettings
from medserl_agentloop.core.loss import ANCHOR_COLUMN, anchor_coefficients, selfplay_loss
from medserl_agentloop.games.medical.types import Role
from medserl_agentloop.testing.tiny import compose_run

PROMPT, ATTACK, OBSERVATION, ASSESSMENT = 8, 6, 7, 5  # tokens of a trajectory's parts
GAMES = 4


def batch_of(run: DictConfig, variant: dict[str, Any]) -> TensorDict:
    """Four games whose tokens are random but the same in every variant."""
    generator = torch.Generator().manual_seed(0)
    response = ATTACK + OBSERVATION + ASSESSMENT
    ids = torch.randint(5, 800, (GAMES, PROMPT + response), generator=generator)
    noise = torch.randn(GAMES, response, generator=generator)
    roles = torch.tensor([Role.ATTACKER.id] * ATTACK + [0] * OBSERVATION + [Role.ASSESSOR.id] * ASSESSMENT)
    roles = roles.expand(GAMES, -1)
    generated = (roles > 0).long() * (not variant.get("void", False))
    mask = generated.clone()
    if variant.get("train", "both") != "both":
        mask *= roles == Role(variant["train"]).id
    rewards = torch.zeros(GAMES, response)
    rewards[:, ATTACK - 1] = variant["rewards"]["attacker"] * noise[:, 0]
    rewards[:, -1] = variant["rewards"]["assessor"] * noise[:, 1]
    credited = ROLE_ESTIMATORS["role_reinforce_pp"](
        RoleBatch(
            rewards,
            mask,
            roles,
            [r.value for r in Role],
            groups=["group"] * GAMES,
            kinds=["adversarial_benign"] * GAMES,
        ),
        CreditSettings(),
        BaselineState(),
    )
    positions = torch.cat([torch.arange(PROMPT + ATTACK), torch.arange(OBSERVATION + ASSESSMENT)]).expand(GAMES, -1)
    columns = {
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "input_ids": ids,
        "position_ids": positions,
        "response_mask": mask,
        "loss_mask": mask,
        "old_log_probs": -6.0 + 0.1 * noise,
        "ref_log_prob": -7.0 + 0.1 * noise,
        "advantages": credited.advantages,
    }
    if variant.get("anchor"):
        per_role = {Role(role).id: coefficient for role, coefficient in variant["anchor"].items()}
        columns[ANCHOR_COLUMN] = anchor_coefficients(roles, generated, per_role)
    nested = {
        name: torch.nested.as_nested_tensor(list(column.clone()), layout=torch.jagged)
        for name, column in columns.items()
    }
    batch = TensorDict(nested, batch_size=GAMES)
    tensordict_utils.assign_non_tensor(
        batch,
        calculate_entropy=False,
        global_batch_size=GAMES,
        mini_batch_size=GAMES,
        epochs=1,
        seed=1,
        dataloader_kwargs={"shuffle": False},
        temperature=1.0,
    )
    return batch


def update(run: DictConfig, variant: dict[str, Any]) -> dict[str, Any]:
    worker = ActorRolloutRefWorker(config=run.actor_rollout_ref.copy(), role="actor")
    worker.init_model()
    actor_config = omega_conf_to_dataclass(run.actor_rollout_ref.actor)
    worker.set_loss_fn(partial(selfplay_loss, actor_config))
    output = worker.update_actor(batch_of(run, variant))
    digest = hashlib.sha256()
    for _, weight in sorted(worker.actor.engine.module.state_dict().items()):
        full = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        digest.update(full.detach().float().numpy().tobytes())
    metrics = tensordict_utils.get(output, "metrics")
    return {"weights": digest.hexdigest(), "grad_norm": float(metrics["grad_norm"][0])}


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    run = compose_run(
        "+recipes=quickstart", f"actor_rollout_ref.actor.ppo_mini_batch_size={GAMES}", "actor_rollout_ref.rollout.n=1"
    )
    folder = Path(sys.argv[1])
    variants = json.loads((folder / "questions.json").read_text())
    answers = {name: update(run, variant) for name, variant in variants.items()}
    (folder / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
