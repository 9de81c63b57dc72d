"""``medserl doctor``: each check finds its cause, faked here, and says what to do."""

import json
import shutil
import socket
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_check.runs import run as config_of
from transformers import AutoTokenizer
from typer.testing import CliRunner

from medserl_agentloop import doctor
from medserl_agentloop.cli import app
from medserl_agentloop.core.config import SelfPlayConfig
from medserl_agentloop.core.run_check import inputs, machine
from medserl_agentloop.core.run_check.composition import Composition
from medserl_agentloop.core.run_check.run import Run
from medserl_agentloop.doctor import Finding, diagnose
from medserl_agentloop.paths import resource
from medserl_agentloop.testing.tiny import compose_run

PLAYER = resource("assets/tiny_player")
JUDGE = {"selfplay.judge_server.url": "http://localhost:1/v1", "selfplay.judge_server.model": "m"}
schema = cache(compose_run)


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody has started Ray here, whatever else runs on this machine."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def found(check: Any, *arguments: Any) -> str:
    """All that a check finds, one line for each."""
    findings = doctor.refused_or_found(lambda: check(*arguments))
    return "\n".join(f"{status}: {text}" for status, text in findings)


def run_of(changes: dict[str, Any] | None = None, recipe: str = "quickstart") -> Run:
    config = config_of({**(JUDGE if recipe == "qwen3_4b" else {}), **(changes or {})}, recipe)
    return Run(config, SelfPlayConfig.from_run(config))


def card(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], *, free: float = 95.0) -> None:
    """A machine with one GPU of 95 GiB, and a torch that was built for Hopper and data centres' Blackwell."""
    fake = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_name": lambda index: "Fake",
        "get_device_capability": lambda index: capability,
        "mem_get_info": lambda index: (int(free * doctor.GIB), 95 * doctor.GIB),
        "get_arch_list": lambda: ["sm_90", "sm_100", "sm_120"],
    }
    for name, function in fake.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(doctor, "_driver", lambda: "580.1")


# -- the machine -----------------------------------------------------------------------------------------------------


def test_a_version_that_does_not_fit_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(doctor._versions).startswith("ok: medserl-agentloop ")

    def version(name: str) -> str:
        if name == "ray":
            raise doctor.PackageNotFoundError(name)
        return {"transformers": "5.12.0"}.get(name) or real(name)

    real = doctor.version
    monkeypatch.setattr(doctor, "version", version)
    lines = found(doctor._versions)
    assert "fail: ray is not installed, and medserl-agentloop needs it. Run: pip install 'ray==" in lines
    assert "fail: transformers 5.12.0 is installed, and verl needs " in lines


def test_with_a_gpu_the_versions_of_the_gpu_extras_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(doctor, "_driver", lambda: None)
    assert found(doctor._versions).startswith("ok: ")  # a CUDA build without a GPU trains on the CPU
    monkeypatch.setattr(doctor, "_driver", lambda: "580.1")
    lines = found(doctor._versions)
    assert "fail: flash-attn" not in lines  # verl's fsdp asks for it by an extra of its own
    assert "fail: sglang is not installed, and verl needs it. Run: pip install 'sglang==0.5.12" in lines
    assert "fail: torch " in lines and "verl needs ==2.11.0" in lines


def test_a_plugin_that_verl_will_not_load_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(doctor._plugin) == "ok: loaded into verl 0.9.1"
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    assert "VERL_USE_EXTERNAL_PLUGINS=none keeps verl from loading the plugin. Unset it." in found(doctor._plugin)
    monkeypatch.setattr(doctor, "entry_points", lambda group: [])
    assert "fail: medserl-agentloop is not installed as a plugin of verl" in found(doctor._plugin)


class FakeRay:
    """A cluster of one node for each answer of a worker."""

    def __init__(self, *answers: Any) -> None:
        self.answers = iter(answers)
        self.nodes = lambda: [
            {"Alive": True, "NodeManagerAddress": f"10.0.0.{n}", "NodeID": "ab" * 28} for n in range(len(answers))
        ]
        self.init = self.shutdown = lambda **options: None
        self.remote = lambda **options: lambda function: SimpleNamespace(remote=lambda: function)

    def get(self, task: Any, timeout: int) -> Any:
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_node_without_the_plugin_or_with_other_versions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    fake = FakeRay(doctor._installed(), "verl 0.8.0", ModuleNotFoundError("No module named 'medserl_agentloop'"))
    for name in ("init", "nodes", "remote", "get", "shutdown"):
        monkeypatch.setattr(ray, name, getattr(fake, name))
    first, second, third = found(doctor._ray).splitlines()
    assert first == f"ok: node 10.0.0.0: {doctor._installed()}"
    assert second.startswith("fail: node 10.0.0.1 has verl 0.8.0, and this machine medserl-agentloop")
    assert third.startswith(
        "fail: node 10.0.0.2: a worker cannot load the plugin (No module named 'medserl_agentloop')"
    )


