"""What verl's losses and corrections do to the roles of a row is measured; those that couple them are refused.

In each measurement one role's advantages, log-probs or tokens change, and the gradient (or the weight) of the
other role's tokens must stay as it was. The numbers that verl divides by stay, as they do in a real mini-batch.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from run_check.runs import refusal
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, compute_value_loss
from verl.trainer.ppo.rollout_corr_helper import (
    SUPPORTED_ROLLOUT_RS_OPTIONS,
    compute_rollout_correction_and_rejection_mask,
)
from verl.workers.config import FSDPActorConfig
from verl.workers.config.actor import PolicyLossConfig

from medserl_agentloop.core.run_check.run import AGGREGATIONS

ROWS, WIDTH = 4, 10
ATTACKER, ASSESSOR = torch.zeros(ROWS, WIDTH, dtype=torch.bool), torch.zeros(ROWS, WIDTH, dtype=torch.bool)
ATTACKER[:, :4] = ASSESSOR[:, 5:9] = True
GLOBAL = {"dp_size": 1, "batch_num_tokens": int((ATTACKER | ASSESSOR).sum()), "global_batch_size": ROWS}
SEEDS = range(2)  # some losses look at the few tokens that stand out

Batch = dict[str, torch.Tensor]
aggregations = pytest.mark.parametrize(
    ("aggregation", "scale"), [*((mode, None) for mode in AGGREGATIONS), ("seq-mean-token-sum-norm", WIDTH)]
)


def two_roles(seed: int) -> Batch:
    """Every row holds four tokens of each role, and one between them that nobody generated."""
    torch.manual_seed(seed)
    log_prob = -3 * torch.rand(ROWS, WIDTH)
    return {
        "old_log_prob": log_prob + 0.1 * torch.randn(ROWS, WIDTH),
        "log_prob": log_prob,
        "advantages": torch.where(ATTACKER, torch.randn(ROWS, 1), torch.randn(ROWS, 1)),
        "response_mask": (ATTACKER | ASSESSOR).float(),
    }


def changed(batch: Batch, role: torch.Tensor) -> Iterator[Batch]:
    """What can happen to one role while the other's turns stay the same."""
    yield batch | {"advantages": torch.where(role, batch["advantages"] - 3, batch["advantages"])}
    yield batch | {"old_log_prob": torch.where(role, batch["old_log_prob"] + 1, batch["old_log_prob"])}
    yield batch | {"response_mask": batch["response_mask"] * ~role}
    yield {name: torch.nn.functional.pad(column, (0, 5)) for name, column in batch.items()}  # a longer turn elsewhere


def couples(gradient: Callable[[Batch], torch.Tensor]) -> bool:
    """Whether a change of one role changes the gradient of the other's tokens."""
    for seed in SEEDS:
        batch = two_roles(seed)
        before = gradient(batch)
        for role, other in ((ATTACKER, ASSESSOR), (ASSESSOR, ATTACKER)):
            if any((gradient(b)[:, :WIDTH] - before)[other].abs().max() > 1e-6 for b in changed(batch, role)):
                return True
    return False


def gradient_of(loss: Callable[..., Any], leaf: str, batch: Batch) -> torch.Tensor:
    torch.manual_seed(0)  # clip_cov draws
    variable = batch[leaf].clone().requires_grad_()
    # Times 1, because kl_cov writes into a view of what it is given.
    value, _ = loss(**(batch | {leaf: variable * 1.0}))
    return torch.autograd.grad(value, variable)[0]


@aggregations
@pytest.mark.parametrize("loss", POLICY_LOSS_REGISTRY)
def test_the_policy_losses_that_couple_the_roles_are_those_that_are_refused(
    loss: str, aggregation: str, scale: int | None
) -> None:
    config = FSDPActorConfig(
        strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, rollout_n=1, policy_loss=PolicyLossConfig(dro_beta=0.1)
    )
    config.global_batch_info.update(**GLOBAL, loss_scale_factor=scale)

    def policy_loss(**columns: torch.Tensor) -> Any:
        return POLICY_LOSS_REGISTRY[loss](**columns, loss_agg_mode=aggregation, config=config)

    answer = refusal(
        {
            "actor_rollout_ref.actor.policy_loss.loss_mode": loss,
            "actor_rollout_ref.actor.policy_loss.dro_beta": 0.1,
            "actor_rollout_ref.actor.loss_agg_mode": aggregation,
            "actor_rollout_ref.actor.loss_scale_factor": scale,
        }
    )
    assert couples(lambda batch: gradient_of(policy_loss, "log_prob", batch)) == ("the gradient of the other" in answer)


