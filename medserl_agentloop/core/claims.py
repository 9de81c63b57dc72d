"""The three claims of a certificate, each as a measure: isolation of contexts, coupling by the loss, by the credit.

A claim compares numbers that the run computed itself; :mod:`medserl_agentloop.core.certificate` has it compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from verl.workers.utils.padding import no_padding_2_padding, response_to_nested

from medserl_agentloop.core.loss import ANCHOR_COLUMN, selfplay_loss
from medserl_agentloop.core.trajectory import TrajectoryTurn

FORMS = ("packed", "alone", "joined")
"""Each game as three rows: both contexts in one row, the second context as a row of its own, and one conversation."""

ISOLATION_LIMIT = 0.1
"""Largest distance of the packed row to the second context alone, as a share of its distance to one conversation.

Measured on a CPU with tiny models: at most 5e-6 where the contexts are apart in fp32, and 0.011 in bf16; 0.28 to 0.41
where some layers carry state across; 90 and more where positions do not restart."""

COUPLING_LIMIT = 1e-5
"""Largest change of one role's numbers by the other role's, as a share of the largest number. Exact zero is usual."""

RANDOM_SEED = 0


@dataclass(frozen=True)
class Measure:
    """One claim (``isolation``, ``credit`` or ``loss``), measured ``of`` the actor, the critic, an estimator.

    ``value`` is a share and ``details`` are the numbers behind it. ``problem`` is said if the claim does not hold.
    """

    claim: str
    of: str
    value: float
    limit: float
    details: Mapping[str, float]
    problem: str

    @property
    def holds(self) -> bool:
        """Whether the claim holds; NaN does not."""
        return self.value <= self.limit


def isolation(of: str, columns: Sequence[torch.Tensor], games: Sequence[list[TrajectoryTurn]]) -> Measure:
    """Compare the second turn's numbers, log-probs or values (T,) per row, in the three forms of each game."""
    # Each (tokens,): those of all games' second turns in one of the forms.
    packed, alone, joined = (
        torch.cat([rows[-len(turns[1].response_ids) :].double() for rows, turns in zip(form, games, strict=True)])
        for form in (columns[number :: len(FORMS)] for number in range(len(FORMS)))
    )
    alone_gap, joined_gap = (packed - alone).abs().mean().item(), (packed - joined).abs().mean().item()
    # Equal to one conversation is a leak, unless nothing differs at all, as in a critic that answers 0 everywhere. The
    # floor keeps the number finite: other numbers are no metrics.
    value = alone_gap / max(joined_gap, 1e-9)
    cause = (
        "These are the numbers of one conversation: position ids do not restart, or nothing reads that they do."
        if value > 1
        else "Part of its layers ignore that position ids restart. Use a model with full or sliding-window attention."
    )
    return Measure(
        "isolation",
        of,
        value,
        ISOLATION_LIMIT,
        {"gap_to_alone": alone_gap, "gap_to_joined": joined_gap},
        f"the {of} reads across the border of the private contexts: on the second context's tokens its numbers differ "
        f"by {alone_gap:.3g} on average from those of that context alone, and by {joined_gap:.3g} from those of "
        f"one conversation. {cause}",
    )


