"""Compose a run's config as verl's programs do, and walk its keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

VERL_CONFIGS, PPO, SFT = "verl.trainer.config", "ppo_trainer", "sft_trainer_engine"
"""The folder of verl's configs, and the names of its PPO trainer's and its SFT trainers' config."""


def compose_run(*overrides: str, config_name: str = PPO) -> DictConfig:
    """Compose a run's config as ``python -m verl.trainer.main_ppo`` does, with overrides as on the
    command line.
    """
    GlobalHydra.instance().clear()
    with initialize_config_module(VERL_CONFIGS, version_base=None):
        config: DictConfig = compose(config_name, overrides=list(overrides))
    return config


def recipe_override(recipe: str) -> str:
    """The override for a recipe, or for several with commas between them, in brackets or not."""
    return f"+recipes=[{recipe.strip('[]')}]"


def config_of(recipe: str) -> str:
    return SFT if recipe.startswith(("warm_start", "[warm_start")) else PPO


def schema_of(recipe: str) -> DictConfig:
    return compose_run(config_name=config_of(recipe))


def compose_recipe(recipe: str, overrides: list[str]) -> DictConfig:
    """Compose the recipe of :func:`recipe_override` with overrides; a ValueError says in one line
    why Hydra cannot.
    """
    try:
        return compose_run(recipe_override(recipe), *overrides, config_name=config_of(recipe))
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(" ".join(str(error).split())) from None


def leaves(node: DictConfig, path: str = "", *, resolve: bool = True) -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; a list is one value, as is an empty node.

    What cannot be resolved stays as written.
    """
    for key in node:
        here, raw = f"{path}{key}", node._get_node(key)
        if (
            isinstance(raw, DictConfig)
            and not raw._is_none()
            and not raw._is_missing()
            and len(raw)
        ):
            yield from leaves(raw, f"{here}.", resolve=resolve)
            continue
        try:
            value = node[key] if resolve else raw._value()
        except OmegaConfBaseException:
            value = "???" if raw._is_missing() else raw._value()
        yield here, OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
