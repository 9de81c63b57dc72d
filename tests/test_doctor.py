"""``medserl doctor``: each check finds its cause, faked here, and says what to do.

What the start of a run refuses is one table with it, tested in tests/run_check/test_machine.py.
"""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from invoking import invoke
from rich.console import Console
from run_check.runs import run_of, schema

from medserl_agentloop import backends
from medserl_agentloop.tools import doctor
from medserl_agentloop.tools.doctor import CheckResult, diagnose

pytestmark = pytest.mark.usefixtures("no_cluster")


def lines(check: Any, *arguments: Any) -> str:
    """All that a check finds, one line for each."""
    found = [("fail", one) if isinstance(one, str) else one for one in check(*arguments)]
    return "\n".join(map(": ".join, found))


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


@pytest.mark.parametrize(
    ("capability", "free", "answer"),
    [
        ((10, 3), 95, "ok: GPU 0, Fake (sm_103, 95 GiB), driver 580.1"),
        ((7, 5), 95, "has no kernels for it, only for sm_90, sm_100"),
        ((9, 0), 50, "warn: GPU 0, Fake (sm_90, 95 GiB): another process holds 45 GiB"),
    ],
)
def test_cards_without_kernels_or_with_other_processes_are_found(
    capability: tuple[int, int], free: float, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = {
        "is_available": True,
        "device_count": 1,
        "get_device_name": "Fake",
        "get_device_capability": capability,
        "mem_get_info": (int(free * doctor.GIB), 95 * doctor.GIB),
        "get_arch_list": ["sm_90", "sm_100"],  # Hopper and data centres' Blackwell
    }
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(doctor, "_driver", lambda: "580.1")
    assert answer in lines(doctor._cards, "cpu")


def test_a_small_shared_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64 * 1024**2))
    assert "warn: /dev/shm has 0.1 GiB free, but a run on cpu should have 1." in lines(
        doctor._shared_memory, "cpu"
    )
    assert "--shm-size=10g" in lines(doctor._shared_memory, "cuda")


def test_the_wheels_compiler_is_named_unless_another_one_is(wheels: Path) -> None:
    for named in ("/opt/cuda", "", ""):  # what is named stays, and a second process finds all done
        os.environ["CUDA_HOME"] = named
        backends.use_wheels()
        assert os.environ["CUDA_HOME"] == (named or str(wheels))
        assert os.environ["LD_LIBRARY_PATH"] == f"/usr/lib/own:{wheels}/lib"
        assert (wheels / "lib64" / "stubs" / "libcuda.so").exists() != bool(named)
    found = doctor._kernels(run_of({}, "qwen3_4b"), Console())
    assert "export FLASHINFER_CUDA_ARCH_LIST=9.0" in next(iter(found))


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CUDA's compiler, as NVIDIA's wheels bring it."""
    home = tmp_path / "nvidia" / "cu13"
    for file in ("bin/nvcc", "include/cuda_runtime.h", "lib/libcudart.so.13"):
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).touch()
    monkeypatch.setattr(backends.sysconfig, "get_path", lambda name: str(tmp_path))
    for name, value in {
        "CUDA_HOME": "",
        "CUDA_PATH": "",
        "LD_LIBRARY_PATH": "/usr/lib/own",
    }.items():
        monkeypatch.setenv(name, value)
    return home


def test_a_host_without_memory_for_the_plan_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "get_system_memory", lambda: 96 * doctor.GIB)
    assert lines(doctor._room, run_of({}, "qwen3_4b")).startswith("warn: ")  # with offload
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    kept = {f"{fsdp}.{what}_offload": False for what in ("param", "optimizer")}
    assert lines(doctor._room, run_of(kept, "qwen3_4b")).startswith("ok: this machine has 96 GiB")
    unknown = run_of({"actor_rollout_ref.model.path": "acme/unknown"})
    assert lines(doctor._room, unknown).startswith("warn: not planned: ")


def test_a_disk_too_small_for_the_checkpoints_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = {"trainer.default_local_dir": str(tmp_path)}
    assert "2 kept, need 0.0" in lines(doctor._room, run_of(here))
    all_kept = run_of({**here, "trainer.max_actor_ckpt_to_keep": None})
    assert lines(doctor._room, all_kept).startswith("warn: ")
    large = lines(doctor._room, run_of(here, "qwen3_4b"))
    assert "checkpoints of 45.0 GiB, 2 kept, need 134.9" in large
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1024**2))
    full = lines(doctor._room, run_of(here))
    assert "fail: " in full and "trainer.max_actor_ckpt_to_keep" in full


def test_doctor_passes_a_good_run_and_lists_all_failures_of_a_broken_one(
    files: dict[str, Any],
) -> None:
    good = list(diagnose(run_of(files).config, schema()))
    checked = [finding.status for finding in good if finding.check != "shared memory"]
    assert set(checked) <= {"ok", "note"}
    assert {finding.check for finding in good} >= {"config", "versions", "CPUs", "data", "game"}
    broken = {**files, "data.max_prompt_length": 9}
    failed = {finding.check: finding.text for finding in diagnose(run_of(broken).config, schema())}
    assert "data.max_prompt_length" in failed["data"]
    found = diagnose(run_of({"trainer.use_v1": False}).config, schema())
    assert {"config", "data"} <= {finding.check for finding in found if finding.status == "fail"}


def test_the_command_ends_with_1_if_something_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for status, code in (("warn", 0), ("fail", 1)):
        full = CheckResult("disk", status, "full. Free some.")  # type: ignore[arg-type]
        monkeypatch.setattr(doctor, "diagnose", lambda *_, full=full, **options: iter([full]))
        answer = invoke("doctor")
        assert answer.exit_code == code and f"{status}  disk: full. Free some." in answer.stdout


def test_the_node_of_a_run_is_printed_with_the_defaults_of_its_game() -> None:
    answer = invoke("doctor", "own_notes", "--config", "selfplay.train=assessor")
    assert "train: assessor" in answer.stdout and "turn_timeout_s: 3600.0" in answer.stdout