def probe_loss(
    config: Any, roles: Mapping[str, int], model_output: Any, data: Any, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """In place of the loss, on a worker: what one role's numbers change in the loss's gradient for the other role.

    The gradient is taken with respect to each token's log-prob. For each role (name and id) it is taken again with the
    role's advantages and old log-probs changed, and with the role's tokens out of the mask.

    Returns:
        A loss of 0 and two metrics per role: ``coupling``, the largest change of the other role's gradient by it, and
        ``signal``, the largest gradient of the other role.
    """
    log_probs = model_output["log_probs"]
    actual = no_padding_2_padding(log_probs, data).detach()
    mask = data["response_mask"].to_padded_tensor(0)
    role_ids = data["role_ids"].to_padded_tensor(0)
    generator = torch.Generator().manual_seed(RANDOM_SEED)
    advantages = torch.randn(mask.shape, generator=generator).to(actual)
    drift = 0.05 * torch.randn(mask.shape, generator=generator).to(actual)

    def gradient(advantages: torch.Tensor, drift: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        leaf = log_probs.values().detach().clone().requires_grad_()
        changed = {
            "advantages": advantages,
            "old_log_probs": actual - drift,
            "ref_log_prob": actual - 0.1,
            "rollout_is_weights": torch.ones_like(actual),
            ANCHOR_COLUMN: torch.full_like(actual, 0.1) * (role_ids > 0),
            "response_mask": mask,
        }
        nested = {name: response_to_nested(column, data["response_mask"]) for name, column in changed.items()}
        probe = data.copy().update(nested)
        with torch.enable_grad():
            output = {"log_probs": torch.nested.nested_tensor_from_jagged(leaf, log_probs.offsets())}
            loss, _ = selfplay_loss(config, output, probe)
            (gradient,) = torch.autograd.grad(loss, leaf)
        by_row: torch.Tensor = no_padding_2_padding(gradient, data)
        return by_row

    def largest(column: torch.Tensor, where: torch.Tensor) -> float:
        return column[where].abs().max().item() if where.any() else 0.0  # NaN if one is NaN

    before = gradient(advantages, drift, mask)
    metrics = {}
    for role, number in roles.items():
        own = role_ids == number
        other = (mask > 0) & ~own
        moved = gradient(torch.where(own, 1 - 3 * advantages, advantages), torch.where(own, 1.0, drift), mask)
        without = gradient(advantages, drift, mask * ~own)
        changes = [largest(moved - before, other), largest(without - before, other)]
        metrics[f"{role}/coupling"] = float(np.max(changes))  # unlike max(), NaN if one is NaN
        metrics[f"{role}/signal"] = largest(before, other)
    return log_probs.values().sum() * 0.0, metrics


def loss_measure(metrics: Mapping[str, Any], roles: Collection[str], trained: Collection[str]) -> Measure:
    """The claim on the loss, from what ``probe_loss`` gave in all micro-batches of all workers.

    A role is measured by its effect on the other one, if that is ``trained``.
    """
    shares = {}
    for role in roles:
        coupling, signal = (float(np.max(np.hstack(metrics[f"{role}/{of}"]))) for of in ("coupling", "signal"))
        if set(trained) - {role}:
            shares[role] = coupling / (signal or np.nan)  # Without a gradient nothing is shown: NaN, no claim holds.
    return _coupling(
        "loss",
        "actor",
        shares,
        "{role}'s advantages, drift or tokens change the gradient of the other role's tokens by {share:.3g} of its "
        "largest: this run's loss takes one number over both roles' tokens. Set "
        "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla and actor_rollout_ref.actor.loss_agg_mode=token-mean.",
    )


def _coupling(claim: str, of: str, shares: Mapping[str, float], problem: str) -> Measure:
    """A measure of how much each role's numbers change the other's; ``problem`` is about the worse one."""
    role = max(shares, key=lambda name: np.nan_to_num(shares[name], nan=np.inf))
    problem = "the " + problem.format(role=role, share=shares[role])
    return Measure(claim, of, shares[role], COUPLING_LIMIT, shares, problem)


CREDITED = ("advantages", "response_mask", "rollout_is_weights")


def credit(
    of: str,
    assign: Callable[[list[torch.Tensor], list[torch.Tensor]], Mapping[str, list[torch.Tensor]]],
    role_ids: Sequence[torch.Tensor],
    roles: Mapping[str, int],
) -> Measure:
    """What one role's rewards and log-prob drift change in the numbers that the other role is trained with.

    ``assign`` is the run's estimator, ``of``: its ``CREDITED`` columns from rewards and from the drift of the rollout's
    log-probs, per row (T,), as ``role_ids``. ``roles`` are those that are measured, each with its id.
    """
    generator = torch.Generator().manual_seed(RANDOM_SEED)
    rewards, drift = [], []
    for ids in role_ids:
        reward = torch.zeros(len(ids))
        for number in roles.values():
            reward[(ids == number).nonzero()[-1]] = torch.randn(1, generator=generator)
        rewards.append(reward)
        drift.append(0.05 * torch.randn(len(ids), generator=generator))
    before = assign(rewards, drift)

    shares = {}
    for role, number in roles.items():
        own = [ids == number for ids in role_ids]
        other = torch.cat([(ids > 0) & (ids != number) for ids in role_ids])
        after = assign(
            # The rows' order by reward turns round, so that ranks and signs change as well as sizes.
            [torch.where(o & (r != 0), 1 - 3 * r, r) for o, r in zip(own, rewards, strict=True)],
            [torch.where(o, 1.0, d) for o, d in zip(own, drift, strict=True)],
        )
        shares[role] = 0.0
        for name in before:
            was, now = (torch.cat(columns)[other].float() for columns in (before[name], after[name]))
            change, largest = (now - was).abs().max().item(), was.abs().max().item()
            shares[role] = max(shares[role], change / (largest or 1.0))
    return _coupling(
        "credit",
        of,
        shares,
        "{role}'s rewards or log-probs change what the other role is trained with by {share:.3g} of its largest "
        f"advantage: algorithm.adv_estimator={of} or algorithm.rollout_correction takes one number over both roles. "
        "Set algorithm.adv_estimator to a role_ estimator and correct by token.",
    )
