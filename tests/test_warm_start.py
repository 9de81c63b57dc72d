"""A real run of verl's own SFT trainer on the CPU: nothing is faked here.

How an adapter is merged is in backends/test_role_adapters.py.
"""

import re
from pathlib import Path

import pytest
from medec.builders import run as in_this_process
from note_files import SAMPLE
from real_runs import printed_by, same
from transformers import AutoTokenizer

from medserl_agentloop.testing import tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 6


def test_a_warm_start_lowers_the_loss_and_leaves_a_model_to_play_with(tmp_path: Path) -> None:
    rows, taught = tmp_path / "data" / "own_notes", tmp_path / "data" / "warm_start"
    done = in_this_process("medec_to_parquet", "--input", SAMPLE, "--output", rows)
    assert done.exit_code == 0, done.output
    done = in_this_process("sft_to_parquet", "--input", rows, "--output", taught)
    assert done.exit_code == 0, done.output
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "player")
    tiny_model(len(tokenizer)).save_pretrained(tmp_path / "player")
    command = [
        "-m",
        "verl.trainer.sft_trainer_ray",
        "+recipes=warm_start",
        "model.path=player",
        "optim.lr=1e-2",
    ]
    command += [
        f"trainer.total_training_steps={STEPS}",
        "data.val_files=null",
        "data.train_batch_size=4",
    ]
    losses = [
        float(loss) for loss in re.findall(r"train/loss:([\d.]+)", printed_by(tmp_path, *command))
    ]
    assert len(losses) == STEPS and losses[-1] < 0.8 * losses[0]
    result = tmp_path / "runs" / "warm_start" / f"global_step_{STEPS}" / "huggingface"
    assert not same(tmp_path / "player", result)
    # The plain template was for the training data alone.
    assert AutoTokenizer.from_pretrained(result).chat_template == tokenizer.chat_template
