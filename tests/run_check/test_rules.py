"""A run that verl would start, but that self-play could not trust, is refused."""

import math
from typing import Any

import pytest
from judges.games import printed_at_start_up
from run_check.runs import refusal, run, run_of, schema
from verl.utils.config import omega_conf_to_dataclass

from medserl_agentloop.core.config import ConfigError
from medserl_agentloop.core.run_check import check_run, problems
from medserl_agentloop.games.medical.case import Role
from medserl_agentloop.testing import compose_run

ACTOR, CRITIC, ROLLOUT = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.rollout"
CORRECTION, SAMPLER, MODEL = (
    "algorithm.rollout_correction",
    "trainer.v1.sampler",
    "actor_rollout_ref.model",
)
GAE = {"algorithm.adv_estimator": "role_gae"}
SHARED = {"selfplay.context": "shared"}
ENDPOINT = {"selfplay.opponent.url": "http://host:30000", "selfplay.train": "assessor"}
LORA = {f"{MODEL}.lora_rank": 8, f"{MODEL}.lora.merge": True}
PER_ROLE = {f"{MODEL}.lora_rank": 8, "selfplay.adapters": "per_role"}
SEVERAL = {f"{ACTOR}.ppo_mini_batch_size": 4}
"""Four mini-batches in a step of the quickstart."""
REUSE = {"selfplay.reuse_log_probs": True}
NEEDED_BEFORE = (
    *(
        SEVERAL,
        {f"{ACTOR}.ppo_epochs": 2},
        {"algorithm.adv_estimator": "grpo"},
        {"algorithm.use_kl_in_reward": True},
    ),
    *({f"{CORRECTION}.rollout_is": "token"}, {f"{CORRECTION}.bypass_mode": True}),
    {f"{ROLLOUT}.calculate_log_probs": False},
)
DYNAMIC = {f"{ACTOR}.use_dynamic_bsz": True}
FEW = {**DYNAMIC, f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 4096}
FEW_READ = f"{ROLLOUT}.log_prob_max_token_len_per_gpu=4096: it holds no game of 8192 tokens"
DR_GRPO = {"algorithm.adv_estimator": "role_grpo", "algorithm.norm_adv_by_std_in_grpo": False}
NO_WEIGHT = {f"selfplay.credit.role_weights.{role.value}": 0.0 for role in Role}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        # the node itself
        ({"selfplay.contxt": "shared"}, "selfplay.contxt"),
        ({"selfplay.budget.asessor": 5}, "selfplay.budget.asessor"),
        ({"selfplay.context": "isolatd"}, "selfplay.context='isolatd'"),
        ({"selfplay.alarms.limits": {"void_game": 0.9}}, "selfplay.alarms.limits.void_game"),
        ({"selfplay.alarms.limits": {"void_games": math.nan}}, "limits.void_games=nan"),
        ({"selfplay.turn_timeout_s": math.inf}, "selfplay.turn_timeout_s=inf"),
        ({"selfplay.reward": "zerosum"}, "selfplay.reward: no reward scheme 'zerosum'"),
        ({"selfplay.reward": "no_module:Own"}, "No module named 'no_module'"),
        ({"selfplay.profile": "nonesuch"}, "no prompt profile 'nonesuch'"),
        ({"selfplay.credit.role_weights.judge": 1.0}, "selfplay.credit.role_weights.judge"),
        (NO_WEIGHT, "selfplay.credit.role_weights: "),
        (
            {"selfplay.train": "attacker", "selfplay.credit.role_weights.attacker": 0.0},
            "selfplay.credit.role_weights: ",
        ),
        ({"selfplay.assessments": 2, **SHARED}, "selfplay.context=isolated"),
        ({"selfplay.reward": "learnable"}, "selfplay.assessments"),
        ({"selfplay.assessments": 0}, "selfplay.assessments"),
        # trainer and estimator
        ({"trainer.v1.trainer_mode": "sync"}, "trainer.v1.trainer_mode=sync: "),
        ({"trainer.use_v1": False}, "trainer.use_v1=False: "),
        ({f"{SAMPLER}.custom_sampler.path": None}, f"{SAMPLER}.custom_sampler.path=None: "),
        (
            {"selfplay.train": "attacker", "algorithm.adv_estimator": "grpo"},
            "algorithm.adv_estimator=grpo: ",
        ),
        ({"algorithm.adv_estimator": "role_grpo", f"{ROLLOUT}.n": 1}, f"{ROLLOUT}.n=1: "),
        ({"selfplay.anchor.assessor": 0.1}, f"{ACTOR}.use_kl_loss=False: "),
        # opponents
        ({**ENDPOINT, "selfplay.train": "both"}, "selfplay.train=both: "),
        ({**ENDPOINT, **SHARED}, "selfplay.context=shared: "),
        ({**ENDPOINT, "selfplay.opponent.url": "host:1"}, "selfplay.opponent.url=host:1: "),
        ({**ENDPOINT, "selfplay.opponent.api_key_env": "NO_SUCH_KEY"}, "opponent.api_key_env"),
        # what verl ignores
        (
            {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.bypass_mode": True},
            f"{CORRECTION}.bypass_mode=True: ",
        ),
        (
            {f"{CORRECTION}.rollout_is": "token", f"{ROLLOUT}.calculate_log_probs": False},
            f"{ROLLOUT}.calculate_log_probs=False: ",
        ),
        (DR_GRPO, "algorithm.norm_adv_by_std_in_grpo=False: "),
        *(
            ({key: value}, f"{key}={value}: ")
            for key, value in {
                "algorithm.filter_groups.enable": True,
                "distillation.enabled": True,
                f"{SAMPLER}.sync_refill_failed_groups": True,
                "algorithm.use_pf_ppo": True,
                "reward.custom_reward_function.path": "x.py",
                "trainer.critic_warmup": 100,
                f"{ROLLOUT}.temperature": 0.0,
                f"{ROLLOUT}.do_sample": False,
                f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
                "hydra.job.chdir": True,
            }.items()
        ),
        # batches and checkpoints
        ({**SEVERAL, f"{ACTOR}.shuffle": False}, f"{ACTOR}.shuffle=False: "),
        (
            {**SEVERAL, **GAE, "critic.ppo_mini_batch_size": 4, "critic.shuffle": False},
            "critic.shuffle=False: ",
        ),
        ({**DYNAMIC, f"{ACTOR}.ppo_max_token_len_per_gpu": 8000}, "Set it to 8192 or more"),
        (FEW, FEW_READ),
        # by the reference, in the actor
        ({**FEW, **REUSE, **LORA, f"{ACTOR}.use_kl_loss": True}, FEW_READ),
        (
            {**GAE, "critic.ppo_max_token_len_per_gpu": 8000},
            "critic.ppo_infer_max_token_len_per_gpu=8000: ",
        ),
        *(
            ({**REUSE, **wrong}, f"old log-probs are read with {next(iter(wrong))}=")
            for wrong in NEEDED_BEFORE
        ),
        ({f"{ACTOR}.checkpoint.async_save": True}, f"{ACTOR}.checkpoint.async_save=True: "),
        (
            {f"{ACTOR}.checkpoint.save_contents": ["hf_model"]},
            f"{ACTOR}.checkpoint.load_contents=['hf_model']: ",
        ),
        # adapters
        ({f"{MODEL}.lora_adapter_path": "a"}, f"{MODEL}.lora_adapter_path=a: "),
        (
            {**LORA, f"{ACTOR}.checkpoint.save_contents": ["model", "hf_model"]},
            f"{ACTOR}.checkpoint.save_contents=['model', 'hf_model']: ",
        ),
        ({"selfplay.adapters": "per_role"}, f"{MODEL}.lora_rank=0: "),
        ({**PER_ROLE, f"{MODEL}.lora.merge": True}, f"{MODEL}.lora.merge=True: "),
        ({**PER_ROLE, f"{ROLLOUT}.name": "vllm"}, f"{ROLLOUT}.name=vllm: "),
        ({**PER_ROLE, f"{ACTOR}.strategy": "fsdp"}, f"{ACTOR}.strategy=fsdp: "),
        (
            {**PER_ROLE, f"{ACTOR}.ulysses_sequence_parallel_size": 2},
            f"{ACTOR}.ulysses_sequence_parallel_size=2: ",
        ),
        ({**PER_ROLE, **SHARED}, "selfplay.context=shared: "),
    ],
)
def test_a_run_that_could_not_be_trusted_is_refused_by_the_name_of_its_key(
    changes: dict[str, Any], named: str
) -> None:
    assert named in refusal(changes)


