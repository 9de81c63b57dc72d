"""What the SGLang backend does where SGLang is not installed, not chosen, or where there is a GPU."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from verl.workers.rollout.base import _ROLLOUT_REGISTRY

from medserl_agentloop.backends import sglang_cpu
from medserl_agentloop.core.config import ConfigError
from medserl_agentloop.core.run_check.machine import RESERVED, check_sglang_on_cpu, longest_context
from medserl_agentloop.paths import PACKAGE
from medserl_agentloop.testing.tiny import compose_run

OURS = "medserl_agentloop.backends.sglang_adapters.CpuServerAdapter"
VERLS = "verl.workers.rollout.sglang_rollout.sglang_rollout.ServerAdapter"
KEY = ("sglang", "async")


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which nothing is registered, on a machine without a GPU, with SGLang installed."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "shim" not in path])
    monkeypatch.setitem(_ROLLOUT_REGISTRY, KEY, VERLS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sglang_cpu, "is_installed", lambda: True)
    monkeypatch.setenv(sglang_cpu.SWITCH, "1")


def shim_folders() -> list[str]:
    return [Path(path).name for path in sys.path if "shim" in path]


def test_chosen_it_replaces_the_push_and_puts_stand_ins_around_what_is_installed(untouched: None) -> None:
    sglang_cpu.register()
    sglang_cpu.register()
    assert _ROLLOUT_REGISTRY[KEY] == OURS
    assert shim_folders() == ["first", "last"]
    assert (Path(sys.path[0]).name, Path(sys.path[-1]).name) == ("first", "last")


def test_with_a_gpu_nothing_is_active_even_if_chosen(untouched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    sglang_cpu.register()
    assert _ROLLOUT_REGISTRY[KEY] == VERLS
    assert shim_folders() == []


def test_not_chosen_verls_own_push_stays(untouched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(sglang_cpu.SWITCH)
    sglang_cpu.register()
    assert _ROLLOUT_REGISTRY[KEY] == VERLS


def test_a_gpu_build_of_torch_without_a_gpu_sees_no_stand_ins_unless_chosen(
    untouched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(sglang_cpu.SWITCH)
    monkeypatch.setattr(torch.version, "cuda", "13.0")  # the head node of a GPU cluster
    sglang_cpu.register()
    assert shim_folders() == []


def test_where_sglang_is_not_installed_there_are_no_stand_ins(untouched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_cpu, "is_installed", lambda: False)
    sglang_cpu.register()
    assert shim_folders() == []


def test_folders_that_are_called_like_the_packages_are_not_taken_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sglang_cpu.is_installed()
    (tmp_path / "sglang").mkdir()
    (tmp_path / "torchvision").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert sglang_cpu.is_installed() is before


@pytest.fixture
def run(untouched: None) -> Iterator[DictConfig]:
    yield compose_run("+recipes=quickstart_sglang")


@pytest.mark.parametrize("recipe", ["quickstart_sglang", "cpu_smollm2"])
def test_the_recipes_leave_every_turn_its_tokens(untouched: None, recipe: str) -> None:
    check_sglang_on_cpu(compose_run(f"+recipes={recipe}"))


@pytest.mark.parametrize("key", ["max_model_len", "engine_kwargs.sglang.max_total_tokens"])
def test_a_context_that_would_cut_a_turn_is_refused_with_the_number_to_write(run: DictConfig, key: str) -> None:
    needed = longest_context(run) + RESERVED
    OmegaConf.update(run, f"actor_rollout_ref.rollout.{key}", needed)
    check_sglang_on_cpu(run)
    OmegaConf.update(run, f"actor_rollout_ref.rollout.{key}", needed - 1)
    with pytest.raises(ConfigError, match=f"{key}={needed - 1}.* at least {needed}"):
        check_sglang_on_cpu(run)


def test_in_a_shared_context_a_turn_sees_all_that_came_before(run: DictConfig) -> None:
    run.selfplay.context = "shared"
    assert longest_context(run) == run.data.max_prompt_length + run.data.max_response_length


def test_a_run_with_a_gpu_is_sent_to_the_recipes_for_gpus(run: DictConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=-1"):
        check_sglang_on_cpu(run)


def test_a_run_without_sglang_is_told_how_to_install_it(run: DictConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_cpu, "is_installed", lambda: False)
    with pytest.raises(ConfigError, match="make sglang-env"):
        check_sglang_on_cpu(run)


def test_other_rollouts_are_left_alone(untouched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_cpu, "is_installed", lambda: False)
    check_sglang_on_cpu(compose_run("+recipes=quickstart"))


SERVERS = {"sglang", "cpu_hf", "vllm"}
STARTUP_CHECKS = "run_check"  # they read the run's config, which names the server


def test_no_module_above_the_rollout_server_knows_which_server_it_talks_to() -> None:
    for path in (path for path in (PACKAGE / "core").rglob("*.py") if STARTUP_CHECKS not in path.parts):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            where = f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ImportFrom) and "check_stop_strings" not in [name.name for name in node.names]:
                assert not SERVERS & set(str(node.module).split(".")), f"{where} imports {node.module}"
                assert not str(node.module).startswith("medserl_agentloop.backends"), f"{where} imports {node.module}"
            if isinstance(node, ast.Constant):
                assert node.value not in SERVERS, f"{where} names the server {node.value!r}"
