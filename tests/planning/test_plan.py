"""Every recipe for a GPU starts and fits its card; a broken copy of it is refused with the key and
what to write.

The plan's counts are compared with torch's own on meta tensors, and its sums with the peaks of real
steps.
"""

import json
import re
from dataclasses import replace
from functools import cache
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
from medserl_agentloop.core.config import SelfPlayConfig
from medserl_agentloop.core.run_check import RunConfig, check_run
from medserl_agentloop.paths import resource
from medserl_agentloop.planning import GIB, PUBLISHED, composed, plan_run, read_shape
from medserl_agentloop.planning.arithmetic import Engine, Shape

LONG = "data.max_response_length=400000"
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
    validate_config(
        resolved, use_reference_policy=True, use_critic=False
    )  # verl's own: batches divide among GPUs
    assert plan_run(run, CARDS[recipe]).fits


@pytest.mark.parametrize(
    ("overrides", "answer"),
    [
        (["+trainer.save_frq=10"], r"trainer\.save_frq \(did you mean 'save_freq'\?\)"),
        (
            ["data.train_batch_size=many"],
            r"^data\.train_batch_size=many is no whole number\. Write one",
        ),
        ([LONG], r"max_token_len_per_gpu=\d+ holds no game of 401024 .* Set it to 401024 or more"),
        (
            [
                LONG,
                *(
                    f"actor_rollout_ref.{of}_max_token_len_per_gpu=500000"
                    for of in ("actor.ppo", "ref.log_prob")
                ),
            ],
            r"path=\S+ allows 40960 tokens\. Set data\.max_response_length=39936",
        ),
        (
            ["actor_rollout_ref.actor.fsdp_config.model_dtype=fp7"],
            "model_dtype=fp7 is no dtype of verl's. Write one",
        ),
        (
            ["actor_rollout_ref.actor.strategy=megatron"],
            r"knows fsdp2 and fsdp\. Set it to fsdp2\.",
        ),
        (
            ["actor_rollout_ref.model.path=acme/unknown"],
            r"Name the folder of its config\.json: --model-config FOLDER",
        ),
    ],
)
def test_a_broken_copy_is_refused_with_the_key_and_what_to_write(
    overrides: list[str], answer: str
) -> None:
    with pytest.raises(ValueError, match=answer):
        plan_run(run_of("qwen3_4b", *overrides), 96)


def test_micro_batches_are_those_that_verl_makes() -> None:
    """A critic packs by tokens whatever its key says, and nothing reads the actor's second budget
    here.
    """
    critic, log_probs = (
        "critic.use_dynamic_bsz=false",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=4096",
    )
    setup = plan_run(
        run_of("qwen3_4b,gpu_80g", "algorithm.adv_estimator=role_gae", critic, log_probs), 80
    ).setup
    assert setup.critic is not None
    assert (setup.critic.update_tokens, setup.actor.update_tokens, setup.actor.infer_tokens) == (
        9216,
        9216,
        0,
    )
    again = run_of("qwen3_4b", log_probs, "selfplay.reuse_log_probs=false")
    with pytest.raises(
        ValueError, match=r"rollout\.log_prob_max_token_len_per_gpu=4096 holds no game of 9216"
    ):
        plan_run(again, 96)


def test_a_card_of_which_nothing_is_left_is_refused() -> None:
    for gpu, beside, answer in (
        (0, 0, "for '--gpu'"),
        (96, -1, "for '--beside'"),
        (96, 200, "nothing is left beside"),
    ):
        done = invoke("plan", "qwen3_4b", "--gpu", gpu, "--beside", beside)
        assert done.exit_code == 2 and answer in done.output


def test_a_game_with_a_budget_of_its_own_is_planned_as_any_game() -> None:
    class Settings(SelfPlayConfig):
        budget: int = 5

    run = run_of("qwen3_4b")
    plans = [
        plan_run(replace(run, selfplay=kind(game="mine")), 96)
        for kind in (SelfPlayConfig, Settings)
    ]
    assert plans[0].seconds == plans[1].seconds


def test_warm_start_fits_its_card_and_a_broken_copy_is_refused() -> None:
    plan = plan_run(composed("warm_start_qwen3_4b", []), 96)
    assert plan.fits and not plan_run(composed("warm_start_qwen3_4b", []), 80).fits
    assert list(plan.phases) == ["update, actor", "optimizer step, actor", "checkpoint, actor"]
    step, same = (
        plan.phases["optimizer step, actor"],
        plan_run(run_of("qwen3_4b"), 96).phases["optimizer step, actor"],
    )
    assert all(step[part] == same[part] for part in ("weights", "gradients", "Adam"))
    with pytest.raises(ValueError, match="the run has no 'selfplay' node"):
        composed("gpu_80g", [])  # a part of a recipe is no run
    for overrides, answer in (
        (
            ["trainer.n_gpus_per_node=3"],
            r"^data\.train_batch_size=64 .* among 3 .* Set it to a multiple of 3\.",
        ),
        (["data.max_length=9000"], r"holds no conversation of 9000 .* Set it to 9000 or more"),
        (["engine.strategy=megatron"], r"^engine\.strategy=megatron: .* Set it to fsdp2\."),
    ):
        with pytest.raises(ValueError, match=answer):
            plan_run(composed("warm_start_qwen3_4b", overrides), 96)


