"""``medserl doctor``: each check finds its cause, faked here, and says what to do.

What the start of a run refuses is one table with it, tested in tests/run_check/test_machine.py.
"""

import io
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import typer
from fastapi import FastAPI
from invoking import invoke
from rich.console import Console
from run_check.runs import run_of, schema
from serving import serving

from medserl_agentloop import compiler, doctor, engine_check
from medserl_agentloop.cli import app
from medserl_agentloop.doctor import CheckResult, diagnose
from medserl_agentloop.paths import read_parquet

JUDGE = {"selfplay.judge_server.url": "http://localhost:1/v1", "selfplay.judge_server.model": "m"}


pytestmark = pytest.mark.usefixtures("no_cluster")


def lines(check: Any, *arguments: Any) -> str:
    """All that a check finds, one line for each."""
    found = check(*arguments)
    return "\n".join(
        "fail: " + what if isinstance(what, str) else ": ".join(what) for what in found
    )


def test_a_version_that_does_not_fit_and_a_missing_package_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert lines(doctor._versions, "cpu").startswith("ok: medserl-agentloop ")

    def version(name: str) -> str:
        if name == "ray":
            raise doctor.PackageNotFoundError(name)
        return {"transformers": "5.12.0"}.get(name) or real(name)

    real = doctor.version
    monkeypatch.setattr(doctor, "version", version)
    answer = lines(doctor._versions, "cpu")
    assert "fail: ray is missing, and " in answer
    assert "fail: transformers is 5.12.0, and verl needs " in answer


def test_with_a_gpu_the_versions_of_the_gpu_extras_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(doctor, "_driver", lambda: None)
    assert lines(doctor._versions, "cpu").startswith(
        "ok: "
    )  # a CUDA build without a GPU trains on the CPU
    monkeypatch.setattr(doctor, "_driver", lambda: "580.1")
    monkeypatch.setattr(doctor, "version", lambda name: "0")
    answer = lines(doctor._versions, "cpu")
    assert "fail: flash-attn" not in answer  # verl's fsdp asks for it by an extra of its own
    assert all(
        f"fail: {name} is 0, and verl needs {name}==" in answer for name in ("sglang", "torch")
    )


def test_a_node_without_the_plugin_or_with_other_versions_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = ModuleNotFoundError("No module named 'medserl_agentloop'")
    get = Mock(side_effect=[doctor._installed(), "verl 0.8.0", missing])
    nodes = [
        {"Alive": True, "NodeManagerAddress": f"10.0.0.{n}", "NodeID": "ab" * 28} for n in range(3)
    ]
    fake = {
        "init": Mock(),
        "nodes": lambda: nodes,
        "remote": Mock(),
        "get": get,
        "shutdown": Mock(),
    }
    for name, function in fake.items():
        monkeypatch.setattr(f"ray.{name}", function)
    first, second, third = lines(doctor._ray, "cpu").splitlines()
    assert first == f"ok: node 10.0.0.0: {doctor._installed()}"
    assert second.startswith(
        "fail: node 10.0.0.1 has verl 0.8.0, and this machine medserl-agentloop"
    )
    assert third.startswith(
        "fail: node 10.0.0.2: a worker cannot load the plugin (No module named 'medserl_agentloop'"
    )


@pytest.mark.parametrize(
    ("capability", "free", "answer"),
    [
        ((9, 0), 95, "ok: GPU 0, Fake (sm_90, 95 GiB), driver 580.1"),
        ((10, 3), 95, "ok: GPU 0, Fake (sm_103, 95 GiB), driver 580.1"),
        ((7, 5), 95, "has no kernels for it, only for sm_90, sm_100, sm_120"),
        ((9, 0), 50, "warn: GPU 0, Fake (sm_90, 95 GiB): another process holds 45 GiB"),
    ],
)
def test_cards_without_kernels_or_with_other_processes_are_found(
    capability: tuple[int, int], free: float, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_name": lambda index: "Fake",
        "get_device_capability": lambda index: capability,
        "mem_get_info": lambda index: (int(free * doctor.GIB), 95 * doctor.GIB),
        "get_arch_list": lambda: [
            "sm_90",
            "sm_100",
            "sm_120",
        ],  # Hopper and data centres' Blackwell
    }
    for name, function in fake.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(doctor, "_driver", lambda: "580.1")
    assert answer in lines(doctor._cards, "cpu")


def test_a_driver_that_is_too_old_is_named_with_the_one_that_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(doctor, "_driver", lambda: "535.104")
    assert "with driver 535.104: CUDA 13.0 needs 580 or later" in lines(doctor._cards, "cpu")


