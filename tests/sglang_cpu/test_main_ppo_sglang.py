"""Real runs of verl's own entry point with rollouts by the real SGLang engine."""

import re
from pathlib import Path

import get_smollm2
import psutil
import pytest
from medec.builders import run as in_this_process
from note_files import SAMPLE
from real_runs import AGREEMENT, CERTIFIED, GAMES_PER_STEP, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def start(folder: Path, *overrides: str, recipe: str = "[own_notes,sglang_cpu]") -> Run:
    return Run(folder, *overrides, recipe=recipe)


def test_sglang_run_is_on_policy_and_resumes_after_its_scheduler_died(
    tmp_path: Path, data: tuple[str, ...]
) -> None:
    first = start(tmp_path, *data, "trainer.total_training_steps=50")
    first.wait_for_checkpoint(2)
    children = psutil.Process(first.process.pid).children(recursive=True)
    [scheduler] = [child for child in children if child.name().startswith("sglang::sched")]
    scheduler.kill()
    assert first.process.wait(timeout=60) != 0
    # SGLang's own watch says it, or the run's, whichever looks first.
    assert f"(pid={scheduler.pid}) crashed with exit code -9" in first.train_log.read_text()
    [line] = {line for line in first.lines() if "died" in line}
    assert re.match(r"rollout server 0 died \(class AdapterServer, .*\) in step \d+", line)

    reached = int((tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text())
    last = reached + 2
    second = start(tmp_path, *data, f"trainer.total_training_steps={last}")
    second.wait()
    assert second.steps_of_games() == dict.fromkeys(range(1, last + 1), GAMES_PER_STEP)
    assert [step["step"] for step in second.metrics] == list(range(1, last + 1))
    for step in second.metrics:
        # A missing push or a stale prefix cache would show here.
        assert step["training/rollout_probs_diff_max"] < AGREEMENT
        assert step["actor/grad_norm"] > 0


def test_an_adapter_for_each_role_reaches_the_engine_in_every_step(
    tmp_path: Path, data: tuple[str, ...]
) -> None:
    overrides = ("trainer.total_training_steps=4", "trainer.save_freq=-1")
    overrides += ("actor_rollout_ref.actor.optim.lr=1e-2",)
    recipe = "[own_notes,sglang_cpu,adapter_per_role]"
    run = start(tmp_path, *data, *overrides, recipe=recipe)
    run.wait()
    assert any(CERTIFIED in line and "holds" in line for line in run.lines())
    differences = [step["training/rollout_probs_diff_max"] for step in run.metrics]
    assert len(differences) == 4 and max(differences) < AGREEMENT


def test_a_pretrained_model_plays_two_steps_in_the_toy_clinic(tmp_path: Path) -> None:
    get_smollm2.main(tmp_path / "smollm2")
    rows = ("--input", SAMPLE, "--mix", "adversarial_benign=1,vanilla_benign=1")
    assert in_this_process("medec_to_parquet", *rows, "--output", tmp_path / "data").exit_code == 0
    files = (f"data.{split}_files={tmp_path}/data/{split}.parquet" for split in ("train", "val"))
    overrides = (
        f"actor_rollout_ref.model.path={tmp_path}/smollm2",
        "trainer.total_training_steps=2",
        "trainer.save_freq=-1",
    )
    run = start(tmp_path, *files, *overrides, recipe="learn_smollm2")
    run.wait()
    assert run.steps_of_games() == dict.fromkeys((1, 2), GAMES_PER_STEP)
    assert any(CERTIFIED in line and "holds" in line for line in run.lines())
    trained = [step for step in run.metrics if "actor/grad_norm" in step]  # not the validations
    assert len(trained) == 2
    for step in trained:
        assert step["training/rollout_probs_diff_mean"] < 0.01  # bf16 in two implementations
