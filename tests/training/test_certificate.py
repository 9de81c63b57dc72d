"""The certificate tells runs that keep the roles apart from runs that do not."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from real_runs import answers_of
from training.model_families import ISOLATED, LEAKING, save

from medserl_agentloop.core.advantages import ROLE_ESTIMATORS, BaselineState, RoleBatch
from medserl_agentloop.core.certificate import CERTIFICATE_FILE, Certificate, Measure, credit
from medserl_agentloop.core.config import CreditSettings
from medserl_agentloop.games.medical.types import Role

pytestmark = pytest.mark.timeout(600)

DTYPE = "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype"
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"model": name} for name in (*ISOLATED, *LEAKING)},
    "bf16": {"overrides": [f"{DTYPE}=bf16"]},
    "dynamic batches": {"overrides": ["actor_rollout_ref.actor.use_dynamic_bsz=true"]},
    "gradient checkpointing": {"overrides": ["actor_rollout_ref.model.enable_gradient_checkpointing=true"]},
    "LoRA": {"overrides": ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=16"]},
    "seq-mean-token-sum": {"overrides": ["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum"]},
    "no restart": {"restart": False},
    "no restart, bf16": {"restart": False, "overrides": [f"{DTYPE}=bf16"]},
    "gspo": {"overrides": ["actor_rollout_ref.actor.policy_loss.loss_mode=gspo"]},
    "geo_mean": {"overrides": ["actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean"]},
    "seq-mean-token-mean": {"overrides": ["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"]},
    "gspo for one role": {
        "trained": ["assessor"],
        "overrides": ["actor_rollout_ref.actor.policy_loss.loss_mode=gspo"],
    },
}
LEAKS = {*LEAKING, "no restart", "no restart, bf16"}
COUPLES = {"gspo", "geo_mean", "seq-mean-token-mean"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, Any]]]:
    """By variant and claim, what verl's real worker answered."""
    folder = tmp_path_factory.mktemp("models")
    for name in (*ISOLATED, *LEAKING):
        save(name, folder / name)
    variants = {
        name: {"overrides": [], **variant, "model": str(folder / variant.get("model", "qwen3"))}
        for name, variant in VARIANTS.items()
    }
    answers = answers_of(Path(__file__).with_name("certify_worker.py"), folder, variants)
    return {name: {measure["claim"]: measure for measure in measures} for name, measures in answers.items()}


@pytest.mark.slow
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in LEAKS])
def test_contexts_that_are_kept_apart_are_certified(measured: Any, variant: str) -> None:
    isolation = measured[variant]["isolation"]
    assert isolation["holds"]
    assert isolation["value"] < 1e-4
    assert isolation["gap_to_joined"] > 0.1  # there was something to leak


@pytest.mark.slow
def test_the_cpu_s_engine_attends_to_each_context_alone(measured: Any) -> None:
    """A mask over the whole pack, which is slower, leaves a difference of some 1e-6."""
    assert measured["qwen3"]["isolation"]["gap_to_alone"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("variant", sorted(LEAKS))
def test_contexts_that_leak_are_not_certified(measured: Any, variant: str) -> None:
    isolation = measured[variant]["isolation"]
    assert not isolation["holds"]
    cause = {
        **dict.fromkeys(("no restart", "no restart, bf16"), "position ids do not restart"),
        "qwen2_vl": "use a model with one position per token",
    }.get(variant, "Part of its layers ignore that position ids restart")
    assert cause in isolation["problem"]


@pytest.mark.slow
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "qwen2_vl"])
def test_the_loss_is_certified_unless_it_takes_one_number_over_both_roles(measured: Any, variant: str) -> None:
    loss = measured[variant]["loss"]
    assert loss["holds"] is (variant not in COUPLES)
    if variant in COUPLES:
        assert "this run's loss takes one number over both roles' tokens" in loss["problem"]
    else:
        assert loss["value"] == 0


ROLE_IDS = [torch.tensor([1] * 3 + [0] * 2 + [2] * (2 + n)) for n in range(4)]
ROLES = [role.value for role in Role]
GROUPS = ["a", "a", "b", "b"]


def batch_of(rewards: list[torch.Tensor]) -> dict[str, Any]:
    width = max(map(len, ROLE_IDS))

    def padded(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])

    roles = padded(ROLE_IDS)
    return {"rewards": padded(rewards), "mask": (roles > 0).long(), "role_ids": roles}


@pytest.mark.parametrize("estimator", sorted(ROLE_ESTIMATORS))
def test_role_separated_estimators_are_certified(estimator: str) -> None:
    def assign(rewards: list[torch.Tensor], drift: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        columns = batch_of(rewards)
        batch = RoleBatch(
            **columns, roles=ROLES, groups=GROUPS, kinds=["c"] * 4, values=torch.zeros(columns["mask"].shape)
        )
        found = ROLE_ESTIMATORS[estimator](batch, CreditSettings(), BaselineState()).advantages
        return {"advantages": [row[: len(r)] for row, r in zip(found, rewards, strict=True)]}

    measure = credit(estimator, assign, ROLE_IDS, {role.value: role.id for role in Role})
    assert measure.holds
    assert measure.value == 0


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_estimators_that_add_up_both_roles_are_not_certified(estimator: str) -> None:
    from omegaconf import OmegaConf
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    def assign(rewards: list[torch.Tensor], drift: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        columns = batch_of(rewards)
        found, _ = get_adv_estimator_fn(estimator)(
            token_level_rewards=columns["rewards"],
            response_mask=columns["mask"],
            config=OmegaConf.create({"gamma": 1.0}),
            index=np.array(GROUPS, dtype=object),
        )
        return {"advantages": [row[: len(r)] for row, r in zip(found, rewards, strict=True)]}

    measure = credit(estimator, assign, ROLE_IDS, {role.value: role.id for role in Role})
    assert not measure.holds
    assert f"algorithm.adv_estimator={estimator}" in measure.problem


def test_rejection_of_whole_rows_is_not_certified() -> None:
    def assign(rewards: list[torch.Tensor], drift: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        kept = [float(d.sum() < 2) for d in drift]
        mask = [k * (roles > 0).float() for k, roles in zip(kept, ROLE_IDS, strict=True)]
        return {"advantages": rewards, "response_mask": mask}

    assert not credit("role_grpo", assign, ROLE_IDS, {role.value: role.id for role in Role}).holds


def test_a_claim_without_a_number_does_not_hold(tmp_path: Path) -> None:
    measures = [Measure("loss", "actor", float("nan"), 1e-5, {}, "nothing was measured")]
    certificate = Certificate(measures, step=0, games=2, seconds=1.0)
    assert certificate.problems == ["nothing was measured"]
    written = json.loads(certificate.write(tmp_path).read_text())
    assert written["holds"] is False
    assert written["measures"][0]["problem"] == "nothing was measured"
    assert certificate.write(tmp_path).name == CERTIFICATE_FILE


def test_both_roles_are_named_in_the_sentence_of_the_worse_one() -> None:
    def assign(rewards: list[torch.Tensor], drift: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        attackers = [r[roles == Role.ATTACKER.id].sum() for r, roles in zip(rewards, ROLE_IDS, strict=True)]
        return {"advantages": [a * (roles > 0).float() for a, roles in zip(attackers, ROLE_IDS, strict=True)]}

    measure = credit("one_sided", assign, ROLE_IDS, {role.value: role.id for role in Role})
    assert measure.problem.startswith("the attacker's rewards")
    assert measure.details["assessor"] == 0
