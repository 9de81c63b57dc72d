"""Checks of the machine before a run starts: packages, keys, models, files."""

import os
import shutil
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf
from ray._private.utils import get_ray_address_file
from ray._private.worker import _post_init_hooks
from run_check.runs import run_of, start_up
from serving import unused_url

from medserl_agentloop.core.config import ConfigError
from medserl_agentloop.core.run_check import machine
from medserl_agentloop.core.run_check.machine import CHECKS
from medserl_agentloop.core.run_check.resume import config_text
from medserl_agentloop.core.step_file import LATEST
from medserl_agentloop.core.trainer import SelfPlayTrainer
from medserl_agentloop.paths import resource
from medserl_agentloop.plugin import TrainLog, _say_how_to_resume
from medserl_agentloop.terminal import MARK

ATTENTION, PATH = (
    "actor_rollout_ref.model.override_config.attn_implementation",
    "actor_rollout_ref.model.path",
)
FUSED = "actor_rollout_ref.model.use_fused_kernels"
WANDB = {"trainer.logger": ["console", "wandb"]}
ON_GPU = {"trainer.logger": "console", PATH: str(resource("assets/tiny_player"))}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_cluster: None) -> Path:
    """A home without keys, as the working folder, on a machine of no cluster."""
    for variable in [name for name in os.environ if name.startswith(("WANDB_", "NETRC"))]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problem(check: str, changes: dict[str, Any], recipe: str = "own_notes") -> str:
    found = CHECKS[check](run_of(changes, recipe))
    return "\n".join(one if isinstance(one, str) else ": ".join(one) for one in found)


def test_opponent_that_nobody_serves_is_refused() -> None:
    endpoint = {
        "selfplay.opponent.kind": "endpoint",
        "selfplay.train": "assessor",
        "selfplay.opponent.model": "m",
    }
    url = unused_url()
    answer = problem("opponent", {**endpoint, "selfplay.opponent.url": url})
    assert answer.startswith(f"selfplay.opponent.url={url}: no server answers at {url}/v1")
    assert problem("opponent", {}) == ""


def trained(folder: Path, step: int) -> dict[str, Any]:
    """A run whose last checkpoint is there."""
    (folder / f"global_step_{step}").mkdir(parents=True)
    (folder / LATEST).write_text(str(step))
    return {"trainer.default_local_dir": str(folder)}


def has_packages(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: name if name in packages else None)
    monkeypatch.setattr(machine, "distributions", lambda name: [name] if name in packages else [])


def current_cluster(address: str) -> Path:
    """The file in which `ray start` leaves the address of its cluster."""
    file = Path(get_ray_address_file(None))
    file.parent.mkdir()
    file.write_text(address)
    return file


def test_a_machine_without_enough_gpus_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    alone = problem("GPU", {}, "qwen3_4b")
    assert "this run needs 1 GPU (trainer.device=cuda" in alone and "+recipes=own_notes" in alone
    assert problem("GPU", {}) == ""
    elsewhere = ({"ray_kwargs.ray_init.address": "auto"}, {"trainer.nnodes": 2})
    assert [problem("GPU", changes, "qwen3_4b") for changes in elsewhere] == ["", ""]
    current_cluster("10.0.0.1:6379")
    assert problem("GPU", {}, "qwen3_4b") == ""  # the GPUs may be on its other machines
    monkeypatch.setenv("RAY_ADDRESS", "local")  # a cluster of the run's own
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert "needs 8 GPUs" in problem("GPU", {"trainer.n_gpus_per_node": 8}, "qwen3_4b")
    assert problem("GPU", {"trainer.n_gpus_per_node": 2}, "qwen3_4b") == ""