def test_the_arithmetic_of_qwen3_4b_without_its_savings() -> None:
    """AdamW's default, and half of the free memory for SGLang: 75 GiB of weights, gradients and
    states at its step.
    """
    savings = ("actor.optim.override_optimizer_config=null", "rollout.gpu_memory_utilization=0.5")
    run = run_of("qwen3_4b", *(f"actor_rollout_ref.{key}" for key in savings))
    plan = plan_run(run, 80)
    step = plan.phases["optimizer step, actor"]
    adam = sum(step[part] for part in ("weights", "gradients", "Adam", "Adam's square roots"))
    assert adam / GIB == pytest.approx(75, abs=0.1)
    assert (
        sum(plan.phases["generation"].values()) > plan.card.memory
    )  # in step 2, when Adam's states are there
    assert plan.setup.actor.checkpoint / GIB == pytest.approx(45, abs=0.1)
    copies = run_of(
        "qwen3_4b",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
    )
    assert plan_run(copies, 96).setup.actor.checkpoint / GIB == pytest.approx(60, abs=0.1)
    assert not plan.fits and plan_run(run, 96).fits  # tight


def test_sharding_offload_and_lora_take_what_they_say() -> None:
    one, eight = (
        plan_run(run_of("qwen3_4b", f"trainer.n_gpus_per_node={gpus}"), 80) for gpus in (1, 8)
    )
    assert eight.phases["checkpoint, actor"]["Adam"] * 8 == one.phases["checkpoint, actor"]["Adam"]
    offloaded, safe = (
        plan_run(run_of(f"qwen3_4b,gpu_80g{part}"), 80) for part in ("", ",first_run")
    )
    graphs = [plan.phases["generation"]["server's graphs"] / GIB for plan in (offloaded, safe)]
    assert graphs == [4.0, 2.5]  # without those for prefill
    assert "Adam" not in offloaded.phases["generation"]
    assert offloaded.setup.host > one.setup.host
    assert plan_run(run_of("qwen3_4b,lora"), 80).phases["optimizer step, actor"]["Adam"] < GIB
    assert (
        plan_run(run_of("qwen3_4b,lora"), 80, beside=22).fits
        and not plan_run(run_of("qwen3_4b"), 96, beside=22).fits
    )
    sdpa = "+actor_rollout_ref.model.override_config.attn_implementation=sdpa"
    rows, chunks = (
        run_of("qwen3_4b", sdpa, f"actor_rollout_ref.model.use_fused_kernels={on}")
        for on in (False, True)
    )
    assert plan_run(rows, 80).phases["update, actor"]["logits"] > 20 * GIB
    assert (
        "logits" not in plan_run(chunks, 80).phases["update, actor"]
    )  # the widest moment is elsewhere


def test_step_time_counts_judge_thoughts_game_chain_and_lora_reference() -> None:
    base = ("selfplay.judge_server.url=base", "selfplay.judge_server.json_schema=false")
    quiet = "+selfplay.judge_server.extra_body={chat_template_kwargs: {enable_thinking: false}}"
    adapters = "qwen3_4b,lora,adapter_per_role"
    thinks, answers = (
        plan_run(run_of(adapters, *base, *more), 80).seconds for more in ((), (quiet,))
    )
    assert thinks["judge"] > 3 * answers["judge"] > 0
    assert answers["log-probs, reference in actor"] > 10
    eight = ("trainer.n_gpus_per_node=8", "actor_rollout_ref.rollout.gpu_memory_utilization=0.6")
    few, fewer = (
        plan_run(run_of("qwen3_4b", *eight, f"data.train_batch_size={n}"), 80).seconds["generation"]
        for n in (64, 32)
    )
    assert 0.8 * few < fewer < few  # with 32 games on a card, and with 16, the longest one decides
    assert plan_run(run_of("qwen3_4b", *eight), 80).seconds["sleep, wake, push"] == pytest.approx(
        8, abs=0.1
    )
    small, large = (
        plan_run(
            run_of("qwen3_4b,gpu_80g", f"actor_rollout_ref.rollout.gpu_memory_utilization={share}"),
            80,
        )
        for share in (0.3, 0.8)
    )
    assert small.seconds["generation"] > 1.2 * large.seconds["generation"]


