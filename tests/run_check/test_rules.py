"""A run that verl would start, but that self-play could not trust, is refused by its key."""

import math
from typing import Any

import pytest
from run_check.runs import refusal, run, run_of, schema

from medserl_agentloop.core.config import ConfigError
from medserl_agentloop.core.run_check import MUST_BE, check_run, warnings
from medserl_agentloop.games.medical.case import Role
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.testing import compose_run

ACTOR, CRITIC, ROLLOUT = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.rollout"
CORRECTION, MODEL = "algorithm.rollout_correction", "actor_rollout_ref.model"
SAMPLER = "trainer.v1.sampler.custom_sampler.path"
GAE = {"algorithm.adv_estimator": "role_gae"}
SHARED = {"selfplay.context": "shared"}
ENDPOINT = {"selfplay.opponent.url": "http://host:30000", "selfplay.train": "assessor"}
LORA = {f"{MODEL}.lora_rank": 8, f"{MODEL}.lora.merge": True}
PER_ROLE = {f"{MODEL}.lora_rank": 8, "selfplay.adapters": "per_role"}
SEVERAL = {f"{ACTOR}.ppo_mini_batch_size": 4}
"""Four mini-batches in a step of the quickstart."""
REUSE = {"selfplay.reuse_log_probs": True}
NEEDED_BEFORE = (
    *(SEVERAL, {f"{ACTOR}.ppo_epochs": 2}, {"algorithm.adv_estimator": "grpo"}),
    *({"algorithm.use_kl_in_reward": True}, {f"{ROLLOUT}.calculate_log_probs": False}),
    *({f"{CORRECTION}.rollout_is": "token"}, {f"{CORRECTION}.bypass_mode": True}),
)
DYNAMIC = {f"{ACTOR}.use_dynamic_bsz": True}
FEW = {**DYNAMIC, f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 4096}
FEW_READ = f"{ROLLOUT}.log_prob_max_token_len_per_gpu=4096: it cannot hold a game of 8192 tokens"
DR_GRPO = {"algorithm.adv_estimator": "role_grpo", "algorithm.norm_adv_by_std_in_grpo": False}
NO_WEIGHT = {f"selfplay.credit.role_weights.{role.value}": 0.0 for role in Role}
IS = {f"{CORRECTION}.rollout_is": "token"}
WRONG = {
    SAMPLER: None,
    "reward.custom_reward_function.path": "x.py",
    f"{ROLLOUT}.temperature": 0.0,
    f"{ROLLOUT}.do_sample": False,
    f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
    f"{ACTOR}.checkpoint.async_save": True,
    "trainer.critic_warmup": 100,
    f"{MODEL}.lora_adapter_path": "a",
    f"{ACTOR}.strategy": "megatron",
}
WITH_ADAPTERS = {
    f"{MODEL}.lora_rank": 0,
    f"{MODEL}.lora.merge": True,
    f"{ROLLOUT}.name": "vllm",
    f"{ACTOR}.strategy": "fsdp",
    f"{ACTOR}.ulysses_sequence_parallel_size": 2,
    "selfplay.context": "shared",
}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        # the node itself
        ({"selfplay.budget.asessor": 5}, "selfplay.budget.asessor"),
        ({"selfplay.context": "isolatd"}, "selfplay.context='isolatd'"),
        ({"selfplay.alarms.limits": {"void_game": 0.9}}, "selfplay.alarms.limits.void_game"),
        ({"selfplay.alarms.limits": {"void_games": math.nan}}, "limits.void_games=nan"),
        ({"selfplay.reward": "zerosum"}, "selfplay.reward: no reward scheme 'zerosum'"),
        ({"selfplay.reward": "no_module:Own"}, "No module named 'no_module'"),
        ({"selfplay.profile": "nonesuch"}, "no prompt profile 'nonesuch'"),
        ({"selfplay.credit.role_weights.judge": 1.0}, "selfplay.credit.role_weights.judge"),
        (NO_WEIGHT, "selfplay.credit.role_weights: "),
        ({"selfplay.assessments": 2, **SHARED}, "selfplay.context=isolated"),
        # keys of verl's that have one right value, or a wrong one
        *(({key: not right}, f"{key}={not right}: ") for key, (right, _) in MUST_BE.items()),
        *(({key: value}, f"{key}={value}: ") for key, value in WRONG.items()),
        ({"algorithm.adv_estimator": "role_grpo", f"{ROLLOUT}.n": 1}, f"{ROLLOUT}.n=1: "),
        ({"selfplay.anchor.assessor": 0.1}, f"{ACTOR}.use_kl_loss=False: "),
        (DR_GRPO, "algorithm.norm_adv_by_std_in_grpo=False: "),
        ({**IS, f"{CORRECTION}.bypass_mode": True}, f"{CORRECTION}.bypass_mode=True: "),
        ({**IS, f"{ROLLOUT}.calculate_log_probs": False}, f"{ROLLOUT}.calculate_log_probs=False: "),
        # opponents
        ({**ENDPOINT, "selfplay.train": "both"}, "selfplay.train=both: "),
        ({**ENDPOINT, **SHARED}, "selfplay.context=shared: "),
        ({**ENDPOINT, "selfplay.opponent.url": "host:1"}, "selfplay.opponent.url=host:1: "),
        ({"selfplay.judge": "llm", "selfplay.judge_server.url": "base"}, "set selfplay.adapters="),
        ({**ENDPOINT, "selfplay.opponent.api_key_env": "NO_SUCH_KEY"}, "opponent.api_key_env"),
        # batches and checkpoints
        ({**SEVERAL, f"{ACTOR}.shuffle": False}, f"{ACTOR}.shuffle=False: "),
        ({**DYNAMIC, f"{ACTOR}.ppo_max_token_len_per_gpu": 8000}, "Set it to 8192 or more"),
        (FEW, FEW_READ),
        # by the reference, in the actor
        ({**FEW, **REUSE, **LORA, f"{ACTOR}.use_kl_loss": True}, FEW_READ),
        ({**GAE, "critic.ppo_max_token_len_per_gpu": 8000}, "critic.ppo_infer_max_token_len_per"),
        *(({**REUSE, **wrong}, f"are read with {next(iter(wrong))}=") for wrong in NEEDED_BEFORE),
        ({f"{ACTOR}.checkpoint.save_contents": ["hf_model"]}, f"{ACTOR}.checkpoint.load_contents="),
        ({**LORA, f"{ACTOR}.checkpoint.save_contents": ["model", "hf_model"]}, "save_contents="),
        # adapters
        *(({**PER_ROLE, key: value}, f"{key}={value}: ") for key, value in WITH_ADAPTERS.items()),
    ],
)  # fmt: skip
def test_a_run_that_could_not_be_trusted_is_refused_by_the_name_of_its_key(
    changes: dict[str, Any], named: str
) -> None:
    assert named in refusal(run(changes))


