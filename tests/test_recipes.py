"""Every recipe composes against verl's real config, and every key it sets exists there."""

import re

import pytest
import yaml
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from planning.gpu_recipes import PARTS as GPU_PARTS

from medserl_agentloop.core.config import ConfigError
from medserl_agentloop.core.run_check import check_run, unknown_keys
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.paths import resource
from medserl_agentloop.testing.tiny import compose_run

# Those of verl's SFT trainer are in test_warm_start_recipes.py, the parts for a GPU in planning/test_plan.py.
RECIPES = {p.stem for p in resource("recipes").glob("*.yaml") if not p.stem.startswith("warm_start")} - GPU_PARTS
JUDGE_SERVER = ("selfplay.judge_server.url=http://localhost:30000/v1", "selfplay.judge_server.model=judge")
PARTS = {"adapter_per_role", "colocate_async", "core", "cpu", "sglang_cpu", "tiny"}
"""Included by others, no runs of their own."""
OTHER_GAMES = {"kuhn_poker", "own_game"}


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_every_key_a_recipe_sets_exists_in_verls_config(recipe: str) -> None:
    assert unknown_keys(compose_run(f"+recipes={recipe}"), compose_run()) == []


def test_a_misspelt_key_of_the_selfplay_node_is_named_with_the_nearest_right_one() -> None:
    # Hydra's own answer is to write + before it, with which it composes.
    for key in ("selfplay.turn_timout_s=5", "+selfplay.turn_timout_s=5"):
        with pytest.raises(ConfigError, match=r"selfplay\.turn_timout_s is not .* \(did you mean 'turn_timeout_s'\?\)"):
            check_run(compose_run("+recipes=quickstart", key))


@pytest.mark.parametrize("recipe", sorted(RECIPES - PARTS - OTHER_GAMES))
def test_a_recipe_passes_the_start_up_check_and_for_a_real_model_is_told_who_reads_the_notes(recipe: str) -> None:
    config = compose_run(f"+recipes={recipe}")
    if str(config.actor_rollout_ref.model.path).startswith(str(resource("assets"))):
        assert config.selfplay.get("judge", "labels") in ("labels", "experiments.clinic:OracleJudge")
    else:
        assert config.selfplay.judge in ("llm", "http")
        with pytest.raises(ConfigError, match=r"selfplay\.judge_server\.url"):
            check_run(config)
        config = compose_run(f"+recipes={recipe}", *JUDGE_SERVER)
    OmegaConf.resolve(config)
    assert isinstance(check_run(config), MedicalConfig)


@pytest.mark.parametrize(("recipe", "column"), [("openrlhf_script", 1), ("verl_script", 3)])
def test_the_recipe_of_a_script_sets_what_the_script_sets_or_says_why_not(recipe: str, column: int) -> None:
    config = compose_run(f"+recipes={recipe}")
    path = resource(f"recipes/{recipe}.yaml")
    header = path.read_text().split("defaults:")[0]
    page = (path.parents[1] / "docs/migration.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` " + r"\| (\S+) " * 4 + r"\|$", page, re.M)
    assert len(rows) > 20
    for key, *values in rows:
        script, here = values[column - 1 : column + 1]
        assert yaml.safe_load(here) == OmegaConf.select(config, key), key
        assert script in (here, "-") or key.rpartition(".")[2] in header, f"{key}: the header gives no reason"


def test_the_base_judges_beside_an_adapter_for_each_role() -> None:
    base = ("selfplay.judge=llm", "selfplay.judge_server.url=base", "selfplay.judge_server.json_schema=false")
    config = compose_run("+recipes=[qwen3_4b,lora,adapter_per_role]", *base)
    assert check_run(config).adapters == "per_role"
    with pytest.raises(ConfigError, match=r"the engine has only beside adapters: set selfplay\.adapters=per_role"):
        check_run(compose_run("+recipes=qwen3_4b", *base))
    config.selfplay.judge_server.json_schema = True
    with pytest.raises(
        ConfigError, match=r"cannot bind answers to a schema\. Set selfplay\.judge_server\.json_schema=False"
    ):
        check_run(config)


def test_a_recipe_of_another_game_passes_the_start_up_check() -> None:
    assert check_run(compose_run("+recipes=kuhn_poker")).game == "kuhn_poker"
    assert check_run(compose_run("+recipes=own_game", "selfplay.game=kuhn_poker")).game == "kuhn_poker"
    with pytest.raises(ConfigError, match="game is not set"):
        check_run(compose_run("+recipes=own_game"))


def test_recipes_bring_the_start_up_check_along() -> None:
    GlobalHydra.instance().clear()
    with initialize_config_module("verl.trainer.config", version_base=None):
        config: DictConfig = compose("ppo_trainer", overrides=["+recipes=quickstart"], return_hydra_config=True)
    check, log = config.hydra.callbacks.medserl, config.hydra.callbacks.medserl_log
    assert (check._target_, check.platform) == ("medserl_agentloop.plugin.StartupCheck", "cpu")
    assert log._target_ == "medserl_agentloop.plugin.TrainLog"


def test_agent_loop_yaml_is_found_and_names_the_loop_that_rows_ask_for() -> None:
    from medserl_agentloop.core.agent_loop import SelfPlayAgentLoop
    from medserl_agentloop.data.rows import AGENT_NAME

    (entry,) = OmegaConf.load(compose_run("+recipes=quickstart").actor_rollout_ref.rollout.agent.agent_loop_config_path)
    assert entry.name == AGENT_NAME
    assert entry._target_ == f"{SelfPlayAgentLoop.__module__}.{SelfPlayAgentLoop.__qualname__}"


@pytest.mark.parametrize("files", ["data/medec_ms/train.parquet", "[data/medec_ms/a.parquet,data/other/b.parquet]"])
def test_a_run_on_other_data_does_not_share_the_folder_of_the_first(files: str) -> None:
    assert compose_run("+recipes=quickstart").trainer.default_local_dir == "runs/quickstart"
    other = compose_run("+recipes=own_notes", f"data.train_files={files}")
    assert other.trainer.default_local_dir == other.selfplay.records == "runs/medec_ms"