def test_a_cluster_that_a_run_cannot_join_as_it_asks_is_found(tmp_path: Path) -> None:
    assert found(doctor._ray_start, run_of()) == ""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").touch()
    assert "Ray refuses ray_kwargs.ray_init.num_cpus and num_gpus for one that it joins" in found(
        doctor._ray_start, run_of()
    )
    assert found(doctor._ray_start, run_of({"ray_kwargs.ray_init.address": "local"})) == ""


def test_a_card_that_this_torch_has_no_kernels_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for known in ((9, 0), (10, 3), (12, 0)):
        card(monkeypatch, known)
        assert found(doctor._gpu, None).startswith("ok: GPU 0, Fake (sm_")
    card(monkeypatch, (7, 5))
    assert "(sm_75, 95 GiB): torch" in found(doctor._gpu, None)
    assert "has no kernels for it, only for sm_90, sm_100, sm_120" in found(doctor._gpu, None)


def test_memory_that_another_process_holds_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, (9, 0), free=50.0)
    assert "warn: GPU 0, Fake (sm_90, 95 GiB): another process holds 45 GiB" in found(doctor._gpu, None)


def test_a_driver_that_is_too_old_is_named_with_the_one_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(doctor, "_driver", lambda: "535.104")
    assert "with driver 535.104: CUDA 13.0 needs 580 or later" in found(doctor._gpu, None)


def test_a_run_on_gpus_without_one_is_refused_as_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert found(doctor._gpu, run_of(recipe="qwen3_4b").config).startswith("fail: this run needs a GPU")
    assert found(doctor._gpu, run_of().config) == "ok: none, and this run needs none"


def test_a_small_shared_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64 * 1024**2))
    assert "warn: /dev/shm has 0.1 GiB free, and a run on cpu should have 1." in found(
        doctor._shared_memory, run_of().config
    )
    assert "--shm-size=10g" in found(doctor._shared_memory, run_of(recipe="qwen3_4b").config)


def test_a_proxy_before_localhost_and_a_name_without_an_address_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert found(doctor._network).startswith("ok: ports of this machine can be reached at ")
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert "warn: http_proxy is set, and no_proxy has no localhost." in found(doctor._network)

    def unknown(name: str) -> str:
        raise OSError("Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert "Put the name into /etc/hosts" in found(doctor._network)


# -- a run -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(data: tuple[str, ...]) -> dict[str, Any]:
    """Keys of the quickstart's data files."""
    return dict(override.split("=", 1) for override in data)


def test_missing_packages_and_kernels_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    monkeypatch.setattr(machine, "_installed", lambda name: False)
    monkeypatch.setattr(machine, "is_kernels_available", lambda: False)
    lines = found(doctor._packages, run_of(recipe="qwen3_4b"))
    assert "fail: actor_rollout_ref.rollout.name=sglang: the package sglang is not installed" in lines
    assert "needs the package flash-attn" in lines
    monkeypatch.setattr(machine, "find_spec", lambda name: name)
    monkeypatch.setattr(machine, "_installed", lambda name: True)

    def no_kernels(name: str) -> None:
        raise ImportError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(doctor, "import_module", no_kernels)
    lines = found(doctor._packages, run_of(recipe="qwen3_4b"))
    assert lines.startswith("fail: SGLang's kernels cannot be loaded (ImportError: libcudart.so.13: ")
    assert found(doctor._packages, run_of()) == "ok: rollout by cpu_hf"


def test_wandb_without_a_key_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "WANDB_FILES", ())
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run = run_of({"trainer.logger": ["console", "wandb"]})
    assert "fail: trainer.logger has wandb, and there is no key for it. Run `wandb login`" in found(
        doctor._loggers, run
    )
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert found(doctor._loggers, run) == "ok: console, wandb"


