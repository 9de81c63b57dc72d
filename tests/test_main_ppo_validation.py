"""verl's own validation of a checkpoint, by verl's own entry point, says what ``medserl evaluate`` says of it."""

import csv
import functools
import json
from pathlib import Path
from typing import Any

import pytest
from medec.builders import run as in_this_process
from note_files import SAMPLE
from real_runs import REPOSITORY, answers_of, printed_by
from typer.testing import CliRunner

from medserl_agentloop.cli import app
from medserl_agentloop.games.medical.metrics import metric_name
from medserl_agentloop.paths import resource

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

NOTES = 40
LORA = ("lora_rank=4", "lora_alpha=8", "target_modules=all-linear")
CHECKPOINTS = {"full": (), "lora": tuple(f"actor_rollout_ref.model.{override}" for override in LORA)}
UNTRAINED = resource("assets") / "tiny_player"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with some of the sample notes: the CSV, and as rows for training and for validation."""
    folder = tmp_path_factory.mktemp("validation")
    with SAMPLE.open(newline="") as file:
        rows = list(csv.reader(file))[: 1 + NOTES]
    with (folder / "notes.csv").open("w", newline="") as notes:
        csv.writer(notes).writerows(rows)
    for command in (
        ("medec_to_parquet", "--input", SAMPLE, "--output", folder / "data"),
        ("medec_eval_to_parquet", "--input", folder / "notes.csv", "--output", folder / "e.parquet"),
    ):
        done = in_this_process(*command)
        assert done.exit_code == 0, done.output
    return folder


@functools.cache
def evaluated(model: Path, folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The answers by text id, and the results."""
    output = folder / f"evaluation-{model.parent.name}"
    arguments = ["evaluate", model, "--notes", folder / "notes.csv", "--output", output, "--max-tokens", 512]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    answers = [json.loads(line) for line in (output / "answers.jsonl").read_text().splitlines()]
    return {answer["text_id"]: answer for answer in answers}, json.loads((output / "results.json").read_text())


@pytest.fixture(scope="module")
def steps(folder: Path) -> dict[str, Path]:
    """Sharded checkpoints of changed tiny players, written by verl's engine."""
    steps = {name: folder / name / "global_step_1" for name in CHECKPOINTS}
    overrides = {str(steps[name]): of_checkpoint for name, of_checkpoint in CHECKPOINTS.items()}
    answers_of(REPOSITORY / "tests" / "evaluation" / "checkpoint_worker.py", folder, overrides)
    return steps


def test_val_only_on_a_checkpoint_equals_evaluate(folder: Path, steps: dict[str, Path]) -> None:
    step = steps["full"]
    log = printed_by(
        folder,
        *("-m", "verl.trainer.main_ppo", "+recipes=own_notes", "trainer.val_only=True"),
        *("trainer.val_before_train=True", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={step}"),
        *("data.train_files=data/train.parquet", "data.val_files=e.parquet", "trainer.default_local_dir=run"),
        *("actor_rollout_ref.rollout.val_kwargs.temperature=0", "actor_rollout_ref.rollout.val_kwargs.do_sample=False"),
        *("trainer.validation_data_dir=dump", "trainer.logger=[console,file]"),
        VERL_FILE_LOGGER_PATH=str(folder / "metrics.jsonl"),
    )
    answers, results = evaluated(step, folder)

    (dump,) = (folder / "dump").iterdir()
    dumped = {line["text_id"]: line for line in map(json.loads, dump.read_text().splitlines())}
    assert len(answers) == NOTES
    # verl decodes without special tokens, and the tiny player's end-of-turn token leaves nothing behind.
    assert {text_id: line["output"] for text_id, line in dumped.items()} == {
        text_id: answer["response"] for text_id, answer in answers.items()
    }
    logged = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["data"]
    (scores,) = results["systems"].values()
    measures = {name: measure["value"] for name, measure in scores["measures"].items() if measure["value"] is not None}
    assert {"flag_accuracy", "sentence_accuracy", "f1", "recall", "rouge_1"} <= measures.keys()
    official = {name.rpartition("toy_eval/")[2]: value for name, value in logged.items() if "toy_eval/" in name}
    assert {name: official[name] for name in measures} == measures
    for group, of_group in scores["groups"]["error type"].items():
        assert official[f"error_type/{group}/flag_accuracy"] == of_group["measures"]["flag_accuracy"]["value"]
    for floor in results["floors"]:
        if floor["scores"]:
            value = floor["scores"]["measures"]["flag_accuracy"]["value"]
            assert official[metric_name(f"floor/{floor['name']}/flag_accuracy")] == value
    assert f"[medserl] validation on toy_eval, {NOTES} notes: flag accuracy {measures['flag_accuracy']:.3f}" in log

    untrained, _ = evaluated(UNTRAINED, folder)
    assert any(untrained[text_id]["response"] != answer["response"] for text_id, answer in answers.items())


def test_a_lora_checkpoint_is_evaluated_with_its_adapter(folder: Path, steps: dict[str, Path]) -> None:
    answers, results = evaluated(steps["lora"], folder)
    untrained, _ = evaluated(UNTRAINED, folder)
    assert results["model"]["checkpoint"] == "actor"
    assert sum(answer["verdict"] is not None for answer in answers.values()) > NOTES / 2
    assert any(untrained[text_id]["response"] != answer["response"] for text_id, answer in answers.items())
