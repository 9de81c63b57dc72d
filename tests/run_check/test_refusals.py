"""A run that verl would start, but that self-play could not trust, is refused with what to write instead."""

from typing import Any

import pytest
from run_check.runs import refusal, run, run_of

from medserl_agentloop.core.run_check import check_run, run_warnings

ACTOR, CRITIC, ROLLOUT = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
KL = {f"{ACTOR}.use_kl_loss": True}
GAE = {"algorithm.adv_estimator": "role_gae"}
SHARED = {"selfplay.context": "shared"}
SAMPLER = "trainer.v1.sampler"
ASYNC = {"trainer.v1.trainer_mode": "selfplay_colocate_async", f"{SAMPLER}.max_off_policy_strategy": "drop"}
POOL = {"selfplay.opponent.kind": "pool", "selfplay.opponent.url": "http://a:1", "selfplay.train": "assessor"}
MODEL = "actor_rollout_ref.model"
LORA = {f"{MODEL}.lora_rank": 8, f"{MODEL}.lora.merge": True}
PER_ROLE = {f"{MODEL}.lora_rank": 8, "selfplay.adapters": "per_role"}
SEVERAL = {f"{ACTOR}.ppo_mini_batch_size": 4}
"""Four mini-batches in a step of the quickstart."""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer.v1.trainer_mode": "sync"}, "trainer.v1.trainer_mode=selfplay_sync"),
        ({"trainer.v1.trainer_mode": "separate_async"}, "keeps its rollouts on GPUs of their own. Set"),
        ({"trainer.use_v1": False}, "Set trainer.use_v1=True"),
        ({"reward.reward_manager.source": "register"}, "Set reward.reward_manager.source=importlib"),
        ({"reward.reward_manager.module.path": None}, ".module.path=pkg://medserl_agentloop.core.reward_manager"),
        ({**GAE, "critic.enable": False}, "critic.enable=False. Set critic.enable=True"),
        (
            {"algorithm.adv_estimator": "role_rae", "selfplay.credit.normalize.assessor": "group"},
            "selfplay.credit.normalize.assessor=group makes no sense with role_rae: choose one of none, mean, batch",
        ),
        (
            {"selfplay.train": "attacker", "algorithm.adv_estimator": "grpo"},
            "algorithm.adv_estimator=grpo does not (did you mean 'role_grpo'?)",
        ),
        ({"algorithm.adv_estimator": "role_grpo", f"{ROLLOUT}.n": 1}, f"Set {ROLLOUT}.n to 2 or more"),
        ({"algorithm.adv_estimator": "role_rloo", f"{ROLLOUT}.n": 1}, "all advantages would be 0"),
        ({"algorithm.adv_estimator": "role_opo", f"{ROLLOUT}.n": 1}, "all advantages would be 0"),
        ({"selfplay.anchor.assessor": 0.1}, "selfplay.anchor needs the reference policy. Set actor_rollout_ref."),
        # verl's losses and corrections
        ({f"{ACTOR}.policy_loss.loss_mode": "gspo"}, f"Set {ACTOR}.policy_loss.loss_mode=vanilla, or train one role"),
        ({**SHARED, f"{ACTOR}.policy_loss.loss_mode": "gspo"}, "would change the gradient of the other"),
        ({f"{ACTOR}.policy_loss.loss_mode": "geo_mean"}, "geo_mean takes one number from all tokens of a row"),
        ({f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"}, f"Set {ACTOR}.loss_agg_mode=token-mean"),
        (
            {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"},
            f"Set {ACTOR}.loss_scale_factor to a constant, e.g. 6144",
        ),
        ({f"{CORRECTION}.rollout_is": "sequence"}, f"Set {CORRECTION}.rollout_is=token"),
        (
            {f"{CORRECTION}.rollout_rs": "token_k1,seq_mean_k3", f"{CORRECTION}.rollout_rs_threshold": "0.5_2,0.1"},
            f"{CORRECTION}.rollout_rs=seq_mean_k3 takes one number from all tokens of a row",
        ),
        (
            {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_batch_normalize": True},
            f"Set {CORRECTION}.rollout_is_batch_normalize=False",
        ),
        (
            {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.bypass_mode": True},
            "nothing would be corrected. Set bypass_mode=False",
        ),
        ({f"{CORRECTION}.rollout_rs": "token_k1"}, f"{CORRECTION}.rollout_rs_threshold=None: "),
        (
            {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": "2_1"},
            f"{CORRECTION}.rollout_is_threshold=2_1: ",
        ),
        # what reads one score per row, or columns that games do not have
        ({"algorithm.filter_groups.enable": True}, "In a zero-sum game the sum is constant"),
        ({"distillation.enabled": True}, "distillation.enabled=True: self-play sets the actor's loss"),
        ({f"{ROLLOUT}.enable_rollout_routing_replay": True}, "games keep no routes of experts"),
        # batches, sampling, checkpoints
        ({**SEVERAL, f"{ACTOR}.shuffle": False}, f"{ACTOR}.ppo_mini_batch_size=4): verl keeps the order in which"),
        ({**SEVERAL, **GAE, "critic.shuffle": False}, "Set critic.shuffle=True"),
        ({f"{ACTOR}.ppo_mini_batch_size": 1, "trainer.nnodes": 8}, "Set it to a multiple of 8"),
        ({**GAE, "critic.ppo_mini_batch_size": 3, "trainer.nnodes": 8}, "critic.ppo_mini_batch_size=3"),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 2}, "does not divide the 1 GPUs of the run"),
        ({f"{ROLLOUT}.temperature": 0}, f"{ROLLOUT}.temperature=0"),
        ({f"{ROLLOUT}.name": None}, f"{ROLLOUT}.name is not set"),
        ({"trainer.resume_mode": "resume_path"}, "trainer.resume_from_path=None: verl reads the step from the path"),
        ({f"{ACTOR}.checkpoint.async_save": True}, f"Set {ACTOR}.checkpoint.async_save=False"),
        ({**SHARED, f"{ACTOR}.strategy": "megatron", f"{ACTOR}.megatron.router_replay.mode": "R3"}, "Set it to disabl"),
        # asynchronous training
        (ASYNC, f"{SAMPLER}.custom_sampler.name=SelfPlayReplayBufferAsync"),
        (ASYNC, f"long ones would be dropped or never be trained on. Set {SAMPLER}.max_off_policy_strategy=wait"),
        (ASYNC, f"{CORRECTION}.rollout_is=None does not correct for them. Set {CORRECTION}.rollout_is=token"),
        ({**ASYNC, **POOL}, "a game would go on while its opponent changes"),
        # adapters
        ({f"{MODEL}.lora_rank": 8}, f"rollout cpu_hf loads whole weights. Set {MODEL}.lora.merge=True"),
        ({f"{MODEL}.lora_rank": 8, f"{ROLLOUT}.name": "sglang"}, "an argument name that SGLang does not have"),
        ({f"{MODEL}.lora_adapter_path": "a"}, "is not loaded with actor_rollout_ref.model.lora_rank=0. Set lora_rank"),
        ({**LORA, f"{ACTOR}.checkpoint.save_contents": ["model", "hf_model"]}, "names that no model reads. Set it to"),
        ({"selfplay.adapters": "per_role"}, f"trains LoRA adapters, and {MODEL}.lora_rank=0. Set it, e.g. to 32"),
        ({**PER_ROLE, f"{MODEL}.lora.merge": True}, "one set of merged weights cannot serve two adapters"),
        ({**PER_ROLE, f"{ROLLOUT}.name": "vllm"}, "takes the adapter from each request, and"),
        (
            {**PER_ROLE, f"{ROLLOUT}.name": "sglang"},
            "SGLang reads an adapter's folder only with another. Set it to auto",
        ),
        ({**PER_ROLE, f"{ACTOR}.strategy": "fsdp"}, f"needs {ACTOR}.strategy=fsdp2, not fsdp"),
        (
            {**PER_ROLE, f"{ROLLOUT}.data_parallel_size": 2},
            "SGLang loads adapters in an engine of one data-parallel rank",
        ),
        ({**PER_ROLE, **SHARED}, "selfplay.context=shared is one of both. Set it to isolated"),
        ({f"{ACTOR}.checkpoint.save_contents": ["hf_model"]}, "load_contents=[hf_model] has no model: a killed run"),
    ],
)
def test_a_run_that_could_not_be_trusted_is_refused_with_its_remedy(changes: dict[str, Any], message: str) -> None:
    assert message in refusal(changes)


@pytest.mark.parametrize(
    "changes",
    [
        {f"{ACTOR}.policy_loss.loss_mode": "dppo_tv"},
        {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum"},
        {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor": 6144},
        {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": "0.5_5.0"},
        {f"{CORRECTION}.rollout_rs": "token_k1,token_k3", f"{CORRECTION}.rollout_rs_threshold": "0.5_2,0.1"},
        {f"{CORRECTION}.bypass_mode": True},
        {f"{CORRECTION}.rollout_is_batch_normalize": True},  # of weights that nobody computes
        {"critic.loss_agg_mode": "seq-mean-token-mean"},  # of a critic that is not there
        SEVERAL,
        {f"{ACTOR}.shuffle": False},  # with one mini-batch
        {"trainer.nnodes": 8},
        {"algorithm.adv_estimator": "role_rae", f"{ROLLOUT}.n": 1},
        {"trainer.save_freq": -1, f"{ACTOR}.checkpoint.save_contents": ["hf_model"]},
        {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "runs/x/global_step_3"},
        {"algorithm.adv_estimator": "reinforce_plus_plus"},  # for comparison
    ],
)
def test_their_neighbours_are_accepted(changes: dict[str, Any]) -> None:
    assert refusal(changes) == ""


def test_all_that_is_wrong_is_said_at_once() -> None:
    assert len(refusal({"distillation.enabled": True, f"{ROLLOUT}.temperature": 0}).splitlines()) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"actor_rollout_ref.model.use_remove_padding": False},
        {f"{ACTOR}.strategy": "megatron"},
        {"critic.enable": True, "critic.model.use_remove_padding": False},
        {"critic.enable": True, "critic.strategy": "megatron"},
        {**KL, "actor_rollout_ref.ref.strategy": "megatron"},
        {"algorithm.use_kl_in_reward": True, "actor_rollout_ref.ref.strategy": "veomni"},
    ],
)
def test_isolated_refuses_engines_that_ignore_position_restarts_and_names_both_ways_out(
    changes: dict[str, Any],
) -> None:
    answer = refusal(changes)
    assert "use_remove_padding=True" in answer
    assert "selfplay.context=shared" in answer
    assert check_run(run({**changes, **SHARED})).context == "shared"


@pytest.mark.parametrize("changes", [{}, {**KL, **LORA}])
def test_the_strategy_of_a_reference_policy_that_is_never_built_does_not_matter(changes: dict[str, Any]) -> None:
    assert refusal({**changes, "actor_rollout_ref.ref.strategy": "megatron"}) == ""


SEQUENCE_PARALLEL = "ulysses_sequence_parallel_size"
TWO_GPUS = {"trainer.n_gpus_per_node": 2}
SDPA = {"actor_rollout_ref.model.override_config.attn_implementation": "sdpa"}


@pytest.mark.parametrize(
    ("engine", "changes"),
    [
        (ACTOR, {**SDPA, f"{ACTOR}.{SEQUENCE_PARALLEL}": 2}),
        (ACTOR, {**SDPA, f"{ACTOR}.fsdp_config.{SEQUENCE_PARALLEL}": 2}),
        ("actor_rollout_ref.ref", {**SDPA, **KL, f"actor_rollout_ref.ref.{SEQUENCE_PARALLEL}": 2}),
        ("critic", {**GAE, "trainer.device": "cpu", f"critic.fsdp.{SEQUENCE_PARALLEL}": 2}),
    ],
)
def test_workers_that_share_a_row_need_flash_attention(engine: str, changes: dict[str, Any]) -> None:
    assert f"{engine}: {SEQUENCE_PARALLEL}=2 needs flash attention" in refusal({**TWO_GPUS, **changes}, "qwen3_4b")


@pytest.mark.parametrize(
    "changes",
    [
        {f"{ACTOR}.{SEQUENCE_PARALLEL}": 2},
        {**GAE, **SDPA, f"critic.fsdp.{SEQUENCE_PARALLEL}": 2},  # a critic has flash attention, whatever is set
        SDPA,
    ],
)
def test_with_flash_attention_or_rows_of_their_own_they_are_accepted(changes: dict[str, Any]) -> None:
    assert refusal({**TWO_GPUS, **changes, "selfplay.judge": "labels", "selfplay.blind.readings": 0}, "qwen3_4b") == ""


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({}, None),
        ({"algorithm.adv_estimator": "reinforce_plus_plus"}, "mixes the rewards of the roles"),
        ({f"{ROLLOUT}.top_p": 0.9}, f"{ROLLOUT}.top_p=0.9 and top_k=-1 cut the distribution"),
        ({f"{ROLLOUT}.top_k": 20}, "train with top_p=1.0 and top_k=-1"),
        ({"trainer.max_actor_ckpt_to_keep": None}, "about 45 GiB each"),
        ({"trainer.max_actor_ckpt_to_keep": None, "trainer.save_freq": -1}, None),
        (
            {"trainer.max_actor_ckpt_to_keep": None, "selfplay.opponent.kind": "pool"},
            "(and so of opponents, with selfplay.opponent.kind=pool)",
        ),
    ],
)
def test_what_a_run_hardly_wants_is_a_warning(changes: dict[str, Any], warning: str | None) -> None:
    warnings = list(run_warnings(run_of(changes)))
    assert len(warnings) == (warning is not None)
    assert all(warning is not None and warning in line for line in warnings)
