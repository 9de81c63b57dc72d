"""What a run will need of its machine is looked for before anything starts: keys, packages, files."""

import os
import stat
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from run_check.runs import run, run_of

from medserl_agentloop.core.config import ConfigError
from medserl_agentloop.core.run_check import machine
from medserl_agentloop.core.run_check.inputs import config_text, lost_checkpoint
from medserl_agentloop.core.run_check.machine import check_gpus, check_machine
from medserl_agentloop.paths import resource
from medserl_agentloop.plugin import StartupCheck, _say_how_to_resume

MODEL = "actor_rollout_ref.model.override_config.attn_implementation"
WANDB = {"trainer.logger": ["console", "wandb"]}
PLAYER = {"actor_rollout_ref.model.path": str(resource("assets/tiny_player"))}  # a model that is here
ON_GPU = {"actor_rollout_ref.rollout.name": None, "trainer.logger": "console", **PLAYER}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without keys, a working folder with the data of the recipes, and no package that a test does not add."""
    for variable in [name for name in os.environ if name.startswith(("WANDB_", "NETRC"))]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for folder in ("quickstart", "medec_ms"):
        (tmp_path / "data" / folder).mkdir(parents=True)
        for file in ("train", "val"):
            pq.write_table(
                pa.table({"row": range(64), "of": [folder] * 64}), tmp_path / "data" / folder / f"{file}.parquet"
            )
    pq.write_table(pa.table({"row": range(64)}), tmp_path / "data" / "medec_val.parquet")
    return tmp_path


def missing(changes: dict[str, Any], recipe: str = "quickstart") -> str:
    try:
        check_machine(run_of(changes, recipe))
    except ConfigError as error:
        return str(error)
    return ""


def has_packages(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: name if name in packages else None)
    monkeypatch.setattr(machine, "_installed", lambda name: name in packages)
    monkeypatch.setattr(machine, "is_kernels_available", lambda: "kernels" in packages)


def test_the_quickstart_needs_nothing_but_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    has_packages(monkeypatch)
    assert missing({}) == ""


def test_wandb_without_a_key_is_refused_with_three_ways_out() -> None:
    answer = missing(WANDB)
    for way in ("wandb login", "WANDB_API_KEY", "WANDB_MODE=offline", "trainer.logger=[console]"):
        assert way in answer


@pytest.mark.parametrize(
    "environment",
    [{"WANDB_API_KEY": "secret"}, {"WANDB_MODE": "offline"}, {"WANDB_MODE": "disabled"}],
)
def test_a_key_or_another_mode_in_the_environment_is_enough(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert missing(WANDB) == ""


@pytest.mark.parametrize(
    ("host", "enough"), [("api.wandb.ai", True), ("wandb.hospital.org", True), ("github.com", False)]
)
def test_a_key_in_netrc_is_enough_if_it_is_one_of_wandb(host: str, enough: bool, home: Path) -> None:
    (home / ".netrc").write_text(f"machine {host} login user password secret\n")
    (home / ".netrc").chmod(stat.S_IRUSR | stat.S_IWUSR)
    assert (missing(WANDB) == "") is enough


def test_a_logger_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    has_packages(monkeypatch, "tensorboard")
    answer = missing({"trainer.logger": ["console", "tensorboard", "swanlab"]})
    assert "trainer.logger=swanlab: the package swanlab is not installed" in answer
    assert "tensorboard" not in answer


def test_a_rollout_engine_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    has_packages(monkeypatch, "flash-attn")
    assert "rollout.name=sglang: the package sglang is not installed" in missing(
        {"trainer.logger": [], **PLAYER}, "qwen3_4b"
    )


def test_a_model_without_flash_attention_is_refused_with_both_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    has_packages(monkeypatch)
    answer = missing(ON_GPU, "qwen3_4b")
    assert "pip install flash-attn==2.8.3" in answer
    assert f"+{MODEL}=sdpa" in answer
    assert missing({**ON_GPU, MODEL: "sdpa"}, "qwen3_4b") == ""


def test_with_flash_attention_nothing_is_said_and_with_its_fallback_what_is_downloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_packages(monkeypatch, "flash-attn")
    assert check_machine(run_of(ON_GPU, "qwen3_4b")) == []
    has_packages(monkeypatch, "kernels", "flash_attn", "flash-attn-4")  # as SGLang brings them
    (warning,) = check_machine(run_of(ON_GPU, "qwen3_4b"))
    assert "Transformers fetches kernels-community/flash-attn2 from the Hugging Face hub" in warning


def test_a_critic_needs_flash_attention_whatever_the_actor_has(monkeypatch: pytest.MonkeyPatch) -> None:
    has_packages(monkeypatch)
    critic = {**ON_GPU, MODEL: "sdpa", "algorithm.adv_estimator": "role_gae"}
    assert "every critic with attn_implementation=flash_attention_2" in missing(critic, "qwen3_4b")


@pytest.mark.parametrize("key", ["data.train_files", "data.val_files"])
def test_a_data_file_that_does_not_exist_is_named(key: str) -> None:
    assert f"{key}: data/other.parquet does not exist" in missing({key: ["data/other.parquet"]})
    assert missing({key: ["hdfs://data/other.parquet"]}) == ""


def test_fewer_rows_than_a_batch_are_refused() -> None:
    answer = missing({"data.train_batch_size": 65})
    assert "data.train_files has 64 rows, fewer than data.train_batch_size=65. Set that to 64 or less." in answer
    assert missing({"data.train_batch_size": 64}) == ""


def test_an_empty_validation_file_as_small_inputs_give_it_is_refused(home: Path) -> None:
    empty = home / "empty.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), empty)
    assert "data.val_files has no rows, and verl cannot load that" in missing({"data.val_files": str(empty)})


@pytest.mark.parametrize("key", ["trainer.default_local_dir", "selfplay.records"])
def test_a_folder_that_cannot_be_made_is_named(key: str, home: Path) -> None:
    (home / "file").touch()
    assert f"{key}=file/run: {home / 'file'} is no folder that can be written to" in missing({key: "file/run"})


def test_a_checkpoint_to_resume_from_and_a_list_of_agent_loops_have_to_exist() -> None:
    resume = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "runs/x/global_step_3"}
    assert "trainer.resume_from_path=runs/x/global_step_3: there is no such folder" in missing(resume)
    loops = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
    assert f"{loops}=loops.yaml cannot be read" in missing({loops: "loops.yaml"})


def test_a_run_on_another_machine_is_not_judged_by_this_one() -> None:
    assert missing({**WANDB, "ray_kwargs.ray_init.address": "ray://cluster:10001"}) == ""


def start_up(*overrides: str) -> None:
    GlobalHydra.instance().clear()
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=["+recipes=quickstart", *overrides], return_hydra_config=True)
        StartupCheck().on_run_start(config)


def test_the_recipes_callback_refuses_what_is_missing_and_prints_warnings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match=r"\[medserl\] data\.val_files: none\.parquet does not exist"):
        start_up("data.val_files=none.parquet")
    README = resource("recipes").parent / "README.md"  # only the rows of parquet files are looked at
    start_up("actor_rollout_ref.rollout.top_p=0.9", f"data.train_files={README}", f"data.val_files={README}")
    assert "[medserl] warning: actor_rollout_ref.rollout.top_p=0.9 and top_k=-1 cut" in capsys.readouterr().out


def no_gpu(changes: dict[str, Any], recipe: str = "qwen3_4b") -> str:
    try:
        check_gpus(run(changes, recipe))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_machine_without_a_gpu_is_told_so_in_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert "this run needs a GPU (trainer.device=cuda), and torch finds none" in no_gpu({})
    assert "+recipes=quickstart" in no_gpu({})
    assert no_gpu({}, "quickstart") == ""
    assert no_gpu({"ray_kwargs.ray_init.address": "auto"}) == no_gpu({"trainer.nnodes": 2}) == ""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").touch()
    assert no_gpu({}) == ""  # the GPUs may be on its other machines
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert "torch finds none" in no_gpu({})  # a cluster of the run's own


def test_fewer_gpus_than_the_run_asks_for_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert "trainer.n_gpus_per_node=8, and torch finds 2" in no_gpu({"trainer.n_gpus_per_node": 8})
    assert no_gpu({"trainer.n_gpus_per_node": 2}) == ""


def test_a_run_does_not_resume_from_the_checkpoints_of_another_one(home: Path) -> None:
    def folder_of(changes: dict[str, Any]) -> None:
        folder = home / "runs" / "quickstart"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "latest_checkpointed_iteration.txt").write_text("3")
        (folder / "global_step_3").mkdir(exist_ok=True)
        (folder / "run_config.yaml").write_text(config_text(run(changes)))

    folder_of({})
    assert missing({}) == missing({"trainer.total_epochs": 7}) == ""
    [said] = check_machine(run_of({"algorithm.adv_estimator": "role_grpo"}))
    assert "algorithm.adv_estimator was role_reinforce_pp in this run's first part and is role_grpo" in said
    assert "(selfplay.profile was medserl and is classic)" in missing({"selfplay.profile": "classic"})
    assert "has checkpoints of another run (data.train_files was data/quickstart/train.parquet" in missing(
        {"data.train_files": "data/medec_ms/train.parquet", "trainer.default_local_dir": "runs/quickstart"}
    )
    on_purpose = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "runs/quickstart/global_step_3"}
    assert missing({"selfplay.profile": "classic", **on_purpose}) == ""
    pq.write_table(pa.table({"row": range(65)}), home / "data" / "quickstart" / "train.parquet")
    assert "or its rows changed" in missing({})
    (home / "runs/quickstart/latest_checkpointed_iteration.txt").unlink()
    assert missing({}) == ""


@pytest.mark.parametrize("text", ["", "7", "\0\0", "x"])
def test_a_last_checkpoint_that_is_none_says_which_is_there(home: Path, text: str) -> None:
    def said(changes: dict[str, Any]) -> str:
        return "".join(lost_checkpoint(run_of(changes)))

    folder = home / "runs" / "quickstart"
    folder.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(text)
    assert f"says {text!r}, which is no checkpoint. There is none: move runs/quickstart away" in said({})
    for step, whole in ((9, True), (10, True), (11, False)):
        (folder / f"global_step_{step}").mkdir()
        if whole:
            (folder / f"global_step_{step}" / "data.pt").touch()
    assert "Write 10 into it to resume from the newest checkpoint there; or move runs/quickstart away" in said({})
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    assert said({}) == said({"trainer.resume_mode": "disable"}) == ""


def test_ctrl_c_ends_a_run_with_the_way_to_resume(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[Any] = []
    hook = partial(_say_how_to_resume, lambda *error: said.append(error[0]), "runs/x")
    hook(ValueError, ValueError(), None)
    assert said == [ValueError] and capsys.readouterr().out == ""
    hook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().out == "[medserl] stopped. The same command resumes from the last checkpoint in runs/x\n"
    assert said == [ValueError]