@pytest.mark.parametrize(
    "changes",
    [
        *({}, SEVERAL, ENDPOINT, PER_ROLE, LORA, GAE, {"selfplay.train": "assessor"}),
        {**DYNAMIC, f"{ACTOR}.ppo_max_token_len_per_gpu": 8192},
        {**FEW, **REUSE},
        {**FEW, f"{CORRECTION}.bypass_mode": True},
        {**DR_GRPO, "algorithm.norm_adv_by_std_in_grpo": True},
        {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": "0.5_5.0"},
        {f"{CORRECTION}.bypass_mode": True},
        REUSE,
        {f"{ACTOR}.shuffle": False},  # with one mini-batch
        {"algorithm.adv_estimator": "role_rae", f"{ROLLOUT}.n": 1},
        {f"{ROLLOUT}.temperature": 0.0, "trainer.val_only": True},
        {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor": 512},
        {**GAE, "trainer.critic_warmup": 2},
        {"trainer.save_freq": -1, f"{ACTOR}.checkpoint.save_contents": ["hf_model"]},
        {"algorithm.adv_estimator": "reinforce_plus_plus"},  # the certificate measures what it does
        {f"{ACTOR}.policy_loss.loss_mode": "gspo"},
        {f"{MODEL}.use_remove_padding": False},
    ],
)
def test_supported_configs_are_accepted(changes: dict[str, Any]) -> None:
    assert refusal(changes) == ""


def test_adapters_in_cuda_graphs_need_a_backend_that_drops_none() -> None:
    def refused(*overrides: str) -> str:
        base = ("selfplay.judge_server.url=base", "selfplay.judge_server.json_schema=false")
        return "\n".join(
            problems(
                compose_run("+recipes=[qwen3_4b,lora,adapter_per_role]", *base, *overrides),
                schema(),
            )[0]
        )

    backend = f"{ROLLOUT}.engine_kwargs.sglang.lora_backend"
    assert refused() == refused(f"{backend}=csgmv", f"{ROLLOUT}.enforce_eager=true") == ""
    for override in (f"{backend}=csgmv", f"~{backend}"):
        assert refused(override).startswith(f"{backend}=")


def test_a_run_plays_and_trains_the_roles_that_its_opponent_leaves() -> None:
    played = run_of({**ENDPOINT, "selfplay.opponent.url": "https://host/api/v1/"}).selfplay
    assert played.opponent.client().url == "https://host/api/v1"
    assert (played.plays("attacker"), played.plays("assessor")) == (False, True)
    alone = run_of({"selfplay.train": "assessor"}).selfplay
    assert alone.plays("attacker") and alone.trains("assessor") and not alone.trains("attacker")


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({f"{ROLLOUT}.top_p": 0.9}, f"{ROLLOUT}.top_p=0.9 and top_k=-1 cut the distribution"),
        ({f"{ROLLOUT}.top_k": 20}, "train with top_p=1.0 and top_k=-1"),
        ({"algorithm.adv_estimatr": "x"}, "algorithm.adv_estimatr is not a key of verl's"),
    ],
)
def test_unlikely_settings_are_warnings(changes: dict[str, Any], warning: str) -> None:
    refused, (only,) = problems(run(changes), schema())
    assert not refused and warning in only