def test_a_model_without_weights_or_chat_template_is_found(tmp_path: Path) -> None:
    assert "ends turns with <|im_end|>, no thinking mode" in found(doctor._model, run_of())
    folder = tmp_path / "base"
    shutil.copytree(PLAYER, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.jinja"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for template in ("{{ messages }}{% if enable_thinking %}{% endif %}", None):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        lines = found(doctor._model, run_of({"actor_rollout_ref.model.path": str(folder)}))
        assert f"fail: {folder} has no weights (*.safetensors)" in lines
        assert ("thinking on" if template else "has no chat template: it is of a base model") in lines
        (folder / "chat_template.jinja").unlink(missing_ok=True)


def test_a_model_that_is_not_there_or_would_leak_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = run_of({"actor_rollout_ref.model.path": "./nothing"})
    assert found(doctor._model, run).startswith("fail: actor_rollout_ref.model.path=./nothing: there is no such folder")
    monkeypatch.setattr(inputs, "leak_of", lambda config: "its layers of type mamba do not start anew")
    assert found(doctor._model, run_of()).startswith("fail: selfplay.context=isolated") and "mamba" in found(
        doctor._model, run_of()
    )


def test_data_of_another_profile_and_missing_files_are_found(files: dict[str, Any]) -> None:
    assert "ok: data.train_files: 288 rows in " in found(doctor._data, run_of(files))
    assert "fail: data.train_files: none.parquet does not exist" in found(
        doctor._data, run_of({**files, "data.train_files": "none.parquet"})
    )
    lines = found(doctor._data, run_of({**files, "selfplay.profile": "classic"}))
    assert "row 0: its prompt is not the one that --profile classic" in lines.splitlines()[-1]


def test_a_judge_that_does_not_answer_or_was_not_measured_is_a_warning() -> None:
    lines = found(doctor._game, run_of({**JUDGE, "selfplay.judge": "llm"}))
    assert "warn: the judge gave no answer to a first question (Unreachable: ConnectError" in lines
    assert "warn: judge: selfplay.judge=llm was never measured" in lines


def test_a_disk_too_small_for_the_checkpoints_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = run_of({"trainer.default_local_dir": str(tmp_path), "selfplay.records": str(tmp_path)})
    assert "2 kept, need 0.0" in found(doctor._disk, run)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1024**2))
    assert "fail: " in found(doctor._disk, run) and "trainer.max_actor_ckpt_to_keep to fewer" in found(
        doctor._disk, run
    )
    (tmp_path / "file").touch()
    run = run_of({"trainer.default_local_dir": str(tmp_path / "file" / "run"), "selfplay.records": str(tmp_path)})
    assert "is no folder that can be written to" in found(doctor._disk, run)


def test_a_game_is_played_without_a_model(files: dict[str, Any]) -> None:
    assert "1 turn by a script, " in found(doctor._dry_run, run_of(files))
    assert found(doctor._dry_run, run_of({"data.train_files": "none.parquet"})).startswith("warn: no game was played")


# -- all of them -----------------------------------------------------------------------------------------------------


def test_a_run_that_starts_has_no_failures_and_a_broken_one_lists_all_at_once(
    files: dict[str, Any],
) -> None:
    good = list(diagnose(Composition(run_of(files).config, schema(), "ppo_trainer", [])))
    assert {finding.status for finding in good if finding.check != "shared memory"} == {"ok"}
    assert {finding.check for finding in good} >= {"config", "versions", "plugin", "GPU", "model", "data", "dry run"}
    broken = {**files, "trainer.n_gpus_per_node": 7, "selfplay.profile": "classic", "trainer.logger": ["swanlab"]}
    config = run_of(broken).config
    failed = {finding.check: finding.text for finding in diagnose(Composition(config, schema(), "ppo_trainer", []))}
    assert "which 7 data-parallel workers cannot share evenly" in failed["config"]
    assert "--profile classic" in failed["data"]
    assert "the package swanlab is not installed" in failed["packages"]


def test_a_check_that_breaks_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise RuntimeError("odd machine")
        yield

    monkeypatch.setattr(doctor, "_versions", broken)
    first, *others = diagnose(None)
    assert first == Finding("versions", "fail", "the check itself failed (RuntimeError: odd machine). Mend that first.")
    assert {finding.check for finding in others} >= {"plugin", "network"}


@pytest.mark.parametrize(("status", "code"), [("warn", 0), ("fail", 1)])
def test_the_command_ends_with_1_if_something_blocks(status: Any, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda composed, ray: iter([Finding("disk", status, "full. Free some.")]))
    answer = CliRunner().invoke(app, ["doctor", "--json"])
    assert answer.exit_code == code
    assert json.loads(answer.stdout) == [{"check": "disk", "status": status, "text": "full. Free some."}]
    assert f"{status}  disk: full. Free some." in CliRunner().invoke(app, ["doctor"]).stdout
