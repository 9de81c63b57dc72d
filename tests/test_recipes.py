"""Every recipe composes against verl's real config, and every key it sets exists there."""

from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from medserl_agentloop.config import SelfPlayConfig, check_run
from medserl_agentloop.paths import resource
from medserl_agentloop.testing.tiny import compose_run

RECIPES = sorted(path.stem for path in resource("recipes").glob("*.yaml"))
PARTS = {"base", "cpu"}  # included by others, no runs of their own

# verl types these as open dictionaries and hands them on to Transformers, Ray and torch, which own their keys.
OPEN_NODES = (
    "actor_rollout_ref.model.override_config.",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.",
    "actor_rollout_ref.ref.fsdp_config.mixed_precision.",
    "ray_kwargs.ray_init.",
)


def keys(node: Any, prefix: str = "") -> set[str]:
    if not isinstance(node, dict):
        return {prefix.removesuffix(".")}
    return {key for name, child in node.items() for key in keys(child, f"{prefix}{name}.")} or {prefix.rstrip(".")}


def composed_keys(*overrides: str) -> set[str]:
    return keys(OmegaConf.to_container(compose_run(*overrides), resolve=False))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_key_a_recipe_sets_exists_in_verls_config(recipe: str) -> None:
    known = composed_keys()
    added = {
        key
        for key in composed_keys(f"+recipes={recipe}") - known
        if not key.startswith("selfplay.") and not key.startswith(OPEN_NODES)
    }
    assert not added, f"{recipe}.yaml sets keys that verl does not read: {sorted(added)}"


@pytest.mark.parametrize("node", OPEN_NODES)
def test_the_open_nodes_exist_in_verls_config(node: str) -> None:
    parent = OmegaConf.select(compose_run(), node.removesuffix("."), default="missing")
    assert parent != "missing" or OmegaConf.select(compose_run(), node.rsplit(".", 2)[0]) is not None


@pytest.mark.parametrize("recipe", sorted(set(RECIPES) - PARTS))
def test_a_recipe_resolves_and_passes_the_start_up_check(recipe: str) -> None:
    config = compose_run(f"+recipes={recipe}")
    OmegaConf.resolve(config)
    assert isinstance(check_run(config), SelfPlayConfig)


def test_recipes_bring_the_start_up_check_along() -> None:
    GlobalHydra.instance().clear()
    with initialize_config_module("verl.trainer.config", version_base=None):
        config: DictConfig = compose("ppo_trainer", overrides=["+recipes=quickstart"], return_hydra_config=True)
    assert config.hydra.callbacks.medserl._target_ == "medserl_agentloop.plugin.StartupCheck"
    assert config.hydra.callbacks.medserl.platform == "cpu"


def test_the_plugins_path_resolver_finds_what_travels_with_the_package() -> None:
    config = compose_run("+recipes=quickstart")
    assert config.actor_rollout_ref.rollout.agent.agent_loop_config_path == str(
        resource("tool_configs/agent_loop.yaml")
    )


def test_agent_loop_yaml_names_the_loop_that_rows_ask_for() -> None:
    from medserl_agentloop.medec.rows import AGENT_NAME
    from medserl_agentloop.rollout.agent_loop import SelfPlayAgentLoop

    (entry,) = OmegaConf.load(resource("tool_configs/agent_loop.yaml"))
    assert entry.name == AGENT_NAME
    assert entry._target_ == f"{SelfPlayAgentLoop.__module__}.{SelfPlayAgentLoop.__qualname__}"
