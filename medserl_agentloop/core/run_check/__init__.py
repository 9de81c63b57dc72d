"""What a verl run must be so that self-play is right; every refusal says what to write instead.

:func:`check_run` and :func:`run_warnings` read the config alone. ``check_run`` runs twice: from the recipe's
Hydra callback, before Ray is up, and in the trainer, for runs without a recipe. What depends on the machine is
in :mod:`medserl_agentloop.core.run_check.machine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from omegaconf import DictConfig

from medserl_agentloop.core.config import ConfigError, SelfPlayConfig, game_class
from medserl_agentloop.core.opponent_config import check_opponent
from medserl_agentloop.core.run_check import advice, batches, loss, names, roles
from medserl_agentloop.core.run_check.names import unknown_keys
from medserl_agentloop.core.run_check.roles import ROLE_ESTIMATOR_NAMES
from medserl_agentloop.core.run_check.run import Run

__all__ = ["ROLE_ESTIMATOR_NAMES", "check_run", "run_warnings", "unknown_keys"]

Check = Callable[[Run], Iterator[str]]

REFUSALS: tuple[Check, ...] = (
    *(roles.trainer, roles.reward_manager, roles.estimator, roles.anchor),
    *(roles.contexts, roles.sequence_parallelism),
    *(loss.coupling, loss.row_length, loss.policy_loss, loss.correction, loss.log_probs),
    *(batches.unsupported, batches.rollout, batches.mini_batches, batches.replay_buffer, batches.checkpoints),
)
WARNINGS: tuple[Check, ...] = (advice.estimator, advice.sampling, advice.checkpoints)


def check_run(config: DictConfig) -> SelfPlayConfig:
    """Validate the ``selfplay`` node and the keys of verl's that it depends on.

    Raises:
        ConfigError: Says which keys are wrong, why, and what to write instead: one line for each.
    """
    selfplay = SelfPlayConfig.from_run(config)
    run = Run(config, selfplay)
    # First, and alone: the other checks take names for what they are.
    problems = list(names.unknown_names(run))
    if not problems:
        try:
            check_opponent(selfplay.opponent, train=selfplay.train, context=selfplay.context, run=config)
        except ValueError as error:
            problems.append(str(error))
        game = game_class(selfplay.game)
        problems += [problem for check in (game.check_run, *REFUSALS) for problem in check(run)]
    if problems:
        raise ConfigError("\n".join(problems))
    return selfplay


def run_warnings(config: DictConfig) -> list[str]:
    """What a run that has passed :func:`check_run` may do but hardly wants to, one sentence for each."""
    run = Run(config, SelfPlayConfig.from_run(config))
    return [warning for check in WARNINGS for warning in check(run)]
