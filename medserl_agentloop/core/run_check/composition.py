"""Compose a run's config as verl's programs do, and say in one line what Hydra cannot compose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from medserl_agentloop.paths import did_you_mean, resource

VERL_CONFIGS, PPO, SFT = "verl.trainer.config", "ppo_trainer", "sft_trainer_engine"
"""The folder of verl's configs, and the names of its PPO trainer's and its SFT trainers' config."""
WITHOUT_A_RECIPE = "add one: +recipes=quickstart, or another of docs/configuration.md"


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
        reason = str(error).splitlines()[0]
        raise ValueError(f"{reason}{_hint(config_name, reason, error)}") from None


def _hint(config_name: str, reason: str, error: Exception) -> str:
    if missing := re.search("'recipes/(.*?)'", reason):
        known = sorted(file.stem for file in resource("recipes").glob("*.yaml"))
        return f"{did_you_mean(missing[1], known)}; the recipes are {', '.join(known)}"
    if unknown := re.match(r"Could not override '(.*)'", reason):
        known = [key for key, _ in leaves(compose_run(config_name=config_name))]
        whole = [key for key in known if key.endswith(f".{unknown[1]}")]  # docs cut long keys
        if whole:
            return f" (did you mean {' or '.join(whole[:3])}?)"
        return did_you_mean(unknown[1], known)
    if isinstance(error, OverrideParseException) or reason.startswith("Ambiguous value"):
        text = getattr(error, "override", None) or reason.partition("'")[2].rpartition("'")[0]
        key, equals, value = text.partition("=")
        if equals:
            quoted = f"""'{key}="{value}"'"""
            return f": a value with '=', ',' or brackets needs quotes in quotes, {quoted}"
    return ""


def without_a_recipe(config_name: str, overrides: list[str]) -> str | None:
    """What is wrong with a command of verl's that names no recipe, if it was meant to."""
    keys = [override.lstrip("+~").partition("=")[0] for override in overrides]
    if "recipes" in keys:
        return None
    for key, override in zip(keys, overrides, strict=True):
        if key in ("recipe", "recipes@_global_"):
            return f"{override} names no recipe: write +recipes={override.partition('=')[2]}"
        if key.partition(".")[0] == "selfplay":
            return f"{override} is a key of a recipe, and there is none: {WITHOUT_A_RECIPE}"
    files = compose_run(config_name=config_name).data.train_files
    if "data.train_files" in keys or Path(str(files)).expanduser().exists():
        return None  # a run of verl's own
    gone = f"there is no recipe, and verl's own data.train_files={files} does not exist"
    return f"{gone}: {WITHOUT_A_RECIPE}"


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
