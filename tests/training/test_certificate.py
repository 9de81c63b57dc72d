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
from torch.nn.utils.rnn import pad_sequence
from training.model_families import ISOLATED, LEAKING, save
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from medserl_agentloop.core.advantages import ROLE_ESTIMATORS, Baselines, RoleBatch
from medserl_agentloop.core.certificate import Certificate, Numbers, Probe, Row, coupling
from medserl_agentloop.core.config import CreditSettings
from medserl_agentloop.core.trajectory import TrajectoryTurn

pytestmark = pytest.mark.timeout(600)

ACTOR = "actor_rollout_ref.actor"
BF16 = f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=bf16"
LORA = [f"actor_rollout_ref.model.{of}" for of in ("lora_rank=8", "lora_alpha=16")]
CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing=true"
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"model": name} for name in (*ISOLATED, *LEAKING)},
    "bf16": {"overrides": [BF16]},
    "dynamic batches": {"overrides": [f"{ACTOR}.use_dynamic_bsz=true"]},
    "gradient checkpointing": {"overrides": [CHECKPOINTING]},
    "LoRA": {"overrides": LORA},
    "no restart": {"restart": False},
    "no restart, bf16": {"restart": False, "overrides": [BF16]},
    "geo_mean": {"overrides": [f"{ACTOR}.policy_loss.loss_mode=geo_mean"]},
    "seq-mean-token-sum": {"overrides": [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum"]},
    "verl's loss of one role": {"trained": ["assessor"], "loss": "verl"},
    "verl's loss": {"loss": "verl"},
    "verl's gspo": {"loss": "verl", "overrides": [f"{ACTOR}.policy_loss.loss_mode=gspo"]},
    # It divides by the padded width, which grows with any role's turn.
    "padded width": {"overrides": [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"]},
    "an engine that counts all roles' tokens": {"counts": "wrong"},
}
LEAKS = {*LEAKING, "no restart", "no restart, bf16"}
COUPLES = {"verl's loss", "verl's gspo", "padded width", "an engine that counts all roles' tokens"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, Any]]]:
    """By variant and claim, what verl's real worker answered."""
    folder = tmp_path_factory.mktemp("models")
    for name in (*ISOLATED, *LEAKING):
        save(name, folder / name)
    plain = {"overrides": [], "model": "qwen3"}
    variants = {name: plain | variant for name, variant in VARIANTS.items()}
    for variant in variants.values():
        variant["model"] = str(folder / variant["model"])
    answers = answers_of(Path(__file__).with_name("certify_worker.py"), folder, variants)
    return {name: {each["claim"]: each for each in own} for name, own in answers.items()}


@pytest.mark.slow
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in LEAKS])
def test_contexts_that_are_kept_apart_are_certified(measured: Any, variant: str) -> None:
    isolation = measured[variant]["isolation"]
    assert isolation["holds"] and isolation["value"] < 1e-4
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
    }.get(variant, "Some of its layers ignore that position ids restart")
    assert cause in isolation["problem"]


@pytest.mark.slow
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "qwen2_vl"])
def test_only_a_loss_that_keeps_the_roles_apart_is_certified(measured: Any, variant: str) -> None:
    loss = measured[variant]["loss"]
    assert loss["holds"] is (variant not in COUPLES)
    assert variant in COUPLES or loss["value"] < 1e-6  # a wider sum rounds; 0 for most


def game(number: int) -> list[TrajectoryTurn]:
    turns = [("attacker", 6), ("assessor", 6 + 2 * number)]
    return [TrajectoryTurn(role, [0, 1], list(range(size)), None) for role, size in turns]


PROBE = Probe([game(n) for n in range(4)], ["attacker", "assessor"], ["attacker", "assessor"])
GROUPS = ["a", "a", "b", "b"]


def assigned(estimate: Callable[..., torch.Tensor]) -> Callable[[list[Row]], Numbers]:
    """An estimator's step from the rewards of rows to their advantages."""

    def assign(rows: list[Row]) -> Numbers:
        names = ("rm_scores", "role_ids", "response_mask")
        padded = [pad_sequence([row[name] for row in rows], batch_first=True) for name in names]
        advantages = estimate(*padded)
        return {
            "advantages": [a[: len(r["rm_scores"])] for a, r in zip(advantages, rows, strict=True)]
        }

    return assign


@pytest.mark.parametrize("name", sorted(ROLE_ESTIMATORS))
def test_role_separated_estimators_are_certified(name: str) -> None:
    def estimate(rewards: torch.Tensor, roles: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        fields = {"groups": GROUPS, "kinds": ["c"] * 4, "values": torch.zeros(rewards.shape)}
        batch = RoleBatch(rewards, mask, roles, PROBE.roles, **fields)
        return ROLE_ESTIMATORS[name](batch, CreditSettings(), Baselines()).advantages

    measure = coupling("credit", name, PROBE, assigned(estimate))
    assert measure.holds and measure.value == 0


@pytest.mark.parametrize(
    "name", ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
def test_estimators_that_add_up_both_roles_are_not_certified(name: str) -> None:
    def estimate(rewards: torch.Tensor, roles: torch.Tensor, mask: torch.Tensor) -> Any:
        return get_adv_estimator_fn(name)(
            token_level_rewards=rewards,
            response_mask=mask,
            index=np.array(GROUPS, dtype=object),
            config=OmegaConf.create({"gamma": 1.0}),
        )[0]

    measure = coupling("credit", name, PROBE, assigned(estimate))
    assert not measure.holds and f"algorithm.adv_estimator={name}" in measure.problem


def test_rejection_of_whole_rows_is_not_certified() -> None:
    def kept(row: Row) -> torch.Tensor:
        drift = (row["old_log_probs"] - row["rollout_log_probs"]).sum()
        return float(drift < 2) * row["response_mask"]

    def assign(rows: list[Row]) -> Numbers:
        return {"response_mask": list(map(kept, rows))}

    assert not coupling("credit", "role_grpo", PROBE, assign).holds


def test_a_claim_without_a_number_does_not_hold(tmp_path: Path) -> None:
    nothing = coupling(
        "loss", "actor", PROBE, lambda rows: {"gradient": [0.0 * r["rm_scores"] for r in rows]}
    )
    assert not nothing.holds and np.isnan(nothing.value)
    certificate = Certificate([nothing], step=0, games=2, seconds=1.0)
    assert certificate.problems == [nothing.problem]
    written = json.loads(certificate.write(tmp_path).read_text())
    assert written["holds"] is False and written["measures"][0]["problem"] == nothing.problem
