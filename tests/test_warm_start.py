"""Real runs of verl's own SFT trainer on the CPU: nothing is faked here."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from medec.builders import run as in_this_process
from note_files import SAMPLE
from real_runs import REPOSITORY, printed_by
from transformers import AutoModelForCausalLM, AutoTokenizer

from medserl_agentloop.testing.tiny import tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 6


@pytest.fixture
def player(tmp_path: Path) -> Path:
    """A folder with data and a model of random weights, where a run can be started."""
    done = in_this_process("sft_to_parquet", "--input", SAMPLE, "--output", tmp_path / "data" / "warm_start")
    assert done.exit_code == 0, done.output
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "player")
    tiny_model(len(tokenizer)).save_pretrained(tmp_path / "player")
    return tmp_path


def warm_start(folder: Path, *overrides: str) -> list[float]:
    """Train a few steps as a user would type it, and return the losses."""
    command = ["-m", "verl.trainer.sft_trainer_ray", "+recipes=warm_start", "model.path=player", "optim.lr=1e-2"]
    command += [f"trainer.total_training_steps={STEPS}", "data.val_files=null", "data.train_batch_size=4", *overrides]
    printed = printed_by(folder, *command)
    return [float(loss) for loss in re.findall(r"train/loss:([\d.]+)", printed)]


def same(one: Path, other: Path) -> bool:
    """Whether two folders hold the same weights in bf16, as verl's merger writes; they must hold all of a model's."""
    weights = []
    for folder in (one, other):
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        weights.append(model.state_dict())
    return all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_a_warm_start_lowers_the_loss_and_leaves_a_model_to_play_with(player: Path) -> None:
    losses = warm_start(player)
    assert len(losses) == STEPS and losses[-1] < 0.8 * losses[0]
    result = player / "runs" / "warm_start" / f"global_step_{STEPS}" / "huggingface"
    assert not same(player / "player", result)
    # The plain template was for the training data alone.
    assert AutoTokenizer.from_pretrained(result).chat_template == tiny_tokenizer().chat_template


@pytest.mark.long
def test_a_lora_adapter_is_merged_as_the_documentation_says(player: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lora = ["model.lora_rank=8", "checkpoint.save_contents=[model,optimizer,extra]"]
    losses = warm_start(player, *lora, "trainer.experiment_name=warm_start_qwen3_4b_lora")
    assert losses[-1] < losses[0]
    checkpoint = player / "runs" / "warm_start_qwen3_4b_lora" / f"global_step_{STEPS}"
    checkpoint.rename(checkpoint.with_name("global_step_N"))

    text = (REPOSITORY / "docs" / "warm_start.md").read_text()
    (merger,) = re.findall(r"python -m (verl\.model_merger.*?)```", text.replace("\\\n", ""), re.DOTALL)
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(player)
    monkeypatch.setattr(sys, "argv", merger.split())
    runpy.run_module(sys.argv[0], run_name="__main__")
    exec(code, {})
    parts = player / "runs" / "warm_start_qwen3_4b_lora" / "parts"
    merged = player / "runs" / "warm_start_qwen3_4b_lora" / "merged"
    assert same(player / "player", parts), "verl's merger leaves the adapter beside the weights"
    assert not same(parts, merged)
    AutoTokenizer.from_pretrained(merged)
