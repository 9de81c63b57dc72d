"""A run's config as ``main_ppo`` composes it, and where each value comes from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hydra import compose, initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from medserl_agentloop.core.config import ConfigError, SelfPlayConfig, game_class
from medserl_agentloop.core.run_check import check_run, run_warnings
from medserl_agentloop.core.run_check.run import Run, unknown_keys
from medserl_agentloop.paths import did_you_mean, resource

COMMAND_LINE, VERL = "command line", "verl's "
VERL_CONFIGS = "verl.trainer.config"


@dataclass(frozen=True)
class Setting:
    """One value of a run: its dotted key, what set it last, and whether it differs from the default.

    The default is verl's; of the ``selfplay`` node, the game's.
    """

    key: str
    value: Any
    origin: str
    changed: bool


@dataclass(frozen=True)
class Composition:
    """The config of a run, that of verl alone, and what was asked for."""

    config: DictConfig
    schema: DictConfig
    name: str
    overrides: list[str]

    @cached_property
    def settings(self) -> list[Setting]:
        """All values with their origins."""
        with initialize_config_module(VERL_CONFIGS, version_base=None):
            origins = _origins(GlobalHydra.instance().config_loader(), self.name, self.overrides)
        of_game = OmegaConf.create({"selfplay": _selfplay_defaults(self.config)})
        default = dict(_leaves(self.schema)) | dict(_leaves(of_game))
        settings = []
        for key, value in _leaves(OmegaConf.merge(of_game, self.config)):
            origin = _origin(key, origins)
            # What verl's own files set differs only where it follows from another key.
            changed = (key not in default or default[key] != value) and not origin.startswith(VERL)
            settings.append(Setting(key, value, origin, changed))
        return settings


def compose_recipe(recipe: str, overrides: list[str]) -> Composition:
    """Compose ``+recipes=RECIPE`` with overrides as on the command line; several recipes have commas between them.

    Raises:
        ValueError: Hydra cannot compose it; says why.
    """
    known = sorted(file.stem for file in resource("recipes").glob("*.yaml"))
    name = "sft_trainer_engine" if recipe.startswith("warm_start") else "ppo_trainer"
    asked = [f"+recipes=[{recipe}]", *overrides]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module(VERL_CONFIGS, version_base=None):
            return Composition(compose(name, overrides=asked), compose(name), name, asked)
    except (HydraException, OmegaConfBaseException) as error:
        said = str(error).splitlines()[0]
        missing = [part for part in recipe.split(",") if f"recipes/{part}'" in said]
        hint = "".join(f"{did_you_mean(part, known)}; the recipes are {', '.join(known)}" for part in missing)
        if unknown := re.match(r"Could not override '(.*)'", said):
            with initialize_config_module(VERL_CONFIGS, version_base=None):
                hint = did_you_mean(unknown[1], dict(_leaves(compose(name))))
        raise ValueError(f"{said}{hint}") from None


def problems(composed: Composition) -> tuple[list[str], list[str]]:
    """What the start of such a run would refuse, and what it would warn of, as far as the config alone says."""
    unknown = [f"{key} is not a key of verl's config" for key in unknown_keys(composed.config, composed.schema)]
    if "selfplay" not in composed.config:  # a warm start
        return [], unknown
    try:
        run = Run(composed.config, check_run(composed.config, composed.schema))
        return [], [*run_warnings(run), *unknown]
    except ConfigError as error:
        return str(error).splitlines(), unknown


def _origins(loader: Any, name: str, overrides: list[str]) -> dict[str, str]:
    """What set each key last. A later config of the defaults list takes precedence, then the overrides in order."""
    assert isinstance(loader, ConfigLoaderImpl)
    listed = loader.compute_defaults_list(name, overrides, RunMode.RUN)
    origins: dict[str, str] = {}
    for default in listed.defaults:
        path = str(default.config_path)
        own = path.startswith("recipes/")
        loaded = loader._load_single_config(default, loader.repository).config
        origins.update({key: f"{path}.yaml" if own else f"{VERL}{path}.yaml" for key, _ in _leaves(loaded)})
    for override in listed.config_overrides:
        key = override.key_or_group
        origins = {known: origin for known, origin in origins.items() if not f"{known}.".startswith(f"{key}.")}
        origins[key] = COMMAND_LINE
    return origins


def _origin(key: str, origins: dict[str, str]) -> str:
    """The origin of a key, or of the node above it that was set as a whole."""
    while key not in origins and "." in key:
        key = key.rpartition(".")[0]
    return origins.get(key, "default of the game")


def _selfplay_defaults(config: DictConfig) -> DictConfig:
    """The values that the game's own keys have by themselves; empty if there is no such game."""
    name = OmegaConf.select(config, "selfplay.game", throw_on_missing=False)
    try:
        kind: type[SelfPlayConfig] = game_class(name).Config
    except (ConfigError, AttributeError, TypeError):
        return OmegaConf.create({})
    return OmegaConf.create(kind.model_construct(game=name).model_dump(mode="json"))


def _leaves(node: DictConfig, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; a list is one value, as is an empty node. What cannot be resolved stays as written."""
    for key in node:
        here, raw = f"{path}{key}", node._get_node(key)
        if isinstance(raw, DictConfig) and not raw._is_none() and not raw._is_missing() and len(raw):
            yield from _leaves(raw, f"{here}.")
            continue
        try:
            value = node[key]
        except OmegaConfBaseException:
            value = "???" if raw._is_missing() else raw._value()
        yield here, OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
