"""What a verl run must be so that self-play is right; every refusal says what to write instead.

:func:`check_run` and :func:`run_warnings` read the config alone. ``check_run`` runs twice: from the recipe's
Hydra callback, before Ray is up, and in the trainer, for runs without a recipe. What depends on the machine and the
model is in :mod:`medserl_agentloop.core.run_check.machine`.
"""

from __future__ import annotations

from omegaconf import DictConfig

from medserl_agentloop.core.config import SelfPlayConfig, game_class, refuse
from medserl_agentloop.core.run_check.rules import ROLE_ESTIMATOR_NAMES, refusals, run_warnings
from medserl_agentloop.core.run_check.run import Run, unknown_keys, unknown_names, wrong_types

__all__ = ["ROLE_ESTIMATOR_NAMES", "check_run", "run_warnings", "unknown_keys"]


def check_run(config: DictConfig, schema: DictConfig | None = None) -> SelfPlayConfig:
    """Validate the ``selfplay`` node and the keys of verl's that it depends on; by ``schema``, verl's own, all types.

    Raises:
        ConfigError: Says which keys are wrong, why, and what to write instead: one line for each.
    """
    # Types alone, and then names: the other checks take values and names for what they are.
    if schema is not None:
        refuse(wrong_types(config, schema))
    run = Run(config, SelfPlayConfig.from_run(config))
    refuse(unknown_names(run))
    refuse([*game_class(run.selfplay.game).check_run(run), *refusals(run)])
    return run.selfplay