def test_start_up_names_a_role_that_is_whitened_by_a_kind_it_cannot_see(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def said(**normalize: str) -> bool:
        keys = (f"selfplay.credit.normalize.{role}={how}" for role, how in normalize.items())
        return any(
            "assessor reads the same prompt" in line for line in printed_at_start_up(capsys, *keys)
        )

    assert said(assessor="kind", attacker="batch")
    assert not said(assessor="mean", attacker="kind")


@pytest.mark.parametrize(("estimator", "enabled"), [("role_gae", True), ("role_grpo", False)])
def test_the_recipes_bring_a_critic_where_the_estimator_reads_its_values(
    estimator: str, enabled: bool
) -> None:
    composed = compose_run("+recipes=own_notes", f"algorithm.adv_estimator={estimator}")
    assert composed.critic.enable is enabled
    assert composed.critic.model.path == composed.actor_rollout_ref.model.path


def test_verl_gives_the_critic_the_budget_that_a_run_sets_and_packs_whatever_it_says() -> None:
    config = run({**GAE, "critic.ppo_max_token_len_per_gpu": 9000, "critic.use_dynamic_bsz": False})
    critic = omega_conf_to_dataclass(config.critic)
    assert (
        critic.ppo_infer_max_token_len_per_gpu == 9000
    )  # trainer_base.py takes it for both passes
    assert critic.engine.use_dynamic_bsz and run_of(GAE).packs(CRITIC)


@pytest.mark.parametrize("key", [f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"])
def test_an_anchor_is_accepted_with_either_way_to_a_reference_policy(key: str) -> None:
    anchored = check_run(
        run({"selfplay.anchor.assessor": 0.1, "selfplay.anchor_end": 0.5, key: True})
    )
    assert [anchored.anchors(done) for done in (0.0, 1.0)] == [
        {"assessor": 0.1},
        {"assessor": 0.05},
    ]


def test_a_run_without_the_node_is_told_to_start_from_a_recipe() -> None:
    with pytest.raises(ConfigError, match=r"\+recipes=quickstart"):
        check_run(compose_run())
