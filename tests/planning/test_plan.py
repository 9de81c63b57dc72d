"""Every recipe for a GPU starts and fits its card.

The plan's counts are compared with torch's own on meta tensors, and its sums with the peaks of real
steps.
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
from planning.gpu_recipes import CARDS
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_utils import AttentionInterface
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
JUDGE = ("selfplay.judge_server.url=http://localhost:30000/v1", "selfplay.judge_server.model=judge")


@cache
def run_of(recipe: str, *overrides: str) -> RunConfig:
    """The run of a recipe with the overrides behind it, composed once."""
    name, *own = recipe.split()
    return composed(name, [*([] if "judge" in name else JUDGE), *own, *overrides])


@pytest.mark.parametrize("recipe", CARDS)
def test_a_recipe_starts_and_fits_its_card(recipe: str) -> None:
    run = run_of(recipe)
    check_run(run.config)
    OmegaConf.resolve(resolved := run.config.copy())
    # verl's own: batches divide among GPUs.
    validate_config(resolved, use_reference_policy=True, use_critic=False)
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
    gae = ("algorithm.adv_estimator=role_gae", "critic.use_dynamic_bsz=false")
    small, large = (
        plan_run(run_of("qwen3_4b", *gae, f"critic.ppo_max_token_len_per_gpu={tokens}"), 80).phases[
            "update, critic"
        ]
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


def test_the_arithmetic_of_qwen3_4b_without_its_savings() -> None:
    """AdamW's default, and half of the free memory for SGLang: 75 GiB of weights, gradients and
    states at its step.
    """
    savings = (
        "actor.optim.override_optimizer_config=null",
        "rollout.gpu_memory_utilization=0.5",
        "rollout.engine_kwargs.sglang.disable_piecewise_cuda_graph=false",
        *(f"actor.fsdp_config.{what}_offload=false" for what in ("param", "optimizer")),
    )
    plan = plan_run(run_of("qwen3_4b", *(f"actor_rollout_ref.{key}" for key in savings)), 80)
    step = plan.phases["optimizer step, actor"]
    adam = sum(step[part] for part in ("weights", "gradients", "Adam", "Adam's square roots"))
    assert (adam / GIB, plan.checkpoint / GIB) == pytest.approx((75, 45), abs=0.1)
    # in step 2, when Adam's states are there
    assert sum(plan.phases["generation"].values()) > plan.usable


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


def config_of(qk_norm: bool, hidden: int = 64, heads: int = 4, layers: int = 2) -> Any:
    return (Qwen3Config if qk_norm else LlamaConfig)(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=1000,
        tie_word_embeddings=True,
    )


def model_of(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """The model on the meta device."""
    qwen3 = isinstance(config, Qwen3Config)
    with torch.device("meta"):
        return (Qwen3ForCausalLM if qwen3 else LlamaForCausalLM)(config).to(dtype)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b"])
def test_parameters_are_those_that_torch_counts(name: str) -> None:
    counted = sum(p.numel() for p in model_of(model_config(name)).parameters())
    assert Engine(read_shape(name)).parameters == counted


def test_parameters_of_a_critic_and_of_an_adapter() -> None:
    from peft import LoraConfig, get_peft_model

    shape = Shape(config := config_of(qk_norm=True))
    plain = sum(p.numel() for p in model_of(config).parameters())
    assert Engine(shape, critic=True).parameters == plain + shape.hidden
    adapted = get_peft_model(model_of(config), LoraConfig(r=8, target_modules="all-linear"))
    counted = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert Engine(shape, lora_rank=8).trained == counted


def flash(
    module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    output = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]
    return output.transpose(1, 2), None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("qk_norm", [True, False])
def test_saved_activations_are_those_that_torch_saves(qk_norm: bool, dtype: torch.dtype) -> None:
    AttentionInterface.register("saved_by_fa", flash)
    config = config_of(qk_norm, hidden=256, heads=8, layers=3)
    shape, model, tokens = Shape(config), model_of(config, dtype), 128
    model.config._attn_implementation = "saved_by_fa"
    weights, saved = {p.untyped_storage()._cdata for p in model.parameters()}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    inputs = torch.zeros((1, tokens), dtype=torch.long, device="meta")
    mask: Any = {"full_attention": None} if qk_norm else None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.model(inputs, attention_mask=mask, position_ids=inputs, use_cache=False)
    counted = sum(s.nbytes() for key, s in saved.items() if key not in weights)
    counted += output.last_hidden_state.nbytes
    size = dtype.itemsize
    computed = shape.layers * shape.saved_in_layer(size) + shape.saved_outside(size)
    assert computed * tokens == pytest.approx(counted, rel=0.001)


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
