"""A run's config as ``main_ppo`` composes it, and where each value comes from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from hydra import compose, initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from medserl_agentloop.core.config import ConfigError, SelfPlayConfig, game_class
from medserl_agentloop.paths import did_you_mean, resource

VERL = "verl's "
VERL_CONFIGS, PPO, SFT = "verl.trainer.config", "ppo_trainer", "sft_trainer_engine"
"""The folder of verl's configs, and the names of its PPO trainer's and its SFT trainers' config."""


class Setting(NamedTuple):
    """A value of a run: its dotted key, what set it last, and whether it differs from verl's or the
    game's default.
    """

    key: str
    value: Any
    origin: str
    changed: bool


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
    """Compose the recipe of :func:`recipe_override` with overrides; a ValueError says why Hydra
    cannot.
    """
    return compose_explained(config_of(recipe), recipe_override(recipe), *overrides)


def compose_explained(config_name: str, *overrides: str) -> DictConfig:
    """Compose one of verl's configs with overrides; a ValueError says in one line why Hydra
    cannot."""
    try:
        return compose_run(*overrides, config_name=config_name)
    except (HydraException, OmegaConfBaseException) as error:
        reason, hint = str(error).splitlines()[0], ""
        if missing := re.search("'recipes/(.*?)'", reason):
            known = sorted(file.stem for file in resource("recipes").glob("*.yaml"))
            hint = f"{did_you_mean(missing[1], known)}; the recipes are {', '.join(known)}"
        elif unknown := re.match(r"Could not override '(.*)'", reason):
            hint = did_you_mean(unknown[1], dict(leaves(compose_run(config_name=config_name))))
        elif isinstance(error, OverrideParseException) or reason.startswith(
            "Ambiguous value for argument"
        ):
            text = getattr(error, "override", None) or reason.partition("'")[2].rpartition("'")[0]
            key, equals, value = text.partition("=")
            hint = (
                f""": a value with '=', ',' or brackets needs quotes in quotes, '{key}="{value}"'"""
                * bool(equals)
            )
        raise ValueError(f"{reason}{hint}") from None


def settings(recipe: str, overrides: list[str]) -> list[Setting]:
    """All values of a recipe's run with their origins (ValueError as :func:`compose_recipe`)."""
    config = compose_recipe(recipe, overrides)
    of_game = OmegaConf.create({"selfplay": _game_defaults(config)} if "selfplay" in config else {})
    default = dict(leaves(schema_of(recipe))) | dict(leaves(of_game))
    with initialize_config_module(VERL_CONFIGS, version_base=None):
        loader = GlobalHydra.instance().config_loader()
        origins = _origins(loader, config_of(recipe), [recipe_override(recipe), *overrides])
    result = []
    for key, value in leaves(OmegaConf.merge(of_game, config)):
        node = key
        while node not in origins and "." in node:  # the node above it may have been set as a whole
            node = node.rpartition(".")[0]
        origin = origins.get(node, "default of the game")
        # What verl's own files set differs only where it follows from another key.
        changed = (key not in default or default[key] != value) and not origin.startswith(VERL)
        result.append(Setting(key, value, origin, changed))
    return result


def _origins(loader: ConfigLoaderImpl, name: str, overrides: list[str]) -> dict[str, str]:
    """Return the source of each key's value.

    A later config of the defaults list wins, then the overrides in order.
    """
    listed = loader.compute_defaults_list(name, overrides, RunMode.RUN)
    origins: dict[str, str] = {}
    for default in listed.defaults:
        path = str(default.config_path)
        origin = f"{'' if path.startswith('recipes/') else VERL}{path}.yaml"
        loaded = loader._load_single_config(default, loader.repository).config
        origins |= {key: origin for key, _ in leaves(loaded)}
    origins.pop("selfplay", None)  # the open node of hydra_plugins, which sets nothing
    for override in listed.config_overrides:
        key = override.key_or_group
        origins = {
            known: origin
            for known, origin in origins.items()
            if not f"{known}.".startswith(f"{key}.")
        }
        origins[key] = "command line"
    return origins


def with_recipes(config: DictConfig, refusals: list[str]) -> list[str]:
    """Add to each refusal of a run that Hydra starts the recipe that set the key which it names."""
    if "hydra" not in config:
        return refusals
    loader, hydra = GlobalHydra.instance().config_loader(), config.hydra
    origins = _origins(loader, hydra.job.config_name, list(hydra.overrides.task))
    named = {
        f"{key}=": f" ({key} is set by {file})"
        for key, file in origins.items()
        if file.startswith("recipes/")
    }
    return [line + "".join(by for key, by in named.items() if key in line) for line in refusals]


def _game_defaults(config: DictConfig) -> dict[str, Any]:
    """The values that the keys of the ``selfplay`` node have by themselves; none if there is no
    such game.
    """
    name = OmegaConf.select(config, "selfplay.game", throw_on_missing=False)
    try:
        kind: type[SelfPlayConfig] = game_class(name).Config
    except (ConfigError, AttributeError, TypeError):
        return {}
    return kind.model_construct(game=name).model_dump(mode="json")


def leaves(node: DictConfig, path: str = "") -> Iterator[tuple[str, Any]]:
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
            yield from leaves(raw, f"{here}.")
            continue
        try:
            value = node[key]
        except OmegaConfBaseException:
            value = "???" if raw._is_missing() else raw._value()
        yield here, OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
