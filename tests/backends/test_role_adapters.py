"""A LoRA adapter for each role: in verl's engine tokens of a packed row meet the adapter of their own role, and a real
run goes on with a checkpoint of that engine, with one of the roles alone."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from backends.adapters_worker import LENGTHS, LORA
from peft import PeftModel
from real_runs import AGREEMENT, GAMES_PER_STEP, Run, environment
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from medserl_agentloop.backends.role_adapters import ADAPTERS_FOLDER
from medserl_agentloop.core.columns import token_roles
from medserl_agentloop.paths import resource

FIRST = sum(LENGTHS[:2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    command = [sys.executable, str(Path(__file__).parent / "adapters_worker.py"), str(folder)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "found.json").read_text()))


def adapter(step: Path, role: str) -> dict[str, torch.Tensor]:
    return dict(load_file(step / "actor" / ADAPTERS_FOLDER / role / "adapter_model.safetensors"))


def log_probs(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(input_ids=ids[None, :-1]).logits[0].float().log_softmax(-1)
    return logits.gather(-1, ids[1:, None])[:, 0]


def apart(folder: Path, found: dict[str, Any], roles: tuple[str, str]) -> float:
    """Largest difference of the engine's packed row to each context alone in plain peft, with these adapters."""
    ids, packed = torch.tensor(found["ids"]), torch.tensor(found["log_probs"])
    largest = 0.0
    for role, part in zip(roles, (slice(0, FIRST), slice(FIRST, None)), strict=True):
        base = AutoModelForCausalLM.from_pretrained(resource("assets/tiny_player"), dtype=torch.float32)
        model = PeftModel.from_pretrained(base, folder / "global_step_1" / "actor" / ADAPTERS_FOLDER / role).eval()
        largest = max(largest, float((packed[part][:-1] - log_probs(model, ids[part])).abs().max()))
    return largest


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_exported_adapters_give_the_engine_s_log_probs_in_plain_peft(folder: Path, found: dict[str, Any]) -> None:
    own = apart(folder, found, ("attacker", "assessor"))
    assert own < AGREEMENT
    assert apart(folder, found, ("assessor", "attacker")) > 100 * AGREEMENT


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_reference_policy_is_the_base_without_adapters(found: dict[str, Any]) -> None:
    ids, packed = torch.tensor(found["ids"]), torch.tensor(found["of_base"])
    base = AutoModelForCausalLM.from_pretrained(resource("assets/tiny_player"), dtype=torch.float32).eval()
    for part in (slice(0, FIRST), slice(FIRST, None)):
        assert (packed[part][:-1] - log_probs(base, ids[part])).abs().max() < AGREEMENT


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_role_gets_no_gradient_from_the_other_s_tokens_and_an_untrained_one_stays_bit_for_bit(
    found: dict[str, Any],
) -> None:
    gradients = found["gradients_of_the_first_alone"]
    assert gradients["default"] > 0 == gradients["assessor"]
    assert found["frozen"]["default"] > 0 == found["frozen"]["assessor"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_clipping_one_role_s_gradient_leaves_the_other_s_alone(found: dict[str, Any]) -> None:
    alone, beside = found["gradients"], found["gradients_beside_a_huge_one"]
    assert beside["assessor"] > 5 * alone["assessor"]  # it is at the limit of clip_grad
    assert beside["default"] == pytest.approx(alone["default"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_adapters_reach_the_rollout_in_every_step_and_an_untrained_one_stays_as_it_was(
    folder: Path, tmp_path: Path, data: tuple[str, ...]
) -> None:
    run = Run(
        tmp_path,
        *data,
        "selfplay.adapters=per_role",
        *(f"actor_rollout_ref.model.{override}" for override in LORA),
        "actor_rollout_ref.actor.use_kl_loss=True",  # verl's reference pass switches the adapters off and on
        "selfplay.train=attacker",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={folder / 'global_step_1'}",
        "trainer.total_training_steps=3",
    )
    run.wait()

    assert any("certificate: isolation of actor" in line and "holds" in line for line in run.lines())
    assert run.steps_of_games() == {2: GAMES_PER_STEP, 3: GAMES_PER_STEP}
    assert [step["step"] for step in run.metrics] == [2, 3]
    for step in run.metrics:
        assert step["training/rollout_probs_diff_max"] < AGREEMENT  # over the tokens of both roles
        assert step["selfplay/attacker/trained_tokens"] > 0 == step["selfplay/assessor/trained_tokens"]
        assert step["actor/grad_norm"] > 0
    steps = [folder / "global_step_1", *(run.folder / "run" / f"global_step_{step}" for step in (2, 3))]
    first, *later = ({role: adapter(step, role) for role in ("attacker", "assessor")} for step in steps)
    assert any(tensor.abs().max() > 0 for name, tensor in first["assessor"].items() if "lora_B" in name)
    for before, after in pairwise([first, *later]):
        assert all(torch.equal(tensor, after["assessor"][name]) for name, tensor in before["assessor"].items())
        assert not all(torch.equal(tensor, after["attacker"][name]) for name, tensor in before["attacker"].items())


def test_every_token_of_a_context_belongs_to_the_role_that_answers_in_it() -> None:
    roles = token_roles(torch.tensor([4, 3, 2]), torch.tensor([1, 1, 0, 2, 2, 0, 0]))
    assert roles.tolist() == [1, 1, 1, 1, 2, 2, 2, 0, 0]