@aggregations
def test_the_value_losses_that_couple_the_roles_are_those_that_are_refused(aggregation: str, scale: int | None) -> None:
    def value_loss(advantages: torch.Tensor, old_log_prob: torch.Tensor, log_prob: torch.Tensor, response_mask: Any):  # type: ignore[no-untyped-def]
        columns = {"vpreds": log_prob, "values": old_log_prob, "returns": advantages, "response_mask": response_mask}
        return compute_value_loss(
            **columns, cliprange_value=0.5, loss_agg_mode=aggregation, **GLOBAL, loss_scale_factor=scale
        )

    answer = refusal(
        {
            "algorithm.adv_estimator": "role_gae",
            "critic.loss_agg_mode": aggregation,
            "critic.loss_scale_factor": scale,
        }
    )
    assert couples(lambda batch: gradient_of(value_loss, "log_prob", batch)) == ("the gradient of the other" in answer)


@pytest.mark.parametrize(
    ("weights", "normalize", "rejection"),
    [
        *((level, normalize, None) for level in ("token", "sequence") for normalize in (False, True)),
        *((None, False, option) for option in sorted(SUPPORTED_ROLLOUT_RS_OPTIONS)),
    ],
)
def test_the_corrections_that_couple_the_roles_are_those_that_are_refused(
    weights: str | None, normalize: bool, rejection: str | None
) -> None:
    settings = {
        "rollout_is": weights,
        "rollout_is_batch_normalize": normalize,
        "rollout_rs": rejection,
        "rollout_rs_threshold": "0.7_1.3" if str(rejection).endswith("k1") else "0.1",
    }

    def trained_as(batch: Batch) -> torch.Tensor:
        corrected, mask, _ = compute_rollout_correction_and_rejection_mask(
            batch["log_prob"], batch["old_log_prob"], batch["response_mask"], **settings
        )
        return mask if corrected is None else mask * corrected.batch["rollout_is_weights"]

    answer = refusal({f"algorithm.rollout_correction.{key}": value for key, value in settings.items()})
    assert couples(trained_as) == ("the gradient of the other" in answer)


@pytest.mark.parametrize("role", ["attacker", "assessor"])
@pytest.mark.parametrize(
    "changes",
    [
        {"actor_rollout_ref.actor.policy_loss.loss_mode": "gspo"},
        {"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean"},
        {"algorithm.rollout_correction.rollout_is": "sequence"},
    ],
)
def test_where_one_role_is_trained_there_is_nothing_to_couple(changes: dict[str, Any], role: str) -> None:
    assert refusal(changes) != ""
    assert refusal({**changes, "selfplay.train": role}) == ""


def test_a_loss_of_the_user_s_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "mine", POLICY_LOSS_REGISTRY["gspo"])
    assert refusal({"actor_rollout_ref.actor.policy_loss.loss_mode": "mine"}) == ""


def test_bypass_mode_is_refused_because_it_ends_the_run_at_a_void_game() -> None:
    config = FSDPActorConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, rollout_n=1)
    config.global_batch_info.update(**GLOBAL, loss_scale_factor=None)
    batch = two_roles(0)
    batch["response_mask"] *= 0
    for loss in POLICY_LOSS_REGISTRY.keys() - {"bypass_mode", "dro"}:
        POLICY_LOSS_REGISTRY[loss](**two_roles(0) | {"response_mask": batch["response_mask"]}, config=config)
    with pytest.raises(ValueError, match="at least one valid token"):
        POLICY_LOSS_REGISTRY["bypass_mode"](**batch, config=config)
    assert "void game" in refusal({"actor_rollout_ref.actor.policy_loss.loss_mode": "bypass_mode"})
