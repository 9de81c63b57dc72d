"""What a run may do but hardly wants to."""

from __future__ import annotations

from collections.abc import Iterator

from medserl_agentloop.core.run_check.roles import ROLE_ESTIMATOR_NAMES
from medserl_agentloop.core.run_check.run import ROLLOUT, Run


def estimator(run: Run) -> Iterator[str]:
    """verl's own estimators are for comparison."""
    name = run["algorithm.adv_estimator"]
    if name not in ROLE_ESTIMATOR_NAMES:
        yield (
            f"algorithm.adv_estimator={name} mixes the rewards of the roles; use one of "
            f"{', '.join(ROLE_ESTIMATOR_NAMES)} unless that is what you want to compare with"
        )


def sampling(run: Run) -> Iterator[str]:
    """The loss is that of the temperature alone."""
    top_p, top_k = run[f"{ROLLOUT}.top_p"], run[f"{ROLLOUT}.top_k"]
    if top_p < 1 or top_k > 0:
        yield (
            f"{ROLLOUT}.top_p={top_p} and top_k={top_k} cut the distribution that games are drawn from, and the loss "
            "knows of the temperature only; train with top_p=1.0 and top_k=-1"
        )


def checkpoints(run: Run) -> Iterator[str]:
    """Disks are finite."""
    if run["trainer.save_freq"] > 0 and not run["trainer.max_actor_ckpt_to_keep"]:
        pool = run.selfplay.opponent.kind == "pool"
        opponents = " (and so of opponents, with selfplay.opponent.kind=pool)" if pool else ""
        yield (
            "trainer.max_actor_ckpt_to_keep=null keeps every checkpoint, at 12 bytes per parameter: about 45 GiB each "
            f"for a model of 4 billion; set it to the number to keep{opponents}"
        )
