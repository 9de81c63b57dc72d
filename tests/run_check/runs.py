"""Runs for the start-up checks: a recipe with some keys changed."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from hydra import compose, initialize_config_module
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from medserl_agentloop.core.config import ConfigError, SelfPlayConfig
from medserl_agentloop.core.run_check import RunConfig, check_run
from medserl_agentloop.testing import compose_run

schema = cache(compose_run)


def run(changes: Mapping[str, Any], recipe: str = "own_notes") -> DictConfig:
    """The config of a run of ``recipe`` with other values for dotted keys."""
    config = compose_run(f"+recipes={recipe}")
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


def run_of(changes: Mapping[str, Any], recipe: str = "own_notes") -> RunConfig:
    """The same, as checks after ``check_run`` get it."""
    config = run(changes, recipe)
    return RunConfig(config, SelfPlayConfig.from_run(config))


def refusal(config: DictConfig) -> str:
    """Return the refusal of a run by its config alone; empty if it is accepted."""
    try:
        check_run(config)
    except ConfigError as error:
        return str(error)
    return ""


def start_up(
    *overrides: str,
    recipe: str = "own_notes",
    config_name: str = "ppo_trainer",
    event: str = "on_run_start",
) -> None:
    """Have Hydra call the start-up check of a recipe with these overrides; it makes a warning of
    most exceptions.
    """
    GlobalHydra.instance().clear()
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            config_name, overrides=[f"+recipes={recipe}", *overrides], return_hydra_config=True
        )
        check = {**config.hydra.callbacks.medserl, "platform": None}  # that of this process stays
        getattr(Callbacks(OmegaConf.create({"hydra": {"callbacks": {"medserl": check}}})), event)(
            config
        )
