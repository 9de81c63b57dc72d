"""Every recipe composes against verl's real config, and every key it sets exists there; so do those
of SFT.
"""

import csv
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from medec.builders import run as in_this_process
from note_files import SAMPLE
from omegaconf import OmegaConf
from planning.gpu_recipes import JUDGE_SERVER
from planning.gpu_recipes import PARTS as GPU_PARTS
from rollout.families import qwen3
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

from medserl_agentloop.core.config import ConfigError
from medserl_agentloop.core.run_check import check_run, check_warm_start, unknown_keys
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.paths import resource
from medserl_agentloop.testing import compose_run

# Those of verl's SFT trainer are below, the parts for a GPU in planning/test_plan.py.
RECIPES = {
    p.stem for p in resource("recipes").glob("*.yaml") if not p.stem.startswith("warm_start")
} - GPU_PARTS
PARTS = {"adapter_per_role", "core", "cpu", "sglang_cpu", "sglang_gpu", "tiny"}
"""Included by others, no runs of their own."""


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_every_key_a_recipe_sets_exists_in_verls_config(recipe: str) -> None:
    assert unknown_keys(compose_run(f"+recipes={recipe}"), compose_run()) == []


@pytest.mark.parametrize("recipe", sorted(RECIPES - PARTS - {"kuhn_poker"}))
def test_recipe_passes_the_start_check_and_a_real_model_needs_a_judge(recipe: str) -> None:
    config = compose_run(f"+recipes={recipe}")
    path = str(config.actor_rollout_ref.model.path)
    if path.startswith(str(resource("assets"))) or recipe == "learn_smollm2":
        assert config.selfplay.get("judge", "labels") in (
            "labels",
            "medserl_agentloop.games.clinic:OracleJudge",
        )
    else:
        assert config.selfplay.judge in ("llm", "http")
        with pytest.raises(ConfigError, match=r"selfplay\.judge_server\.url"):
            check_run(config)
        config = compose_run(f"+recipes={recipe}", *JUDGE_SERVER)
    OmegaConf.resolve(config)
    assert isinstance(check_run(config), MedicalConfig)


@pytest.mark.parametrize(("recipe", "column"), [("openrlhf_script", 1), ("verl_script", 3)])
def test_the_recipe_of_a_script_sets_what_the_script_sets_or_says_why_not(
    recipe: str, column: int
) -> None:
    config = compose_run(f"+recipes={recipe}")
    path = resource(f"recipes/{recipe}.yaml")
    header = path.read_text().split("defaults:")[0]
    with (path.parents[1] / "docs/script_parameters.csv").open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    assert len(rows) > 20
    for key, *values in rows:
        script, here = values[column - 1 : column + 1]
        assert yaml.safe_load(here) == OmegaConf.select(config, key), key
        assert script in (here, "-") or key.rpartition(".")[2] in header, (
            f"{key}: the header gives no reason"
        )


def test_a_recipe_of_another_game_passes_the_start_up_check() -> None:
    assert check_run(compose_run("+recipes=kuhn_poker")).game == "kuhn_poker"
    assert (
        check_run(compose_run("+recipes=[core,cpu,tiny]", "selfplay.game=kuhn_poker")).game
        == "kuhn_poker"
    )
    with pytest.raises(ConfigError, match="game is not set"):
        check_run(compose_run("+recipes=[core,cpu,tiny]"))


def test_agent_loop_yaml_is_found_and_names_the_loop_that_rows_ask_for() -> None:
    from medserl_agentloop.core.agent_loop import SelfPlayAgentLoop
    from medserl_agentloop.data.rows import AGENT_NAME

    (entry,) = OmegaConf.load(
        compose_run("+recipes=quickstart").actor_rollout_ref.rollout.agent.agent_loop_config_path
    )
    assert entry.name == AGENT_NAME
    assert entry._target_ == f"{SelfPlayAgentLoop.__module__}.{SelfPlayAgentLoop.__qualname__}"


@pytest.mark.parametrize(
    "files", ["data/medec_ms/train.parquet", "[data/medec_ms/a.parquet,data/other/b.parquet]"]
)
def test_a_run_on_other_data_does_not_share_the_folder_of_the_first(files: str) -> None:
    assert compose_run("+recipes=quickstart").trainer.default_local_dir == "runs/quickstart"
    for recipes, folder in (
        ("quickstart,adapter_per_role", "quickstart_adapters"),
        ("qwen3_4b,lora,adapter_per_role", "qwen3_4b_adapters"),
    ):
        assert compose_run(f"+recipes=[{recipes}]").trainer.default_local_dir == f"runs/{folder}"
    other = compose_run("+recipes=own_notes", f"data.train_files={files}")
    assert other.trainer.default_local_dir == other.selfplay.records == "runs/medec_ms"


# the recipes of verl's SFT trainer: composed as the command does, read by verl's own classes and
# data set


WARM_STARTS = sorted(path.stem for path in resource("recipes").glob("warm_start*.yaml"))
QWEN = [recipe for recipe in WARM_STARTS if "qwen3_4b" in recipe]
SFT = {"config_name": "sft_trainer_engine"}


@pytest.mark.parametrize("recipe", WARM_STARTS)
def test_every_key_of_a_recipe_exists_and_verls_own_classes_accept_it(recipe: str) -> None:
    """As ``SFTTrainer._build_config`` reads it; the tiny player stands in for the model, which is
    not here.
    """
    config = compose_run(
        f"+recipes={recipe}", f"model.path={resource('assets/tiny_player')}", **SFT
    )
    assert unknown_keys(config, compose_run(**SFT)) == []
    OmegaConf.resolve(config)
    model = omega_conf_to_dataclass(config.model)
    engine, optim, checkpoint = (
        omega_conf_to_dataclass(config[k]) for k in ("engine", "optim", "checkpoint")
    )
    omega_conf_to_dataclass(config.profiler)
    assert engine.strategy == "fsdp2" and optim.lr_scheduler_type == "cosine"
    assert ("hf_model" in checkpoint.save_contents) == (model.lora_rank == 0)


@pytest.mark.parametrize("recipe", QWEN)
def test_the_whole_answer_is_learnt_after_the_prompt_that_self_play_gives(
    recipe: str, tmp_path: Path
) -> None:
    """With a tokenizer whose own template takes the reasoning out, as Qwen3's does."""
    data = compose_run(f"+recipes={recipe}", **SFT).data
    tokenizer, path = qwen3(), tmp_path / "sft_val.parquet"
    done = in_this_process("medec_to_parquet", "--input", SAMPLE, "--output", tmp_path)
    assert done.exit_code == 0, done.output
    done = in_this_process("sft_to_parquet", "--input", tmp_path, "--output", tmp_path)
    assert done.exit_code == 0, done.output
    dataset = MultiTurnSFTDataset(str(path), tokenizer, data)
    rows = pq.read_table(path).to_pylist()
    assert len(dataset) == len(rows) > 0
    for item, row in zip((dataset[i] for i in range(len(rows))), rows, strict=True):
        *prompt, answer = row["messages"]
        learnt = item["loss_mask"] == 1
        assert "<think>" in answer["content"]
        assert (
            tokenizer.decode(item["input_ids"][learnt].tolist())
            == answer["content"] + "<|im_end|>\n"
        )
        own = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(item["input_ids"][~learnt].tolist()) == own


def test_warm_start_that_cannot_work_ends_with_one_clear_line() -> None:
    config = compose_run(
        "+recipes=warm_start", "model.lora_rank=8", config_name="sft_trainer_engine"
    )
    assert "checkpoint.save_contents" in next(check_warm_start(config))