def test_a_cluster_that_does_not_answer_is_named_with_who_named_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert problem("Ray", {}) == ""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = "127.0.0.1:{1}".format(*server.getsockname())
        file = current_cluster(address)
        assert (
            problem("Ray", {})
            == problem("Ray", {"ray_kwargs.ray_init.address": f"ray://{address}"})
            == ""
        )
    assert f"No cluster of Ray's answers at {address}: start it, or run: rm {file}" in problem(
        "Ray", {}
    )
    assert "start it, or set ray_kwargs.ray_init.address" in problem(
        "Ray", {"ray_kwargs.ray_init.address": address}
    )
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert "start it, or run: unset RAY_ADDRESS" in problem("Ray", {})
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("RAY_TMPDIR", "/tmp/" + "long/" * 12)
    assert "cannot exceed 107 bytes" in problem("Ray", {}) and "export RAY_TMPDIR=/tmp" in problem(
        "Ray", {}
    )


def test_a_run_that_would_wait_for_cpus_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "get_num_cpus", lambda **options: 12.0)
    units = "transfer_queue.backend.SimpleStorage.num_data_storage_units"
    answer = problem("CPUs", {units: 8}, "qwen3_4b")  # as verl has it
    assert (
        "needs 13 CPUs" in answer
        and "counts 12" in answer
        and "ray_kwargs.ray_init.num_cpus=13" in answer
    )
    assert "needs 13 CPUs" in problem("CPUs", {"trainer.n_gpus_per_node": 3}, "qwen3_4b")
    fits = ({}, {units: 8, "ray_kwargs.ray_init.num_cpus": 13}, {units: 8, "trainer.nnodes": 2})
    assert [problem("CPUs", changes, "qwen3_4b") for changes in fits] == ["", "", ""]


def test_missing_engines_loggers_and_flash_attention_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_packages(monkeypatch, "tensorboard")
    answer = problem(
        "packages", {**ON_GPU, "trainer.logger": ["tensorboard", "swanlab"]}, "qwen3_4b"
    )
    assert "rollout.name=sglang: the package sglang is not installed" in answer
    assert (
        "trainer.logger=swanlab: the package swanlab is not installed" in answer
        and "=tensorboard" not in answer
    )
    assert "pip install --no-deps --only-binary flash-attn flash-attn==2.8.3" in answer
    for installed, changes, advice in (
        (
            ["flash_attn", "flash-attn-4"],
            {},
            [f"+{ATTENTION}=sdpa", f"{FUSED}=True"],
        ),  # as SGLang brings them
        (["kernels"], {FUSED: True}, [f"+{ATTENTION}=sdpa"]),  # Transformers would download it
        ([], {ATTENTION: "sdpa"}, [f"{FUSED}=True"]),
        ([], {ATTENTION: "sdpa", FUSED: True}, []),
        (["flash-attn"], {}, []),
    ):
        has_packages(monkeypatch, "sglang", *installed)
        answer = problem("packages", {**ON_GPU, **changes}, "qwen3_4b")
        assert [key for key in (f"+{ATTENTION}=sdpa", f"{FUSED}=True") if key in answer] == advice
        assert bool(answer) == bool(advice)


