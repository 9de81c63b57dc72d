"""Every recipe for a GPU starts and fits its card.

Parameters are compared with those that torch counts, and sums with the peaks of real steps.
"""

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from invoking import invoke
from omegaconf import OmegaConf
from planning.gpu_recipes import CARDS, JUDGE_SERVER
from transformers import AutoModelForCausalLM
from verl.utils.config import validate_config

from benchmarks import plan_memory
from medserl_agentloop.core.run_check import RunConfig, check_run
from medserl_agentloop.paths import resource
from medserl_agentloop.tools.plan import (
    ACTOR,
    GIB,
    ROLLOUT,
    Engine,
    Shape,
    composed,
    model_config,
    plan_run,
    read_shape,
)

ROOT = Path(__file__).parents[2]


@cache
def run_of(recipe: str, *overrides: str) -> RunConfig:
    """The run of a recipe with the overrides behind it, composed once."""
    name, *own = recipe.split()
    return composed(name, [*([] if "judge" in name else JUDGE_SERVER), *own, *overrides])


@pytest.mark.parametrize("recipe", CARDS)
def test_a_recipe_starts_and_fits_its_card(recipe: str) -> None:
    run = run_of(recipe)
    check_run(run.config)
    OmegaConf.resolve(resolved := run.config.copy())
    validate_config(
        resolved, use_reference_policy=True, use_critic=False
    )  # verl's own: batches divide among GPUs
    assert plan_run(run, CARDS[recipe]).fits


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["+trainer.save_frq=10"], "save_frq"),
        (["actor_rollout_ref.model.path=acme/unknown"], "acme/unknown"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(overrides: list[str], named: str) -> None:
    done = invoke("plan", "qwen3_4b", *overrides)
    assert done.exit_code == 2 and named in done.output


def test_micro_batches_are_those_that_verl_makes() -> None:
    """A critic packs by tokens whatever its key says: its update takes what the actor's does."""
    small, large = (
        plan_run(
            run_of(
                "qwen3_4b",
                "algorithm.adv_estimator=role_gae",
                "critic.use_dynamic_bsz=false",
                f"critic.ppo_max_token_len_per_gpu={tokens}",
            ),
            80,
        ).phases["update, critic"]
        for tokens in (9216, 18432)
    )
    assert large["activations"] == 2 * small["activations"]


@pytest.mark.parametrize(
    ("recipe", "gpu", "fits", "advice"),
    [
        ("qwen3_4b", 72, False, "+recipes=[qwen3_4b,lora]"),
        ("warm_start_qwen3_4b", 80, False, "optim.override_optimizer_config={fused:true}"),
        ("warm_start_qwen3_4b", 96, True, ""),
        ("qwen3_4b", 8, False, "None of the usual changes"),
    ],
)
def test_advice_is_what_makes_the_run_fit(recipe: str, gpu: int, fits: bool, advice: str) -> None:
    # The recipe may have the advice already.
    own = ["++optim.override_optimizer_config=null"] if "warm" in recipe else []
    done = invoke("plan", recipe, "--gpu", gpu, *own)
    assert (done.exit_code == 0) == fits and advice in done.output, done.output
    assert ("Fits, " in done.output) == (not fits and gpu > 8)


def test_sharding_offload_and_adapters_take_what_they_say() -> None:
    offload = [f"{ACTOR}.fsdp_config.{what}_offload=false" for what in ("param", "optimizer")]
    plain, parts = plan_run(run_of("qwen3_4b", *offload), 80), "optimizer step, actor"
    eight = plan_run(run_of("qwen3_4b", "trainer.n_gpus_per_node=8"), 80)
    assert eight.phases[parts]["Adam"] * 8 == plain.phases[parts]["Adam"]
    offloaded = plan_run(run_of("qwen3_4b"), 80)
    assert "Adam" not in offloaded.phases["generation"] and offloaded.host > plain.host
    merged, apart = (
        plan_run(run_of(recipe), 80)
        for recipe in ("qwen3_4b,lora", "qwen3_4b,lora,adapter_per_role")
    )
    assert apart.phases[parts]["Adam"] == 2 * merged.phases[parts]["Adam"] < 2 * GIB
    # The base of adapters stays on the server while roles are trained.
    assert "server's weights" not in merged.phases["update, actor"]
    assert apart.phases["update, actor"]["server's weights"] > 7 * GIB


def test_the_shape_of_a_local_model_is_read_from_its_folder() -> None:
    shape = read_shape(str(resource("assets/tiny_player")))
    assert (shape.layers, shape.hidden, shape.vocab, shape.tied) == (4, 128, 1600, True)


# --- counts and peaks ---


def model_of(config: Any) -> Any:
    """The model on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b"])
def test_parameters_are_those_that_torch_counts(name: str) -> None:
    counted = sum(p.numel() for p in model_of(model_config(name)).parameters())
    assert Engine(read_shape(name)).parameters == counted


def test_parameters_of_a_critic_and_of_an_adapter() -> None:
    from peft import LoraConfig, get_peft_model

    config = model_config("qwen3-0.6b")
    shape = Shape(config)
    plain = sum(p.numel() for p in model_of(config).parameters())
    assert Engine(shape, critic=True).parameters == plain + shape.hidden
    adapted = get_peft_model(model_of(config), LoraConfig(r=8, target_modules="all-linear"))
    assert Engine(shape, lora_rank=8).trained == sum(
        p.numel() for p in adapted.parameters() if p.requires_grad
    )


@pytest.mark.slow
def test_peaks_of_real_steps_at_two_sizes_are_within_a_tenth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_memory, "SIZES", plan_memory.SIZES[:2])
    rows = list(plan_memory.rows())
    assert len(rows) == 8
    for *which, real, computed in rows:
        assert computed == pytest.approx(real, rel=0.1), which


def commands_of_pages() -> list[tuple[int, str, list[str]]]:
    """GB of a card, the GiB that a page says, and recipe and overrides of the command below it."""
    found = []
    for page in ("start", "gpu"):
        text = (ROOT / "docs" / f"{page}.md").read_text().replace("\\\n", "")
        for card, gib, command in re.findall(r"^# (\d+) GB: ([\d.]+) GiB\n(.*)$", text, re.M):
            words = shlex.split(command.partition("main_ppo")[2])
            found.append((int(card), gib, words))
    return found


@pytest.mark.parametrize("command", commands_of_pages(), ids=lambda command: command[2][0])
def test_the_gib_of_a_page_are_those_of_the_plan(command: tuple[int, str, list[str]]) -> None:
    card, gib, (recipe, *overrides) = command
    plan = plan_run(run_of(recipe.partition("=")[2].strip("[]"), *overrides), card)
    assert plan.fits and f"{plan.peak / GIB:.1f}" == gib


def test_the_table_of_recipes_is_that_of_the_plan() -> None:
    rows = re.findall(
        r"^\| `([\w, .=]+)` \| .* \| (?:[82] x )?(\d+) GB \| ([\d.]+) \|$",
        (ROOT / "docs" / "gpu.md").read_text(),
        re.M,
    )
    assert len(rows) == 8
    for settings, card, gib in rows:
        plan = plan_run(composed(settings.split()[0], settings.split()[1:]), int(card))
        assert f"{plan.peak / GIB:.1f}" == gib, settings


@pytest.mark.parametrize("recipes", sorted(CARDS))
def test_sglang_on_a_gpu_starts_with_one_kind_of_prefill_and_time_to_compile(recipes: str) -> None:
    """Adapters switch graphs off, and the ragged wrapper's kernels then compile for 12 minutes."""
    run = run_of(*recipes.split())
    for engine in ("actor_rollout_ref.rollout", "reward.reward_model.rollout"):
        assert run[f"{engine}.engine_kwargs.sglang.watchdog_timeout"] == 1800
        assert run[f"{engine}.engine_kwargs.sglang.disable_piecewise_cuda_graph"]
    variables = run["ray_kwargs.ray_init.runtime_env.env_vars"]
    assert variables["SGLANG_FLASHINFER_USE_PAGED"] == "1"
    assert run[f"{ROLLOUT}.engine_kwargs.sglang.lora_backend"] == "triton"
