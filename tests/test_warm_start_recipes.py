"""The recipes of verl's SFT trainer: composed as the command does, read by verl's own classes and data set."""

from itertools import product
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate
from medec.builders import run as in_this_process
from note_files import SAMPLE
from omegaconf import DictConfig, OmegaConf
from rollout.families import qwen3
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

from medserl_agentloop.core.run_check import unknown_keys
from medserl_agentloop.paths import resource
from medserl_agentloop.testing.tiny import compose_run

RECIPES = sorted(path.stem for path in resource("recipes").glob("warm_start*.yaml"))
QWEN = [recipe for recipe in RECIPES if "qwen3_4b" in recipe]


def composed(*overrides: str) -> DictConfig:
    return compose_run(*overrides, config_name="sft_trainer_engine")


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_key_of_a_recipe_exists_and_verls_own_classes_accept_it(recipe: str) -> None:
    """As ``SFTTrainer._build_config`` reads it; the tiny player stands in for the model, which is not here."""
    config = composed(f"+recipes={recipe}", f"model.path={resource('assets/tiny_player')}")
    assert unknown_keys(config, composed()) == []
    OmegaConf.resolve(config)
    model = omega_conf_to_dataclass(config.model)
    engine, optim, checkpoint = (omega_conf_to_dataclass(config[k]) for k in ("engine", "optim", "checkpoint"))
    omega_conf_to_dataclass(config.profiler)
    assert engine.strategy == "fsdp2" and optim.lr_scheduler_type == "cosine"
    assert ("hf_model" in checkpoint.save_contents) == (model.lora_rank == 0)


@pytest.mark.parametrize("recipe", QWEN)
def test_the_whole_answer_is_learnt_after_the_prompt_that_self_play_gives(recipe: str, tmp_path: Path) -> None:
    """With a tokenizer whose own template takes the reasoning out, as Qwen3's does."""
    data = composed(f"+recipes={recipe}").data
    tokenizer, path = qwen3(), tmp_path / "sft_val.parquet"
    assert in_this_process("sft_to_parquet", "--input", SAMPLE, "--output", tmp_path).exit_code == 0
    dataset = MultiTurnSFTDataset(str(path), tokenizer, data)
    rows = pq.read_table(path).to_pylist()
    assert len(dataset) == len(rows) > 0
    for item, row in zip((dataset[i] for i in range(len(rows))), rows, strict=True):
        *prompt, answer = row["messages"]
        learnt = item["loss_mask"] == 1
        assert "<think>" in answer["content"]
        assert tokenizer.decode(item["input_ids"][learnt].tolist()) == answer["content"] + "<|im_end|>\n"
        own = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(item["input_ids"][~learnt].tolist()) == own


def check(*overrides: str, config_name: str = "sft_trainer_engine") -> None:
    GlobalHydra.instance().clear()
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(config_name, overrides=list(overrides), return_hydra_config=True)
        instantiate(config.hydra.callbacks.medserl).on_run_start(config)


def test_what_cannot_work_ends_with_one_clear_line() -> None:
    with pytest.raises(SystemExit, match=r"checkpoint\.save_contents"):
        check("+recipes=warm_start", "model.lora_rank=8")
    with pytest.raises(SystemExit, match=r"python -m verl\.trainer\.sft_trainer_ray"):
        check("+recipes=warm_start_qwen3_4b", config_name="ppo_trainer")


def test_both_of_verls_sft_trainers_may_run_and_a_misspelt_key_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for recipe, name in product(QWEN, ("sft_trainer", "sft_trainer_ray")):
        check(f"+recipes={recipe}", f"hydra.job.name={name}")
    assert "warning" not in capsys.readouterr().out
    check("+recipes=warm_start_qwen3_4b", "+engine.strategi=fsdp2")
    assert "engine.strategi (did you mean 'strategy'?)" in capsys.readouterr().out