@pytest.mark.parametrize("key", [None, {"WANDB_API_KEY": "0" * 40}, {"WANDB_MODE": "offline"}])
def test_wandb_needs_a_key_that_it_takes_or_another_mode(
    key: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_API_KEY", "short")
    assert "no key for it, or none that it takes. Run `wandb login`" in problem("packages", WANDB)
    mode = (key or {}).get("WANDB_MODE", "online")
    settings = type("Settings", (), {"mode": mode})
    monkeypatch.setattr(wandb, "setup", lambda: type("Setup", (), {"settings": settings}))
    monkeypatch.setattr(wandb, "login", lambda prompt, verify: "WANDB_API_KEY" in (key or {}))
    answer = problem("packages", WANDB)
    ways = ("wandb login", "WANDB_API_KEY", "WANDB_MODE=offline", "trainer.logger=[console]")
    assert answer == "" if key else all(way in answer for way in ways)


def missing_model(
    path: Path | str, monkeypatch: pytest.MonkeyPatch, hub: Exception | None = None
) -> str:
    def model_info(self: Any, name: str, *, timeout: float) -> None:
        if hub is not None:
            raise hub

    monkeypatch.setattr(machine.HfApi, "model_info", model_info)
    return problem("model", {PATH: str(path)})


def test_a_model_that_nobody_has_is_refused(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    answer = missing_model(
        "someone/no-model", monkeypatch, httpx.ConnectError("Name or service not known")
    )
    assert answer.startswith(
        f"{PATH}=someone/no-model is no folder of a model (seen from {home}), nor one on the"
    )
    assert "Name or service not known" in answer and "hf download someone/no-model" in answer
    assert "no folder of a model" in missing_model("./models/nothing", monkeypatch)
    assert "there is no config.json in it" in missing_model(home, monkeypatch)
    assert (
        missing_model("someone/some-model", monkeypatch)
        == missing_model("hdfs://cluster/model", monkeypatch)
        == ""
    )
    (home / "config.json").write_text("{}")
    assert missing_model(home, monkeypatch) == ""
    critic = {"critic.enable": True, "critic.model.path": "./nothing", PATH: str(home)}
    assert problem("model", critic).startswith(
        "critic.model.path=./nothing is no folder of a model"
    )
    monkeypatch.setattr(machine, "try_to_load_from_cache", lambda name, file: str(home / file))
    assert missing_model("someone/cached", monkeypatch, httpx.ConnectError("")) == ""


def test_data_file_that_is_missing_or_smaller_than_a_batch_is_refused(
    files: dict[str, Any],
) -> None:
    for key in ("data.train_files", "data.val_files"):
        assert (
            problem("data", files)
            == problem("data", {**files, key: ["hdfs://data/other.parquet"]})
            == ""
        )
        assert f"{key}: data/other.parquet does not exist" in problem(
            "data", {**files, key: ["data/other.parquet"]}
        )
    answer = problem("data", {**files, "data.train_batch_size": 289})
    assert (
        answer
        == "data.train_files has 288 rows, and needs 289 or more. Name another file or a smaller "
        "batch."
    )
    pq.write_table(pq.read_table(files["data.val_files"]).slice(0, 0), "empty.parquet")
    assert problem("data", {**files, "data.val_files": "empty.parquet"}).startswith(
        "data.val_files has 0 rows"
    )


def test_the_recipes_callback_refuses_what_is_missing_and_prints_warnings(
    capsys: pytest.CaptureFixture[str], data: tuple[str, ...]
) -> None:
    with pytest.raises(
        SystemExit, match=r"\[medserl\] data\.val_files: none\.parquet does not exist"
    ):
        start_up(data[0], "data.val_files=none.parquet")
    with socket.create_server(
        ("127.0.0.1", 0)
    ) as server:  # this machine is not the one that runs it
        start_up("+ray_kwargs.ray_init.address=ray://127.0.0.1:{1}".format(*server.getsockname()))
    start_up(*data, "actor_rollout_ref.rollout.top_p=0.9")
    assert (
        "[medserl] warning: actor_rollout_ref.rollout.top_p=0.9 and top_k=-1 cut"
        in capsys.readouterr().out
    )
    before = signal.getsignal(signal.SIGTERM)
    _post_init_hooks.pop()()  # once Ray has started, SIGTERM ends the run as Ctrl-C does
    assert signal.signal(signal.SIGTERM, before) is signal.default_int_handler


def test_a_check_that_breaks_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: tuple[str, ...]
) -> None:
    monkeypatch.setitem(CHECKS, "data", lambda run: iter([str(1 / 0)]))
    with pytest.raises(
        SystemExit, match="cannot be checked, so it is not started: ZeroDivisionError: division"
    ):
        start_up(*data)
    assert "Traceback" in capsys.readouterr().err


def test_a_sweep_of_hydra_is_refused_before_its_first_run() -> None:
    with pytest.raises(SystemExit, match=r"--multirun .*: give each run a command of its own"):
        start_up(event="on_multirun_start")


def test_a_run_does_not_resume_from_the_checkpoints_of_another_one(
    home: Path, files: dict[str, Any]
) -> None:
    folder = home / "runs" / "quickstart"
    here = {
        **trained(folder, 3),
        "data.train_files": "train.parquet",
        "selfplay.judge_server.model": "gpt-5",
    }
    pq.write_table(pa.table({"row": range(64)}), "train.parquet")
    (folder / "run_config.yaml").write_text(config_text(run_of(here)))
    assert (
        problem("checkpoints", here)
        == problem("checkpoints", {**here, "trainer.total_epochs": 7})
        == ""
    )
    warm = problem("checkpoints", {**here, "actor_rollout_ref.rollout.temperature": 0.7})
    assert warm == (
        "warn: from here on actor_rollout_ref.rollout.temperature was 1.0 and is 0.7. "
        f"{folder}/run_config.until_step_3.yaml keeps the config until then"
    )
    said = {"selfplay.judge_server.url": "http://b:1", "selfplay.budget.assessor": 90, "x.y": 1}
    warned = problem("checkpoints", here | said)
    assert warned.startswith("warn: from here on ") and all(f"{key} was " in warned for key in said)
    shuffled = {"data.dataloader_num_workers": 2, "data.shuffle": False}
    lost = problem("checkpoints", here | shuffled | {"selfplay.allow_changes": True})
    assert (
        all(f"{key} was " in lost for key in shuffled)
        and lost.count("its place in the rows is lost: set it") == 2
    )
    of_checkpoint = {"actor_rollout_ref.actor.optim.lr": 1e-5, "selfplay.train": "attacker"}
    kept = problem("checkpoints", here | of_checkpoint | {"selfplay.allow_changes": True})
    assert "optim.lr was 0.0003 and is 1e-05, and verl takes the checkpoint's: set it back" in kept
    schedule = problem(
        "checkpoints", here | {"actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine"}
    )
    assert schedule.startswith(
        "warn: from here on actor_rollout_ref.actor.optim.lr_scheduler_type was constant and is"
    )
    assert (
        "selfplay.train was " not in kept
    )  # but with an adapter for each role the optimizer is another one
    decisive = {
        "algorithm.adv_estimator": ("role_reinforce_pp", "role_grpo"),
        "selfplay.profile": ("medserl", "classic"),
        "selfplay.reward": ("medserl", "zero_sum"),
        "selfplay.judge": ("labels", "http"),
        "selfplay.judge_server.model": ("gpt-5", "gpt-4"),
        "selfplay.blind.model": (None, "gpt-4"),
        "data.train_files": ("train.parquet", files["data.train_files"]),
    }
    refused = problem("checkpoints", here | {key: now for key, (_, now) in decisive.items()})
    assert "has checkpoints of another run (" in refused
    assert all(f"{key} was {was} and is {now}" in refused for key, (was, now) in decisive.items())
    on_purpose = {
        "trainer.resume_mode": "resume_path",
        "trainer.resume_from_path": "runs/quickstart/global_step_3",
    }
    on_purpose = {**here, **on_purpose, "trainer.experiment_name": "another"}
    assert problem("checkpoints", on_purpose) == ""
    chosen = problem("checkpoints", {**on_purpose, "selfplay.profile": "classic"})
    assert chosen == "warn: from this checkpoint on selfplay.profile was medserl and is classic"
    assert "global_step_3 cannot be resumed: data.shuffle" in problem(
        "checkpoints", on_purpose | shuffled
    )
    changed = {**here, "selfplay.reward": "zero_sum"}
    assert problem("checkpoints", changed | {"selfplay.certify": "only"}) == ""
    on_purpose = {"selfplay.allow_changes": True}
    assert problem("checkpoints", changed | on_purpose).startswith(
        "warn: from here on selfplay.reward was medserl and"
    )
    assert "set trainer.experiment_name to a new name" in problem("checkpoints", changed)
    with pytest.raises(
        ConfigError, match="has checkpoints of another run"
    ):  # where the start is not checked
        SelfPlayTrainer(run_of(changed).config)
    pq.write_table(pa.table({"row": range(65)}), "train.parquet")
    assert "or its rows changed" in problem("checkpoints", here)
    apart = {**here, "selfplay.adapters": "per_role", "selfplay.allow_changes": True}
    (folder / "run_config.yaml").write_text(config_text(run_of(apart)))
    assert "selfplay.train was both and is attacker, and verl takes" in problem(
        "checkpoints", apart | of_checkpoint
    )


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("tokenizer.json", '"add_prefix_space": false', '"add_prefix_space": true'),
        ("chat_template.jinja", "assistant", "model"),
    ],
)
def test_a_tokenizer_changed_in_place_ends_a_resume(
    home: Path, file: str, old: str, new: str
) -> None:
    model, folder = home / "tiny_player", home / "runs" / "quickstart"
    shutil.copytree(resource("assets/tiny_player"), model)
    here = {**trained(folder, 3), PATH: str(model)}
    (folder / "run_config.yaml").write_text(config_text(run_of(here)))
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    assert problem("checkpoints", here) == ""
    before = (model / file).read_text()
    (model / file).write_text(before.replace(old, new))
    assert before != (model / file).read_text()
    assert "tokenizer or chat template is no longer" in problem("checkpoints", here)


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("/old/models/qwen", "/new/models/qwen/", True),
        ("org/qwen", "/models/qwen", True),
        ("/old/qwen", "/old/smollm", False),
        ("runs/warm/global_step_54/huggingface", "/moved/warm/global_step_54/huggingface", True),
        ("runs/warm/global_step_54/huggingface", "runs/warm/global_step_9/huggingface", False),
        ("runs/warm/global_step_54/huggingface", "runs/again/global_step_54/huggingface", False),
        (
            "runs/play/global_step_5/actor/huggingface",
            "runs/play/global_step_6/actor/huggingface",
            False,
        ),
    ],
)
def test_a_model_may_be_moved_but_another_checkpoint_is_another_model(
    home: Path, before: str, after: str, same: bool
) -> None:
    folder = home / "runs" / "quickstart"
    here = trained(folder, 3)
    (folder / "run_config.yaml").write_text(config_text(run_of({**here, PATH: before})))
    answer = problem("checkpoints", {**here, PATH: after})
    assert answer == "" if same else f"{PATH} was {before} and is {after}" in answer


