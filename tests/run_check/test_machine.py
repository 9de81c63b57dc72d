"""Checks of the machine before a run starts, and what a run then prints."""

import json
import os
import signal
import sys
from hashlib import sha256
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

from medserl_agentloop.core.run_check import machine
from medserl_agentloop.core.run_check.machine import CHECKS
from medserl_agentloop.plugin import TrainLog
from medserl_agentloop.terminal import MARK


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
    url = unused_url()
    answer = problem("opponent", {"selfplay.train": "assessor", "selfplay.opponent.url": url})
    assert answer.startswith(f"selfplay.opponent.url={url}: no server answers at {url}/v1")
    assert problem("opponent", {}) == ""


@pytest.mark.parametrize("place", ["someone/no-model", "./models/nothing", "."])
def test_a_model_that_is_neither_a_folder_nor_on_the_hub_is_refused(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model_info(self: Any, name: str, *, timeout: float) -> None:
        raise httpx.ConnectError("Name or service not known")

    monkeypatch.setattr(machine.HfApi, "model_info", model_info)
    key = "actor_rollout_ref.model.path"
    assert f"{key}={place} is not a model folder" in problem("model", {key: place})
    assert problem("model", {}) == ""


def current_cluster(address: str) -> Path:
    """The file in which `ray start` leaves the address of its cluster."""
    file = Path(get_ray_address_file(None))
    file.parent.mkdir()
    file.write_text(address)
    return file


def test_a_machine_without_a_gpu_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert "trainer.device=cuda" in problem("GPU", {}, "qwen3_4b")
    assert problem("GPU", {}) == ""
    assert "trainer.nnodes=2 needs a Ray cluster" in problem("GPU", {"trainer.nnodes": 2})
    current_cluster("10.0.0.1:6379")  # the GPUs may be on its other machines
    assert problem("GPU", {"trainer.nnodes": 2}, "qwen3_4b") == ""


def test_a_run_that_would_wait_for_cpus_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "get_num_cpus", lambda **options: 12.0)
    units = "transfer_queue.backend.SimpleStorage.num_data_storage_units"
    answer = problem("CPUs", {units: 8}, "qwen3_4b")  # as verl has it
    assert "counts 12" in answer and "ray_kwargs.ray_init.num_cpus=13" in answer
    assert "needs 13 Ray CPUs" in problem("CPUs", {"trainer.n_gpus_per_node": 3}, "qwen3_4b")
    current_cluster("10.0.0.1:6379")  # the CPUs may be on its other machines
    assert problem("CPUs", {units: 8}, "qwen3_4b") == ""
    monkeypatch.setenv("RAY_ADDRESS", "local")  # a cluster of the run's own
    assert problem("CPUs", {units: 8}, "qwen3_4b")
    fits = ({}, {units: 8, "ray_kwargs.ray_init.num_cpus": 13}, {units: 8, "trainer.nnodes": 2})
    assert [problem("CPUs", changes, "qwen3_4b") for changes in fits] == ["", "", ""]


def test_data_file_that_is_missing_or_not_converted_is_refused(files: dict[str, Any]) -> None:
    assert problem("data", files) == ""
    assert problem("data", {**files, "data.val_files": ["hdfs://data/other.parquet"]}) == ""
    for key in ("data.train_files", "data.val_files"):
        refused = problem("data", {**files, key: ["data/other.parquet"]})
        assert "medserl data convert --input FILE.csv --output data" in refused
        assert refused.startswith(f"{key}: data/other.parquet does not exist")
    Path("damaged.parquet").write_bytes(Path(files["data.val_files"]).read_bytes()[:-9])
    damaged = problem("data", {**files, "data.val_files": "damaged.parquet"})
    assert damaged.startswith("damaged.parquet: ")
    pq.write_table(pa.table({"question": ["2 + 2?"]}), "plain.parquet")
    plain = problem("data", {**files, "data.train_files": "plain.parquet"})
    assert "has no column agent_name, extra_info" in plain
    short = {**files, "data.max_prompt_length": 9, "data.max_response_length": 9}
    needed = problem("data", short).splitlines()[0]
    assert "data.max_prompt_length=" in needed and "data.max_response_length=" in needed
    Path("my notes.csv").touch()
    answer = problem("data", {**files, "data.train_files": "my notes.csv"})
    assert answer.endswith("medserl data convert --input 'my notes.csv' --output .")