def test_a_small_shared_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64 * 1024**2))
    assert "warn: /dev/shm has 0.1 GiB free, and a run on cpu should have 1." in lines(
        doctor._shared_memory, "cpu"
    )
    assert "--shm-size=10g" in lines(doctor._shared_memory, "cuda")


def test_a_proxy_before_localhost_and_a_name_without_an_address_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert lines(doctor._network, "cpu") == ""
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    for past, warned in (
        ("", True),
        ("notlocalhost.example", True),
        (".corp, localhost", False),
        ("*", False),
    ):
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.setenv(name, past)
        assert (
            "warn: http_proxy is set, and no_proxy has no localhost."
            in lines(doctor._network, "cpu")
        ) is warned
    monkeypatch.setattr(
        socket, "gethostbyname", Mock(side_effect=OSError("Name or service not known"))
    )
    assert "Put the name into /etc/hosts" in lines(doctor._network, "cpu")


@pytest.mark.parametrize(
    ("nvcc", "gcc", "ccbin", "answers"),
    [
        ("release 13.0, V13.0.88", "11.4.0", "", []),
        ("release 12.8, V12.8.9", "13.3.0", "", ["nvcc is 12.8, and torch is built for CUDA 13.0"]),
        ("", "12.2.0", "", ["nvcc is missing, and torch is built for CUDA 13.0", "g++ is 12.2.0"]),
        ("release 13.0, V13.0.88", "12.2.0", "-ccbin g++-11", ["g++-11 is missing"]),
    ],
)
def test_compilers_that_the_first_start_lacks_are_named_with_a_command(
    nvcc: str,
    gcc: str,
    ccbin: str,
    answers: list[str],
    monkeypatch: pytest.MonkeyPatch,
    wheels: Path,
) -> None:
    monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST", raising=False)
    for named in ("/opt/cuda", "", ""):  # what is named stays, and a second process finds all done
        os.environ["CUDA_HOME"] = named
        compiler.use_wheels()
        assert os.environ["CUDA_HOME"] == (named or str(wheels))
        assert os.environ["LD_LIBRARY_PATH"] == f"/usr/lib/own:{wheels}/lib"
        assert (wheels / "lib64" / "stubs" / "libcuda.so").exists() != bool(named)
    said = {f"{wheels}/bin/nvcc": nvcc, "g++": gcc}
    monkeypatch.setattr(doctor, "_output", lambda command, *options: said.get(command, ""))
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", ccbin)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = lines(doctor._compilers, run_of({}, "qwen3_4b")).splitlines()
    expected = [*answers, "there is no Python.h. Run: apt-get install python3"]
    assert len(found) == len(expected) and all(
        text in line for text, line in zip(expected, found, strict=True)
    )
    assert "export FLASHINFER_CUDA_ARCH_LIST=9.0" in lines(
        doctor._kernels, run_of({}, "qwen3_4b"), Console()
    )


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CUDA's compiler, as NVIDIA's wheels bring it."""
    home = tmp_path / "nvidia" / "cu13"
    for file in ("bin/nvcc", "include/cuda_runtime.h", "lib/libcudart.so.13"):
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).touch()
    monkeypatch.setattr(compiler.sysconfig, "get_path", lambda name: str(tmp_path))
    for name, value in {
        "CUDA_HOME": "",
        "CUDA_PATH": "",
        "LD_LIBRARY_PATH": "/usr/lib/own",
    }.items():
        monkeypatch.setenv(name, value)
    return home


def test_compiled_package_that_does_not_load_is_named_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = {
        "sgl_kernel": "libnuma.so.1: cannot open shared object file",
        "flash_attn_2_cuda": "/site-packages/flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda",
    }
    for name, error in errors.items():
        (tmp_path / f"{name}.py").write_text(f"raise ImportError({error!r})")
    (tmp_path / "torch.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    kernels, attention = engine_check.libraries(run_of({}, "qwen3_4b"))
    assert kernels.startswith(
        f"sgl_kernel does not load: ImportError: {errors['sgl_kernel']}. Try: apt-get install"
    )
    assert (
        f"{errors['flash_attn_2_cuda']}. Try: pip install" in attention
        and "/torch2.11/simple/" in attention
    )


def test_engine_that_keeps_its_memory_is_no_success() -> None:
    assert engine_check.given_back(before=79.0, started=20.0, asleep=70.0) == 50.0
    assert engine_check.given_back(before=0.0, started=0.0, asleep=0.0) == 0.0
    with pytest.raises(RuntimeError, match=r"gave 1\.0 of 59\.0 GiB back"):
        engine_check.given_back(before=79.0, started=20.0, asleep=21.0)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("", "it printed nothing"),
        ("Traceback\n  File\nRuntimeError: odd\n", "RuntimeError: odd"),
        (
            "torch.OutOfMemoryError: CUDA out of memory.\nRuntimeError: died",
            "rollout.gpu_memory_utilization",
        ),
        (
            "python: error while loading shared libraries: libcudart.so.13: cannot open shared "
            "object",
            "constraints-gpu",
        ),
        (
            "Scheduler watchdog timeout (self.watchdog_timeout=300)\nkilled",
            "sglang.watchdog_timeout=1800",
        ),
    ],
)
def test_engine_that_does_not_start_gives_its_reason_and_a_remedy(said: str, answer: str) -> None:
    assert answer in engine_check._reason(said)


def test_engine_that_cannot_start_here_says_which_libraries_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [*engine_check.engine(run_of({}, "own_notes"), Console())] == [
        ("warn", "not started: this needs a run with SGLang.")
    ]
    for file in ("kernels/ops.so", "torch/lib/libtorch.so"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    (tmp_path / "ldd").write_text(
        "#!/bin/sh\necho ' libtorch.so => not found\n libnuma.so.1 => not found'\n"
    )
    (tmp_path / "ldd").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(engine_check.sysconfig, "get_path", lambda _: str(tmp_path))
    ((status, text),) = engine_check.engine(run_of({}, "qwen3_4b"), Console())
    assert (status, text.partition("missing here: ")[2]) == (
        "warn",
        "libnuma.so.1 and 0 more (kernels); libnuma.so.1 and 0 more (torch).",
    )


def test_bundle_has_the_log_without_keys_notes_and_games(
    files: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_of({**files, "selfplay.records": str(tmp_path)}).config
    note = read_parquet(Path(files["data.train_files"]))["prompt"][0].as_py()[0]["content"]
    log = ["RuntimeError: CUDA error", f"cannot read {note!r}", "GET http://me:pass@host"]
    log.append("the key-of-a-judge, hf_" + 16 * "a")
    (tmp_path / "train.log").write_text("\n".join([*log, "a turn of this very run was odd"]))
    (tmp_path / "games.jsonl").write_text('{"text": "a turn of this very run"}\n')
    monkeypatch.setenv("JUDGE_API_KEY", "key-of-a-judge")
    doctor.write_bundle(
        tmp_path / "run.zip", [CheckResult("disk", "fail", "full. Free some.")], config
    )
    with zipfile.ZipFile(tmp_path / "run.zip") as bundle:
        assert set(bundle.namelist()) == {
            "findings.txt",
            "versions.txt",
            "nvidia-smi.txt",
            "config.yaml",
            "train.log",
        }
        kept = bundle.read("train.log").decode().splitlines()
    assert kept == [log[0], doctor.LEFT_OUT, "GET http://***@host", "the ***, ***", doctor.LEFT_OUT]

    config.data.train_files = str(tmp_path / "cut.parquet")
    (tmp_path / "cut.parquet").write_bytes(Path(files["data.train_files"]).read_bytes()[:1000])
    doctor.write_bundle(tmp_path / "run.zip", [], config)
    with zipfile.ZipFile(tmp_path / "run.zip") as bundle:
        assert "train.log" not in bundle.namelist() and b"cut.parquet" in bundle.read(
            "logs_left_out.txt"
        )


def test_engine_has_the_variables_of_the_run_and_is_given_up_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(command: list[str], *, timeout: float, env: dict[str, str], **_: Any) -> None:
        assert env["SGLANG_FLASHINFER_USE_PAGED"] == "1"  # as the run gives it to Ray
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(engine_check.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(engine_check.subprocess, "run", never)
    run = run_of({"selfplay.records": str(tmp_path)}, "[qwen3_0_6b,first_run]")
    ((status, text),) = engine_check.engine(run, Console(file=io.StringIO()))
    assert status == "fail" and "was not over after 1800 s, and was given up" in text


def test_a_host_without_memory_for_the_plan_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "get_system_memory", lambda: 96 * doctor.GIB)
    assert lines(doctor._memory, run_of({}, "qwen3_4b")).startswith("ok: this machine has 96 GiB")
    offloaded = {
        f"actor_rollout_ref.actor.fsdp_config.{what}_offload": True
        for what in ("param", "optimizer")
    }
    assert lines(doctor._memory, run_of(offloaded, "qwen3_4b")).startswith("warn: ")


def test_unreachable_judge_fails_and_an_unmeasured_one_is_a_warning() -> None:
    (found,) = doctor._asked({"game": doctor._game}, run_of({**JUDGE, "selfplay.judge": "llm"}))
    assert (
        found.status == "fail"
        and "judge_server.url=http://localhost:1/v1 cannot be connected to" in found.text
    )
    with serving(FastAPI()) as address:
        there = JUDGE | {"selfplay.judge": "llm", "selfplay.judge_server.url": address}
        answer = lines(doctor._game, run_of(there))
    assert "warn: the judge gave no answer to a first question (" in answer
    assert "warn: judge: selfplay.judge=llm was never measured" in answer


def test_a_disk_too_small_for_the_checkpoints_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = {"trainer.default_local_dir": str(tmp_path)}
    assert "2 kept, need 0.0" in lines(doctor._disk, run_of(here))
    assert lines(doctor._disk, run_of({**here, "trainer.max_actor_ckpt_to_keep": None})).startswith(
        "warn: "
    )
    sizes = {
        "qwen3_4b": "45.0 GiB, 2 kept, need 89.9",
        "[qwen3_4b,lora]": "15.7 GiB, 2 kept, need 31.",
    }
    for recipe, size in sizes.items():
        assert f"checkpoints of {size}" in lines(doctor._disk, run_of(here, recipe))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1024**2))
    assert "fail: " in (full := lines(doctor._disk, run_of(here)))
    assert "trainer.max_actor_ckpt_to_keep to fewer" in full
    (tmp_path / "file").touch()
    no_folder = run_of({"trainer.default_local_dir": str(tmp_path / "file" / "run")})
    assert "is no folder that can be written to" in lines(doctor._disk, no_folder)


def test_doctor_passes_a_good_run_and_lists_all_failures_of_a_broken_one(
    files: dict[str, Any],
) -> None:
    good = list(diagnose(run_of(files).config, schema()))
    assert {finding.status for finding in good if finding.check != "shared memory"} == {"ok"}
    assert {finding.check for finding in good} >= {
        "config",
        "versions",
        "GPU",
        "model",
        "data",
        "dry run",
    }
    assert "1 turn(s) by a script, " in good[-1].text
    broken = {**files, "data.max_prompt_length": 9, "trainer.logger": ["swanlab"]}
    failed = {finding.check: finding.text for finding in diagnose(run_of(broken).config, schema())}
    assert "data.max_prompt_length=9" in failed["data"]
    assert "the package swanlab is not installed" in failed["packages"]
    found = diagnose(run_of({"trainer.use_v1": False}).config, schema())
    assert {"config", "data"} <= {finding.check for finding in found if finding.status == "fail"}


def test_a_check_that_breaks_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_versions", Mock(side_effect=RuntimeError("odd machine")))
    first, *others = diagnose(None, schema())
    broken_check = "the check itself failed (RuntimeError: odd machine). Mend that first."
    assert first == CheckResult("versions", "fail", broken_check)
    assert {finding.check for finding in others} >= {"cards", "network"}


def test_a_check_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LIMIT_S", 0.01)
    (finding,) = doctor._asked({"network": lambda: iter([str(threading.Event().wait())])})
    assert finding.status == "fail" and "was not over after 0.01 s" in finding.text


def test_a_dead_cluster_is_named_before_ray_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    assert (
        "No cluster of Ray's answers at 127.0.0.1:9: start it, or run: unset RAY_ADDRESS"
        in lines(doctor._ray, "cpu")
    )


@pytest.mark.parametrize(("status", "code"), [("warn", 0), ("fail", 1)])
def test_the_command_ends_with_1_if_something_blocks(
    status: Any, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = CheckResult("disk", status, "full. Free some.")
    monkeypatch.setattr(doctor, "diagnose", lambda composed, schema, **options: iter([full]))
    answer = invoke("doctor", "--json")
    assert answer.exit_code == code
    assert json.loads(answer.stdout) == [
        {"check": "disk", "status": status, "text": "full. Free some."}
    ]
    assert f"{status}  disk: full. Free some." in invoke("doctor").stdout


# --- --json is JSON and nothing else, whatever is logged beside it ---


COMMANDS = {"doctor": [], "plan": ["quickstart"]}
BORDER = "-- the next --\n"
ALL = f"""
import sys
from medserl_agentloop.cli import app
for command in sys.argv[1:]:
    app([*command.split(), "--json"], standalone_mode=False)
    sys.stdout.write({BORDER!r})
"""


def test_every_command_with_json_is_here() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    with_json = [
        name
        for name, command in commands.items()
        if any("--json" in param.opts for param in command.params)
    ]
    assert sorted(with_json) == sorted(COMMANDS)


@pytest.mark.slow
def test_json_can_be_piped() -> None:
    program = [
        sys.executable,
        "-c",
        ALL,
        *(" ".join([name, *words]) for name, words in COMMANDS.items()),
    ]
    done = subprocess.run(program, capture_output=True, text=True)
    *printed, rest = done.stdout.split(BORDER)
    assert len(printed) == len(COMMANDS) and not rest and all(map(json.loads, printed)), done.stderr
    assert "runs on the CPU" in done.stderr