@pytest.mark.parametrize("text", ["{", "\xff", "- a list", "7"])
def test_a_config_of_the_run_that_cannot_be_read_is_named(home: Path, text: str) -> None:
    here = trained(home / "run", 3) | {"selfplay.records": "run"}
    Path("run/run_config.yaml").write_text(text, encoding="latin-1")
    answer = problem("checkpoints", here)
    assert answer.startswith(
        "run/run_config.yaml says which run the checkpoints are of, and cannot be read ("
    )


def test_a_checkpoint_of_another_number_of_workers_is_named(home: Path) -> None:
    here = trained(home / "run", 3)
    weights = home / "run" / "global_step_3" / "actor"
    weights.mkdir()
    (weights / "model_world_size_2_rank_0.pt").touch()
    chosen = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(weights.parent)}
    for resumed in (here, chosen):
        assert "global_step_3 is of 2 training workers, and this run has 1. Set" in problem(
            "checkpoints", resumed
        )
    assert problem("checkpoints", {**here, "trainer.n_gpus_per_node": 2}) == ""


@pytest.mark.parametrize(("path", "said"), [(None, "null"), ("runs/quickstart", "runs/quickstart")])
def test_a_path_to_resume_from_that_names_no_step_is_refused(path: str | None, said: str) -> None:
    answer = problem(
        "checkpoints", {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": path}
    )
    assert (
        f"trainer.resume_from_path={said} is no checkpoint. Set it to a folder global_step_N"
        in answer
    )


def test_a_last_checkpoint_that_is_none_is_told(home: Path) -> None:
    folder = home / "runs" / "quickstart"
    here = {"trainer.default_local_dir": str(folder)}
    for step in (9, 10):
        (folder / f"global_step_{step}").mkdir(parents=True)
        (folder / f"global_step_{step}" / "data.pt").touch()
    assert problem("checkpoints", here).startswith(
        f"{folder / LATEST} is missing beside checkpoints"
    )
    for text in ("", "7", "\0\0", "x"):
        (folder / LATEST).write_text(text)
        assert f"says {text!r}, which is no checkpoint. Write 10 into it" in problem(
            "checkpoints", here
        )
    (folder / LATEST).write_text("10")
    assert problem("checkpoints", here) == ""


def test_a_damaged_line_of_the_games_is_named_before_ray(home: Path) -> None:
    records = home / "run"
    records.mkdir()
    (records / "games.jsonl").write_text('{"step": 1}\n{"step": \n{"step": 2}\n')
    run = {**trained(home / "checkpoints", 2), "selfplay.records": str(records)}
    assert f"{records}/games.jsonl, line 2 has no step, so the run cannot be resumed" in problem(
        "checkpoints", run
    )


def test_a_run_that_is_finished_says_at_once_how_to_go_on(home: Path) -> None:
    here = trained(home / "runs" / "quickstart", 12)
    assert "has trained 12 steps, and trainer.total_training_steps=12: nothing is left" in problem(
        "checkpoints", here
    )
    assert problem("checkpoints", {**here, "trainer.total_training_steps": 13}) == ""
    assert problem("checkpoints", {**here, "trainer.val_only": True}) == ""


def test_others_lines_go_to_the_runs_log_and_an_error_to_the_terminal(
    home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = OmegaConf.create({"selfplay": {"records": "runs/x"}, "hydra": {"verbose": False}})
    log = TrainLog()
    monkeypatch.setenv(MARK, "")  # which is taken away after the test
    log.on_run_start(config)
    mark = config.ray_kwargs.ray_init.runtime_env.env_vars[MARK]
    log.on_job_start(config)
    print("\x1b[36m(Worker pid=1)\x1b[0m of Ray's")
    print("[medserl] step 9/9: a judge's text\n(Worker pid=1) [medserl] done")
    print(f"(Worker pid=1) [medserl{mark}] step 1/2: \ud800\x1b[2J", file=sys.stderr)
    os.write(2, b"of a library\n")
    log.on_job_end(config, JobReturn(status=JobStatus.FAILED))
    print("Traceback", file=sys.stderr)
    said, errors = capfd.readouterr()
    of_run = (home / "runs" / "x" / "train.log").read_text()
    assert "are in runs/x/train.log" in said.splitlines()[0]
    assert (
        said.splitlines()[1:] == ["[medserl] step 1/2: \\ud800\\x1b[2J"] and errors == "Traceback\n"
    )
    assert of_run.endswith(
        "[medserl] done\n(Worker pid=1) [medserl] step 1/2: \\ud800\x1b[2J\nof a library\n"
    )
    config.hydra.verbose = True
    log.on_job_start(config)
    print("of verl's")
    assert capfd.readouterr().out == "of verl's\n"
    monkeypatch.delenv(MARK)
    log.on_job_end(config, JobReturn(status=JobStatus.COMPLETED))
    assert capfd.readouterr().out.startswith(
        "[medserl] done: runs/x. Read its games: medserl show runs/x, or medserl r"
    )


def test_ctrl_c_ends_a_run_with_the_way_to_resume(capsys: pytest.CaptureFixture[str]) -> None:
    others: list[Any] = []
    hook = partial(_say_how_to_resume, lambda *error: others.append(error[0]), "x")
    hook(ValueError, ValueError(), None)
    assert others == [ValueError] and capsys.readouterr().out == ""
    hook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().out == "[medserl] stopped. The same command starts anew\n"
    trained(Path("x"), 3)
    hook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert (
        capsys.readouterr().out
        == "[medserl] stopped. The same command resumes from the last checkpoint in x\n"
    )
    assert others == [ValueError]
