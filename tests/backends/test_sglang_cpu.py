"""The SGLang backend without SGLang, where it is not chosen, and where there is a GPU."""

import sys
from pathlib import Path

import pytest
import torch
from verl.workers.rollout.base import _ROLLOUT_REGISTRY

from medserl_agentloop.backends import sglang_cpu
from medserl_agentloop.core.config import SelfPlayConfig
from medserl_agentloop.core.run_check import RunConfig
from medserl_agentloop.core.run_check.machine import RESERVED, longest_context, sglang_on_cpu
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


@pytest.mark.parametrize(
    ("machine", "push", "shim"),
    [
        ({"chosen", "installed"}, OURS, True),
        ({"chosen", "installed", "gpu build"}, OURS, True),
        ({"chosen"}, OURS, False),
        ({"chosen", "installed", "gpu build", "gpu"}, VERLS, False),
        ({"installed"}, VERLS, True),  # Transformers imports torchvision all the same
        ({"installed", "gpu build"}, VERLS, False),  # the head node of a GPU cluster
    ],
)
def test_register_chooses_push_and_shim_by_the_machine(
    untouched: None, monkeypatch: pytest.MonkeyPatch, machine: set[str], push: str, shim: bool
) -> None:
    monkeypatch.setenv(sglang_cpu.SWITCH, "1" if "chosen" in machine else "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "gpu" in machine)
    monkeypatch.setattr(torch.version, "cuda", "13.0" if "gpu build" in machine else None)
    monkeypatch.setattr(sglang_cpu, "is_installed", lambda: "installed" in machine)
    for _ in range(2):
        sglang_cpu.register()
    assert _ROLLOUT_REGISTRY[KEY] == push
    assert [Path(path).name for path in sys.path if "shim" in path] == ["first", "last"] * shim
    assert not shim or [Path(sys.path[place]).name for place in (0, -1)] == ["first", "last"]


def test_folders_that_are_called_like_the_packages_are_not_taken_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sglang_cpu.is_installed()
    (tmp_path / "sglang").mkdir()
    (tmp_path / "torchvision").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert sglang_cpu.is_installed() is before


def run_of(*overrides: str, recipe: str = "[quickstart,sglang_cpu]") -> RunConfig:
    config = compose_run(f"+recipes={recipe}", *overrides)
    return RunConfig(config, SelfPlayConfig.from_run(config))


@pytest.mark.parametrize("recipe", ["[quickstart,sglang_cpu]", "cpu_smollm2", "learn_smollm2", "quickstart"])
def test_the_recipes_leave_every_turn_its_tokens(untouched: None, recipe: str) -> None:
    assert not list(sglang_on_cpu(run_of(recipe=recipe)))


@pytest.mark.parametrize("key", ["max_model_len", "engine_kwargs.sglang.max_total_tokens"])
def test_context_that_would_cut_a_turn_is_refused_with_the_number_needed(untouched: None, key: str) -> None:
    needed = longest_context(run_of()) + RESERVED
    assert not list(sglang_on_cpu(run_of(f"actor_rollout_ref.rollout.{key}={needed}")))
    (problem,) = sglang_on_cpu(run_of(f"actor_rollout_ref.rollout.{key}={needed - 1}"))
    assert f"{key}={needed - 1}" in problem and f"at least {needed}" in problem


def test_in_a_shared_context_a_turn_sees_all_that_came_before() -> None:
    run = run_of("selfplay.context=shared")
    assert longest_context(run) == run["data.max_prompt_length"] + run["data.max_response_length"]


def test_a_run_with_a_gpu_is_sent_to_the_recipes_for_gpus(untouched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (problem,) = sglang_on_cpu(run_of())
    assert "CUDA_VISIBLE_DEVICES=-1" in problem
