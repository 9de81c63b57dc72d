"""The certificate tells runs that keep the roles apart from runs that do not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from real_runs import answers_of
from training.model_families import ISOLATED, LEAKING, save
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from medserl_agentloop.core.advantages import ROLE_ESTIMATORS, Baselines, RoleBatch
from medserl_agentloop.core.certificate import Certificate, Measure, credit
from medserl_agentloop.core.config import CreditSettings
from medserl_agentloop.games.medical.case import Role

pytestmark = pytest.mark.timeout(600)

DTYPE = "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype"
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"model": name} for name in (*ISOLATED, *LEAKING)},
    "bf16": {"overrides": [f"{DTYPE}=bf16"]},
    "dynamic batches": {"overrides": ["actor_rollout_ref.actor.use_dynamic_bsz=true"]},
    "gradient checkpointing": {
        "overrides": ["actor_rollout_ref.model.enable_gradient_checkpointing=true"]
    },
    "LoRA": {
        "overrides": [
            "actor_rollout_ref.model.lora_rank=8",
            "actor_rollout_ref.model.lora_alpha=16",
        ]
    },
    "no restart": {"restart": False},
    "no restart, bf16": {"restart": False, "overrides": [f"{DTYPE}=bf16"]},
    **{
        f"{setting}, {loss}": {"loss": loss, "overrides": [f"actor_rollout_ref.actor.{setting}"]}
        for setting in (
            *("policy_loss.loss_mode=gspo", "policy_loss.loss_mode=geo_mean"),
            *(
                "loss_agg_mode=token-mean",
                "loss_agg_mode=seq-mean-token-sum",
                "loss_agg_mode=seq-mean-token-mean",
            ),
        )
        for loss in ("per_role", "verl")
    },
    "verl's loss of one role": {"trained": ["assessor"], "loss": "verl"},
}
LEAKS = {*LEAKING, "no restart", "no restart, bf16"}
COUPLES = {
    name for name in VARIANTS if name.endswith(", verl")
}  # verl's token-sum by the anchor's denominator


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
    return {
        name: {measure["claim"]: measure for measure in measures}
        for name, measures in answers.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in LEAKS])
def test_contexts_that_are_kept_apart_are_certified(measured: Any, variant: str) -> None:
    isolation = measured[variant]["isolation"]
    assert isolation["holds"]
    assert isolation["value"] < 1e-4
    assert isolation["gap_to_joined"] > 0.1  # there was something to leak


@pytest.mark.slow
def test_cpu_engine_attends_to_each_context_alone(measured: Any) -> None:
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
def test_the_loss_is_certified_unless_it_is_verls_over_both_roles(
    measured: Any, variant: str
) -> None:
    loss = measured[variant]["loss"]
    assert loss["holds"] is (variant not in COUPLES)
    if variant in COUPLES:
        assert "this run's loss takes one number over both roles' tokens" in loss["problem"]
    else:
        assert loss["value"] == 0


ROLE_IDS = [torch.tensor([1] * 3 + [0] * 2 + [2] * (2 + n)) for n in range(4)]
ROLES = [role.value for role in Role]
GROUPS = ["a", "a", "b", "b"]
IDS = {role.value: role.id for role in Role}


def assigned(estimate: Callable[..., torch.Tensor]) -> Callable[..., dict[str, list[torch.Tensor]]]:
    """The estimator's step from rewards to advantages, a row per game."""

    def assign(
        rewards: list[torch.Tensor], drift: list[torch.Tensor]
    ) -> dict[str, list[torch.Tensor]]:
        padded = [
            torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) for rows in (rewards, ROLE_IDS)
        ]
        advantages = estimate(padded[0], padded[1])
        return {"advantages": [row[: len(r)] for row, r in zip(advantages, rewards, strict=True)]}

    return assign


@pytest.mark.parametrize("estimator", sorted(ROLE_ESTIMATORS))
def test_role_separated_estimators_are_certified(estimator: str) -> None:
    def estimate(rewards: torch.Tensor, roles: torch.Tensor) -> torch.Tensor:
        values = torch.zeros(rewards.shape)
        batch = RoleBatch(
            rewards, (roles > 0).long(), roles, ROLES, groups=GROUPS, kinds=["c"] * 4, values=values
        )
        return ROLE_ESTIMATORS[estimator](batch, CreditSettings(), Baselines()).advantages

    measure = credit(estimator, assigned(estimate), ROLE_IDS, IDS)
    assert measure.holds and measure.value == 0


@pytest.mark.parametrize(
    "estimator", ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
def test_estimators_that_add_up_both_roles_are_not_certified(estimator: str) -> None:
    def estimate(rewards: torch.Tensor, roles: torch.Tensor) -> torch.Tensor:
        groups = np.array(GROUPS, dtype=object)
        columns = {
            "token_level_rewards": rewards,
            "response_mask": (roles > 0).long(),
            "index": groups,
        }
        config = OmegaConf.create({"gamma": 1.0})
        advantages: torch.Tensor = get_adv_estimator_fn(estimator)(**columns, config=config)[0]
        return advantages

    measure = credit(estimator, assigned(estimate), ROLE_IDS, IDS)
    assert not measure.holds and f"algorithm.adv_estimator={estimator}" in measure.problem


def test_rejection_of_whole_rows_is_not_certified() -> None:
    def assign(
        rewards: list[torch.Tensor], drift: list[torch.Tensor]
    ) -> dict[str, list[torch.Tensor]]:
        mask = [
            float(d.sum() < 2) * (roles > 0).float()
            for d, roles in zip(drift, ROLE_IDS, strict=True)
        ]
        return {"advantages": rewards, "response_mask": mask}

    assert not credit("role_grpo", assign, ROLE_IDS, IDS).holds


def test_a_claim_without_a_number_does_not_hold(tmp_path: Path) -> None:
    measures = [Measure("loss", "actor", float("nan"), 1e-5, {}, "nothing was measured")]
    certificate = Certificate(measures, step=0, games=2, seconds=1.0)
    assert certificate.problems == ["nothing was measured"]
    written = json.loads(certificate.write(tmp_path).read_text())
    assert written["holds"] is False and written["measures"][0]["problem"] == "nothing was measured"


def test_both_roles_are_named_in_the_sentence_of_the_worse_one() -> None:
    def estimate(rewards: torch.Tensor, roles: torch.Tensor) -> torch.Tensor:
        return (rewards * (roles == Role.ATTACKER.id)).sum(1, keepdim=True) * (roles > 0)

    measure = credit("one_sided", assigned(estimate), ROLE_IDS, IDS)
    assert measure.problem.startswith("the attacker's rewards") and measure.details["assessor"] == 0
