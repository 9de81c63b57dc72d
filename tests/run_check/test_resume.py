"""A run that goes on is the one that was there before; every other one is refused before Ray."""

import json
import math
import shlex
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from run_check.runs import run_of

from medserl_agentloop.core.config import ConfigError
from medserl_agentloop.core.run_check import leaves
from medserl_agentloop.core.run_check.resume import (
    MAY_CHANGE,
    SAME_LOADER,
    Change,
    checkpoints,
    config_text,
    different,
    rows_begin_anew,
)
from medserl_agentloop.core.step_file import LATEST, lock_folder
from medserl_agentloop.core.trainer import SelfPlayTrainer
from medserl_agentloop.paths import resource

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problem(changes: dict[str, Any]) -> str:
    found = checkpoints(run_of(changes))
    return "\n".join(one if isinstance(one, str) else ": ".join(one) for one in found)


def trained(folder: Path, step: int, **settings: Any) -> dict[str, Any]:
    """A run whose last checkpoint is in ``folder``, with these settings."""
    (folder / f"global_step_{step}").mkdir(parents=True)
    (folder / LATEST).write_text(str(step))
    here = {"trainer.default_local_dir": str(folder), **settings}
    (folder / "run_config.yaml").write_text(config_text(run_of(here)))
    return here


# --- what may change ---


@cache
def composed() -> dict[str, Any]:
    """All keys of a run, as its ``run_config.yaml`` has them."""
    values: Any = OmegaConf.to_container(OmegaConf.create(config_text(run_of({}, "qwen3_0_6b"))))
    values.pop("medserl_identity")
    return {key: value for key, value in leaves(values) if value not in (None, [])}


def other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return [*value, "other"] if isinstance(value, list) else f"{value} other"


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_key_that_changes_is_refused_or_stands_in_the_list(data: Any) -> None:
    key = data.draw(st.sampled_from(sorted(composed())))
    changed = {key: other(composed()[key])} if data.draw(st.booleans()) else {key: None}
    found = different(composed(), composed() | changed, {}, {})
    stands = Change(key, None, None).matches(MAY_CHANGE) and key not in SAME_LOADER
    assert [change.key for change in found] == [key] * (not stands)


def test_a_value_that_is_no_number_is_no_change_of_itself() -> None:
    was, now = ({"x": math.nan, "y": [1.0, math.nan]} for _ in range(2))
    assert different(was, now, {}, {}) == []
    assert different(was, {**now, "x": 1.0}, {}, {})


def test_what_a_longer_run_on_another_machine_changes_is_accepted(home: Path) -> None:
    here = trained(home / "run", 3)
    more = {"trainer.total_epochs": 7, "trainer.save_freq": 9, "trainer.logger": ["console"]}
    memory = {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 3, "trainer.nnodes": 2}
    assert problem({**here, **more, **memory}) == ""
    assert problem({**here, "selfplay.certify": "only", "selfplay.reward": "zero_sum"}) == ""


def test_other_settings_are_refused_with_both_values_and_the_overrides_to_go_on(home: Path) -> None:
    here = trained(home / "my run", 3, **{"trainer.experiment_name": "first"})
    changed = {
        "algorithm.adv_estimator": "role_grpo",
        "selfplay.profile": "classic",
        "actor_rollout_ref.rollout.temperature": 0.7,
        f"{ACTOR}.optim.lr": 1e-5,
    }
    refused = problem({**here, **changed})
    assert "selfplay.profile was medserl and is now classic" in refused
    assert all(f"{key} was " in refused for key in changed)
    words = shlex.split(refused.rpartition("them): ")[2])
    added: dict[str, Any] = dict(word.split("=", 1) for word in words)
    loads = f"{ACTOR}.checkpoint.load_contents"
    assert added.pop(loads) == "[model]"
    new = {**here, **changed, **added, loads: ["model"]}
    new["trainer.default_local_dir"] = str(home / "first_from_3")
    said = problem(new)
    assert said.startswith("warn: from this checkpoint on ") and "optim.lr was 0.0003" in said
    # The learning rate of the checkpoint's optimizer would be taken without a word.
    assert f"{loads}=[model]" in problem({**new, loads: ["model", "optimizer"]})
    with pytest.raises(ConfigError, match="was medserl"):  # where the start is not checked
        SelfPlayTrainer(run_of({**here, **changed}).config)


# --- what is behind a name ---


@pytest.mark.parametrize("name", ["model.safetensors", "generation_config.json"])
def test_a_file_of_the_model_that_was_replaced_is_refused(home: Path, name: str) -> None:
    folder = home / "player"
    shutil.copytree(resource("assets/tiny_player"), folder)
    here = trained(home / "run", 3, **{f"{MODEL}.path": str(folder)})
    config = folder / "config.json"
    config.write_text(config.read_text() + "\n")  # the same values
    assert problem(here) == ""
    file = folder / name
    if file.suffix == ".json":
        file.write_text(json.dumps({**json.loads(file.read_text()), "other": 1}))
    else:
        file.write_bytes(file.read_bytes()[:-1] + b"\1")
    assert f"what {MODEL}.path=" in problem(here)