@pytest.mark.parametrize(
    "changes",
    [
        *({}, SEVERAL, ENDPOINT, PER_ROLE, LORA, GAE, REUSE, {"selfplay.train": "assessor"}),
        {**DYNAMIC, f"{ACTOR}.ppo_max_token_len_per_gpu": 8192},
        {**FEW, **REUSE},
        {**FEW, f"{CORRECTION}.bypass_mode": True},
        {**IS, f"{CORRECTION}.rollout_is_threshold": "0.5_5.0"},
        {f"{ACTOR}.shuffle": False},  # with one mini-batch
        {f"{ROLLOUT}.temperature": 0.0, "trainer.val_only": True},
        {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor": 512},
        {"trainer.save_freq": -1, f"{ACTOR}.checkpoint.save_contents": ["hf_model"]},
        {"algorithm.adv_estimator": "reinforce_plus_plus"},  # the certificate measures what it does
        {f"{MODEL}.use_remove_padding": False},
    ],
)
def test_supported_configs_are_accepted(changes: dict[str, Any]) -> None:
    assert refusal(run(changes)) == ""


def test_adapters_in_cuda_graphs_need_a_backend_that_drops_none() -> None:
    def refused(*overrides: str) -> str:
        base = ("selfplay.judge_server.url=base", "selfplay.judge_server.json_schema=false")
        recipe = "+recipes=[qwen3_4b,lora,adapter_per_role]"
        return refusal(compose_run(recipe, *base, *overrides))

    backend = f"{ROLLOUT}.engine_kwargs.sglang.lora_backend"
    assert refused() == refused(f"{backend}=csgmv", f"{ROLLOUT}.enforce_eager=true") == ""
    assert refused(f"{backend}=csgmv").startswith(f"{backend}=")


def test_a_run_plays_and_trains_the_roles_that_its_opponent_leaves() -> None:
    played = run_of({**ENDPOINT, "selfplay.opponent.url": "https://host/api/v1/"}).selfplay
    assert played.opponent.client().url == "https://host/api/v1"
    assert (played.plays("attacker"), played.plays("assessor")) == (False, True)
    roles, alone = MedicalGameInteraction.roles, run_of({"selfplay.train": "assessor"}).selfplay
    assert alone.plays("attacker") and alone.trains("assessor") and not alone.trains("attacker")
    assert (alone.who_trains(roles) or "").startswith("only the assessor")
    assert "frozen default at https://host" in (played.who_trains(roles) or "")
    assert run_of({}).selfplay.who_trains(roles) is None


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({f"{ROLLOUT}.top_p": 0.9}, f"{ROLLOUT}.top_p=0.9 and top_k=-1 cut the distribution"),
        ({"algorithm.adv_estimatr": "x"}, "algorithm.adv_estimatr is not a key of verl's"),
    ],
)
def test_unlikely_settings_are_warnings(changes: dict[str, Any], warning: str) -> None:
    (only,) = warnings(run(changes), schema())
    assert warning in only


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["+recipes=quickstart"], []),
        (["+recipes=quickstart", "selfplay.profile=edits"], ["novice", "brief", "edits"]),
        (["+recipes=own_notes"], ["selfplay.judge=labels", "toy clinic"]),
        (["+recipes=own_notes", f"{MODEL}.path=/models/mine"], ["selfplay.judge=labels"]),
    ],
)
def test_a_run_says_what_its_numbers_cannot_show(overrides: list[str], named: list[str]) -> None:
    config = compose_run(*overrides)
    said = list(MedicalGameInteraction.View.caveats(config, MedicalConfig.from_run(config)))
    assert len(said) == bool(named)
    assert all(word in said[0] for word in named)


@pytest.mark.parametrize("key", [f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"])
def test_an_anchor_is_accepted_with_either_way_to_a_reference_policy(key: str) -> None:
    keys = {"selfplay.anchor.assessor": 0.1, "selfplay.anchor_end": 0.5, key: True}
    anchored = check_run(run(keys))
    assert [anchored.anchors(done)["assessor"] for done in (0.0, 1.0)] == [0.1, 0.05]


def test_a_run_without_the_node_is_told_to_start_from_a_recipe() -> None:
    with pytest.raises(ConfigError, match=r"\+recipes=quickstart"):
        check_run(compose_run())
