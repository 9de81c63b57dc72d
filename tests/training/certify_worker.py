"""Isolation and loss measured by the certificate on verl's real worker, in this process and without
Ray.

Answers with the measures of each variant. A variant is ``{"model": folder, "overrides": [...],
"restart": bool, "trained": [roles], "loss": "verl", "counts": "wrong"}``.
"""

import json
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.engine_workers import ActorRolloutRefWorker

from medserl_agentloop.backends import engines
from medserl_agentloop.core.certificate import (
    CertificateError,
    Game,
    Probe,
    Row,
    coupling,
    forward,
    gradient_of_loss,
    isolation,
)
from medserl_agentloop.core.columns import restarted, token_counts
from medserl_agentloop.core.loss import selfplay_loss
from medserl_agentloop.core.trajectory import TrajectoryTurn
from medserl_agentloop.games.medical.case import Role
from medserl_agentloop.testing import compose_run

ROLES = {role.value: role.id for role in Role}


def games() -> list[Game]:
    """Two games of random tokens; lengths differ, so that no two rows are alike."""
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(5, 250, (count,), generator=generator).tolist()

    return [
        [TrajectoryTurn(role.value, tokens(90 + n), tokens(70 + 2 * n), None) for role in Role]
        for n in range(2)
    ]


def counts_of_all_roles(data: Any) -> Counter[tuple[str, int]]:
    every = token_counts(data)
    return Counter({key: sum(every.values()) for key in every})


def measure(quickstart: DictConfig, variant: dict[str, Any]) -> list[dict[str, Any]]:
    overrides = [f"actor_rollout_ref.model.path={variant['model']}", *variant["overrides"]]
    run = OmegaConf.merge(quickstart, OmegaConf.from_dotlist(overrides))
    worker = ActorRolloutRefWorker(config=run.actor_rollout_ref.copy(), role="actor")
    worker.init_model()
    trained = variant.get("trained", list(ROLES))
    probe = Probe(games(), list(ROLES), trained)
    engines.token_counts = counts_of_all_roles if "counts" in variant else token_counts
    apart = () if variant.get("loss") == "verl" else [ROLES[role] for role in trained]
    loss = partial(selfplay_loss, omega_conf_to_dataclass(run.actor_rollout_ref.actor), apart)
    worker.set_loss_fn(partial(gradient_of_loss, loss))

    def answers(rows: list[Row], **flags: Any) -> Any:
        if variant.get("restart", True):
            for row in rows:
                row["position_ids"] = restarted(row["context_lengths"])
        columns = list_of_dict_to_tensordict(rows)
        return forward(worker.compute_log_prob, columns, "log_probs", temperature=1.0, **flags)

    try:
        log_probs = answers(probe.forms(), compute_loss=False)
    except CertificateError as error:
        return [{"claim": "isolation", "holds": False, "problem": str(error)}]
    measures = [
        isolation("actor", log_probs, probe.games),
        coupling("loss", "actor", probe, lambda rows: {"gradient": answers(rows)}),
    ]
    return [{**vars(m), "holds": m.holds, **m.details} for m in measures]


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    variants = json.loads((folder / "questions.json").read_text())
    quickstart = compose_run("+recipes=own_notes")
    answers = {name: measure(quickstart, variant) for name, variant in variants.items()}
    (folder / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