def test_entropy_term_and_fsdp_buffers_take_their_planned_memory() -> None:
    plain, entropy = (
        plan_run(
            run_of("qwen3_4b", f"actor_rollout_ref.actor.entropy_coeff={coefficient}"), 96
        ).phases["update, actor"]
        for coefficient in (0.0, 0.01)
    )
    assert entropy["logits"] == 3 * plain["logits"]
    step = plan_run(run_of("qwen3_4b"), 96).phases["optimizer step, actor"]
    assert (plain["gradients"] - step["gradients"]) / GIB == pytest.approx(
        1.8, abs=0.05
    )  # on their way, in fp32
    assert plain["FSDP copies"] / GIB == pytest.approx(2.0, abs=0.05)


def test_base_of_adapters_stays_on_the_server_while_roles_are_trained() -> None:
    merged, apart = (
        plan_run(run_of(recipe), 80)
        for recipe in ("qwen3_4b,lora", "qwen3_4b,lora,adapter_per_role")
    )
    assert "server's weights" not in merged.phases["update, actor"]
    weights = apart.phases["update, actor"]["server's weights"]
    assert weights == apart.phases["generation"]["server's weights"] > 7 * 2**30
    assert apart.setup.actor.trained == 2 * merged.setup.actor.trained


def test_the_command_prints_the_plan_and_says_where_numbers_are_from() -> None:
    done = invoke("plan", "qwen3_4b", "--gpu", 48)
    assert done.exit_code == 1
    assert re.search(r"Computed by medserl plan\. .*quoted .*Assumed", done.output)
    assert (
        "It does not fit: a plan may fill 95% of the card." in done.output
        and "gpu_80g" in done.output
    )
    done = invoke("plan", "qwen3_4b,gpu_80g", "--gpu", 80, "trainer.n_gpus_per_node=4", "--json")
    assert done.exit_code == 0
    assert json.loads(done.output[done.output.index("{") :])["setup"]["actor"]["workers"] == 4
    for override in ("data.train_batch_sze=3", "+selfplay.tran=both"):
        done = invoke("plan", "qwen3_4b", override)
        assert done.exit_code == 2
        assert re.search(r"^medserl: .*\(did you mean '(data\.)?train", done.output, re.M)


def test_the_shape_of_a_local_model_is_read_from_its_folder() -> None:
    shape = read_shape(str(resource("assets/tiny_player")))
    assert (shape.layers, shape.hidden, shape.vocab, shape.tied) == (4, 128, 1600, True)
    assert read_shape("trainer_output/qwen3-4b-medical-selfplay-sft") == read_shape("Qwen/Qwen3-4B")


# --- counts and peaks ---


def model_of(shape: Shape, dtype: torch.dtype = torch.float32) -> Any:
    """The model on the meta device, with an attention that saves what flash attention does."""
    family, config = (
        (Qwen3ForCausalLM, Qwen3Config) if shape.qk_norm else (LlamaForCausalLM, LlamaConfig)
    )
    sizes = config(
        hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab, tie_word_embeddings=shape.tied,
    )  # fmt: skip
    with torch.device("meta"):
        return family(sizes).to(dtype)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_torch_counts(name: str) -> None:
    assert Engine(PUBLISHED[name]).parameters == sum(
        p.numel() for p in model_of(PUBLISHED[name]).parameters()
    )


def test_parameters_of_a_critic_and_of_an_adapter() -> None:
    from peft import LoraConfig, get_peft_model

    shape = Shape(64, 96, 2, 4, 2, 16, 500, tied=True, qk_norm=True, max_tokens=512)
    plain = sum(p.numel() for p in model_of(shape).parameters())
    assert Engine(shape, outputs=1).parameters == plain + shape.hidden
    adapted = get_peft_model(model_of(shape), LoraConfig(r=8, target_modules="all-linear"))
    assert Engine(shape, lora_rank=8).trained == sum(
        p.numel() for p in adapted.parameters() if p.requires_grad
    )


def flash(
    module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    output = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]
    return output.transpose(1, 2), None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("qk_norm", [True, False])
def test_saved_activations_are_those_that_torch_saves(qk_norm: bool, dtype: torch.dtype) -> None:
    AttentionInterface.register("saved_by_fa", flash)
    shape = Shape(256, 768, 3, 8, 2, 64, 1000, tied=True, qk_norm=qk_norm, max_tokens=512)
    model, tokens = model_of(shape, dtype), 128
    model.config._attn_implementation = "saved_by_fa"
    weights, saved = {p.untyped_storage()._cdata for p in model.parameters()}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    inputs = torch.zeros((1, tokens), dtype=torch.long, device="meta")
    mask: Any = {"full_attention": None} if qk_norm else None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        last = model.model(
            inputs, attention_mask=mask, position_ids=inputs, use_cache=False
        ).last_hidden_state
    counted = sum(s.nbytes() for key, s in saved.items() if key not in weights) + last.nbytes
    computed = shape.layers * shape.saved_in_layer(dtype.itemsize) + shape.saved_outside(
        dtype.itemsize
    )
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