def test_rows_and_templates_that_were_rewritten_are_refused(home: Path) -> None:
    shutil.copytree(resource("prompts") / "brief", home / "brief")
    for name in ("train", "val"):
        pq.write_table(pa.table({"row": range(64)}), home / f"{name}.parquet")
    rows = {"data.train_files": "train.parquet", "data.val_files": "val.parquet"}
    here = trained(home / "run", 3, **rows, **{"selfplay.profile": "./brief"})
    (home / "moved").mkdir()
    shutil.copy("train.parquet", "moved")
    assert problem({**here, "data.train_files": "moved/train.parquet"}) == ""
    pq.write_table(pa.table({"row": range(5)}), "val.parquet")
    (home / "brief" / "assessor" / "assess.jinja").write_text("Say hello. {{ note }}")
    refused = problem(here)
    assert "what data.val_files=" in refused and "what selfplay.profile=" in refused
    assert "train_files" not in refused


def test_a_model_that_is_not_here_is_known_by_its_name(home: Path) -> None:
    here = trained(home / "run", 3, **{f"{MODEL}.path": "org/qwen"})
    assert problem(here) == ""
    other = problem({**here, f"{MODEL}.path": "org/smol"})
    assert f"{MODEL}.path was org/qwen and is now org/smol" in other


# --- rows ---


def test_a_checkpoint_of_other_rows_begins_them_anew(home: Path) -> None:
    here = trained(home / "run", 3)
    at = {
        "trainer.resume_mode": "resume_path",
        "trainer.resume_from_path": str(home / "run" / "global_step_3"),
        "trainer.default_local_dir": str(home / "new"),
    }
    assert not rows_begin_anew(run_of({**here, **at, "selfplay.reward": "zero_sum"}))
    assert rows_begin_anew(run_of({**here, **at, "data.shuffle": False}))
    filtered = {"data.filter_overlong_prompts": True, "data.max_prompt_length": 50}
    assert rows_begin_anew(run_of({**here, **at, **filtered}))
    assert "data.max_prompt_length was " in problem({**here, **filtered})


# --- folders and files ---


@pytest.mark.parametrize("mode", ["disable", "resume_path"])
def test_a_run_does_not_write_over_another_one(home: Path, mode: str) -> None:
    here = trained(home / "run", 3)
    elsewhere = {"trainer.resume_from_path": "/other/global_step_2"}
    answer = problem({**here, **elsewhere, "trainer.resume_mode": mode})
    assert answer.startswith(f"trainer.resume_mode={mode} would overwrite the run in {home}/run")
    own = {"trainer.resume_from_path": str(home / "run" / "global_step_3")}
    assert problem({**here, **own, "trainer.resume_mode": "resume_path"}) == ""


def test_a_second_run_in_a_folder_is_refused_before_ray(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = "medserl_agentloop.core.run_check.resume.lock_folder"
    monkeypatch.setattr(lock, lambda folder, wait_s: lock_folder(folder, wait_s=0.1))
    here = trained(home / "run", 3)
    with lock_folder(home / "run"):
        assert f"another process writes to {home}/run" in problem(here)


@pytest.mark.parametrize("text", ["{", "\xff", "- a list", "7"])
def test_a_config_of_the_run_that_cannot_be_read_is_named(home: Path, text: str) -> None:
    here = trained(home / "run", 3)
    (home / "run" / "run_config.yaml").write_text(text, encoding="latin-1")
    assert problem(here).startswith(f"{home}/run/run_config.yaml cannot be read")


def test_a_last_checkpoint_that_is_none_is_told(home: Path) -> None:
    folder = home / "run"
    here = {"trainer.default_local_dir": str(folder)}
    for step in (9, 10):
        (folder / f"global_step_{step}").mkdir(parents=True)
        (folder / f"global_step_{step}" / "data.pt").touch()
    for text in (None, "", "7", "x"):
        if text is not None:
            (folder / LATEST).write_text(text)
        answer = f"says {text or ''!r}, which is not a checkpoint: write 10 into it"
        assert answer in problem(here)
    (folder / LATEST).write_text("10")
    assert problem(here) == ""


def test_a_finished_run_goes_on_for_the_validation_that_it_lacks(home: Path) -> None:
    every = {"trainer.test_freq": 6, "trainer.total_training_steps": 12}
    here = trained(home / "run", 12, **every)
    assert "has trained 12 steps, and trainer.total_training_steps=12" in problem(here)
    assert problem({**here, "trainer.total_training_steps": 13}) == ""
    metrics, step = home / "run" / "metrics.jsonl", {"step": 12, "selfplay/games": 0}
    metrics.write_text(json.dumps(step) + "\n")
    assert problem(here) == ""  # killed between checkpoint and validation
    metrics.write_text(metrics.read_text() + json.dumps({"step": 12, "val-core/x": 1.0}) + "\n")
    assert "nothing is left to train" in problem(here)


def test_a_checkpoint_of_another_number_of_workers_is_named(home: Path) -> None:
    here = trained(home / "run", 3)
    weights = home / "run" / "global_step_3" / "actor"
    weights.mkdir()
    (weights / "model_world_size_2_rank_0.pt").touch()
    assert "global_step_3 is of 2 training workers, and this run has 1. Set" in problem(here)
    assert problem({**here, "trainer.n_gpus_per_node": 2}) == ""
