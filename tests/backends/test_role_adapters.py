"""A LoRA adapter for each role in verl's engine: each token meets its own role's adapter."""

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import adapters
import pytest
import torch
from backends.adapters_worker import LENGTHS
from peft import PeftModel
from real_runs import AGREEMENT, REPOSITORY, answers_of, log_probs, same
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from medserl_agentloop.core.config import ADAPTERS_FOLDER
from medserl_agentloop.paths import resource

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FIRST = sum(LENGTHS[:2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    program = Path(__file__).with_name("adapters_worker.py")
    return answers_of(program, folder, {}, Path(adapters.__file__).parent)


def tiny_player() -> Any:
    path = resource("assets/tiny_player")
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def apart(
    found: dict[str, Any], adapters: tuple[Path, Path], packed_row: str = "log_probs"
) -> float:
    """Largest difference of the engine's packed row to each context alone in plain peft."""
    ids, packed = torch.tensor(found["ids"]), torch.tensor(found[packed_row])
    largest = 0.0
    for adapter, part in zip(adapters, (slice(0, FIRST), slice(FIRST, None)), strict=True):
        model = PeftModel.from_pretrained(tiny_player(), adapter).eval()
        largest = max(largest, float((packed[part][:-1] - log_probs(model, ids[part])).abs().max()))
    return largest


def test_own_log_probs_give_the_gradients_of_recomputed_ones_exactly(found: Any) -> None:
    assert found["own_log_probs"] == [True, False]  # the second is with others, which count


def test_exported_adapters_give_the_log_probs_of_the_engine_in_peft(
    folder: Path, found: dict[str, Any]
) -> None:
    attacker, assessor = (folder / "actor" / ADAPTERS_FOLDER / r for r in ("attacker", "assessor"))
    assert apart(found, (attacker, assessor)) < AGREEMENT
    assert apart(found, (assessor, attacker)) > 100 * AGREEMENT


def test_shared_adapter_gives_the_log_probs_of_the_engine_in_peft(
    folder: Path, found: dict[str, Any]
) -> None:
    one = folder / "one" / "actor" / "lora_adapter"
    assert apart(found, (one, one), "log_probs_of_one") < AGREEMENT
    assert apart(found, (one, one)) > 100 * AGREEMENT


def test_the_one_adapter_is_merged_as_the_page_says(
    folder: Path, found: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs" / "warm_start_qwen3_4b_lora"
    run.mkdir(parents=True)
    (run / "global_step_N").symlink_to(folder / "one" / "actor")
    text = (REPOSITORY / "docs" / "warm_start.md").read_text().replace("\\\n", "")
    (merger,) = re.findall(r"python -m (verl\.model_merger.*?)```", text, re.DOTALL)
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", merger.split())
    runpy.run_module(sys.argv[0], run_name="__main__")
    exec(code, {})
    # verl's merger leaves the adapter out.
    assert same(Path(resource("assets/tiny_player")), run / "parts")
    assert not same(run / "parts", run / "merged")
    AutoTokenizer.from_pretrained(run / "merged")


def test_the_reference_policy_is_the_base_without_adapters(found: dict[str, Any]) -> None:
    ids, packed = torch.tensor(found["ids"]), torch.tensor(found["of_base"])
    base = tiny_player()
    for part in (slice(0, FIRST), slice(FIRST, None)):
        assert (packed[part][:-1] - log_probs(base, ids[part])).abs().max() < AGREEMENT


def test_adapter_gets_no_gradient_from_tokens_of_the_other_role(
    found: dict[str, Any],
) -> None:
    gradients = found["gradients_of_the_first_alone"]
    assert gradients["default"] > 0 == gradients["assessor"]
    assert found["frozen"]["default"] > 0 == found["frozen"]["assessor"]


def test_role_weight_scales_the_learning_rate_of_its_adapter(found: dict[str, Any]) -> None:
    moved = found["at_a_quarter"]  # the first step of AdamW is as large as the learning rate
    assert moved["assessor"] == pytest.approx(moved["default"] / 4, rel=0.1)


def test_clipping_the_gradient_of_one_role_leaves_the_other_alone(found: dict[str, Any]) -> None:
    alone, beside = found["gradients"], found["gradients_beside_a_huge_one"]
    assert beside["assessor"] > 5 * alone["assessor"]  # it is at the limit of clip_grad
    assert beside["default"] == pytest.approx(alone["default"], rel=1e-4)


def test_every_role_starts_from_the_adapter_of_a_warm_start(
    folder: Path, found: dict[str, Any]
) -> None:
    warm = load_file(folder / "actor" / ADAPTERS_FOLDER / "attacker" / "adapter_model.safetensors")
    started = load_file(folder / "started.safetensors")
    assert {name.partition(":")[0] for name in started} == {"default", "assessor"}
    for name, tensor in started.items():
        assert torch.equal(tensor, warm[name.partition(":")[2]])


def test_the_base_answers_after_ten_updates_as_before_the_first(found: dict[str, Any]) -> None:
    answers = found["answers"]
    assert answers["None"][0] == answers["None"][1]  # to the last bit of every log-prob
    for adapter in ("default", "assessor"):
        assert answers[adapter][0] != answers[adapter][1]