def test_files_of_two_conversions_are_refused(home: Path) -> None:
    names = {f"data.{of}_files": f"{of}.parquet" for of in ("train", "val")}
    for name in names.values():
        (home / name).write_text(name)
    hashes = {name: {"sha256": sha256(name.encode()).hexdigest()} for name in names.values()}
    (home / "manifest.json").write_text(json.dumps({"outputs": hashes}))
    assert "the file is not the one" not in problem("data", names)
    (home / "val.parquet").write_text("of an older conversion")
    assert "val.parquet: the file is not the one" in problem("data", names)


@pytest.mark.parametrize("variable", ["HOME", "RAY_TMPDIR"])
def test_a_folder_that_cannot_be_written_is_named_before_ray(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert problem("folders", {}) == ""
    monkeypatch.setenv(variable, "/proc/none")  # where root cannot write either
    answer = problem("folders", {})
    assert answer.startswith("/proc/none") and f"export {variable}=" in answer
    unwritable = problem("folders", {"trainer.default_local_dir": "/proc/run"})
    assert "set trainer.default_local_dir" in unwritable


def test_the_recipes_callback_refuses_what_is_missing_and_prints_warnings(
    capsys: pytest.CaptureFixture[str], data: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit, match=r"data\.val_files: none\.parquet does not exist"):
        start_up(data[0], "data.val_files=none.parquet")
    # this machine is not the one that runs it
    start_up("+ray_kwargs.ray_init.address=ray://10.0.0.1:10001")
    start_up(*data, "actor_rollout_ref.rollout.top_p=0.9")
    assert "[medserl] warning: actor_rollout_ref.rollout.top_p=0.9" in capsys.readouterr().out
    before = signal.getsignal(signal.SIGTERM)
    _post_init_hooks.pop()()  # once Ray has started, SIGTERM ends the run as Ctrl-C does
    assert signal.signal(signal.SIGTERM, before) is signal.default_int_handler


def test_a_check_that_breaks_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: tuple[str, ...]
) -> None:
    monkeypatch.setitem(CHECKS, "data", lambda run: iter([str(1 / 0)]))
    with pytest.raises(SystemExit, match="not started: ZeroDivisionError"):
        start_up(*data)
    assert "Traceback" in capsys.readouterr().err


def test_a_sweep_of_hydra_is_refused_before_its_first_run() -> None:
    with pytest.raises(SystemExit, match=r"--multirun .*: give each run its own command"):
        start_up(event="on_multirun_start")


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
    assert said.splitlines()[1:] == ["[medserl] step 1/2: \\ud800\\x1b[2J"]
    assert errors == "Traceback\n"
    assert of_run.endswith(
        "[medserl] done\n(Worker pid=1) [medserl] step 1/2: \\ud800\x1b[2J\nof a library\n"
    )
    config.hydra.verbose = True
    log.on_job_start(config)
    print("of verl's")
    assert capfd.readouterr().out == "of verl's\n"
    monkeypatch.delenv(MARK)
    log.on_job_end(config, JobReturn(status=JobStatus.COMPLETED))
    *_, done, gained = capfd.readouterr().out.splitlines()
    assert "runs/x" in done and "trainer.test_freq" in gained, "nothing was validated"
    TrainLog(hints=False).on_job_end(config, JobReturn(status=JobStatus.COMPLETED))
    assert capfd.readouterr().out == ""
