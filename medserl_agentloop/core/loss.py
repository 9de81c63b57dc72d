"""The actor's loss: verl's own for each role, an anchor to the reference policy, and measurements
of context leaks.

If roles share weights and only one is trained, the other drifts: the anchor also covers tokens that
the policy loss does not see.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from verl.trainer.ppo.core_algos import kl_penalty
from verl.utils import tensordict_utils
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding, response_to_nested

from medserl_agentloop.core.columns import ANCHOR_COLUMN, TOKEN_COUNTS, stacked

DIFFS = ("rollout_probs_diff_mean", "rollout_probs_diff_max")  # verl's names, after "training/"

GAPS = ("gap_first", "gap_later", "tokens_first", "tokens_later", "games_later")
"""Sums over a batch, of its games' first contexts and of later ones."""


def selfplay_loss(
    config: Any, roles: Collection[int], model_output: Any, data: Any, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """verl's ``ppo_loss`` on each role's tokens, as if the role were alone in the batch, plus
    ``anchor_kl_loss``.

    ``roles`` are the ids of those that are trained. In verl's token-mean each role has its own
    denominator: its tokens in the mini-batch over all workers, times the number of ``roles``. So
    policy, entropy and KL losses are means of the roles' means. Without ``roles`` it is verl's own
    loss over all tokens, in which a role's length scales the other's gradient.

    The anchor is ``sum(coef * KL estimate)`` with the same denominators, an untrained role's being
    its anchored tokens. ``actor.kl_loss_type`` chooses the estimate, and so the direction of the
    KL. On samples of the current policy the gradient of ``low_var_kl`` is that of KL(reference ||
    policy), cut off by verl's clamps; that of ``k2`` and of the forms with ``+`` is that of
    KL(policy || reference); that of ``k1`` is 0 on average (kl_penalty in verl's core_algos.py). If
    all games of a mini-batch are void, its loss is 0; verl's own would divide by zero trained
    tokens. Without old log-probs, this pass provides them and compares them with the rollout's
    (``DIFFS``, ``GAPS``).
    """
    log_prob, compared = no_padding_2_padding(model_output["log_probs"], data), {}
    counts = data[TOKEN_COUNTS] if roles else {}
    present = [role for role in roles if counts["response_mask", role]]
    if not (present if roles else data["batch_num_tokens"]):
        return 0.0 * log_prob.sum(), {}
    mask = data["response_mask"].to_padded_tensor(0)
    role_ids = stacked(data["role_ids"].unbind(), mask)
    if "old_log_probs" not in data:
        own, trained = log_prob.detach(), mask > 0
        rollout = data["rollout_log_probs"].to_padded_tensor(0)
        # Also for an untrained role: its context may be the control group.
        generated = (role_ids > 0) & trained.any(1, keepdim=True)
        apart = (rollout.exp() - own.exp()).abs() * trained
        sums = {
            DIFFS[0]: apart.sum() / data["batch_num_tokens"],
            **context_gaps(rollout, own, generated),
        }
        of_all = {name: of * data["dp_size"] for name, of in sums.items()}
        compared = Metric.from_dict(of_all, AggregationType.SUM)
        compared[DIFFS[1]] = apart.max().item()
        data = data.copy().update({"old_log_probs": response_to_nested(own, data["response_mask"])})
    if not roles:
        loss, metrics = ppo_loss(config, model_output, data, dp_group)
    else:
        losses = []
        for role in present:
            alone, own = data.copy(), mask * (role_ids == role)
            alone["response_mask"] = response_to_nested(own, data["response_mask"])
            tokens = len(roles) * counts["response_mask", role]
            tensordict_utils.assign_non_tensor(alone, batch_num_tokens=tokens)
            losses.append(ppo_loss(config, model_output, alone, dp_group))
        loss, metrics = sum(of for of, _ in losses), losses[0][1]
        for name, metric in metrics.items():
            # Parts of the loss add up; verl averages other numbers.
            for _, of_other in losses[1:] if isinstance(metric, Metric) else ():
                metric.extend(of_other[name])
    if ANCHOR_COLUMN not in data:
        return loss, metrics | compared
    columns = data.select(ANCHOR_COLUMN, "ref_log_prob").to_padded_tensor()
    kl = kl_penalty(log_prob, columns["ref_log_prob"], config.kl_loss_type)
    denominators = torch.full_like(kl, data["batch_num_tokens"])
    for (column, role), count in counts.items():
        if column == ANCHOR_COLUMN and count:
            denominators[role_ids == role] = len(roles) * count
    anchor = (columns[ANCHOR_COLUMN] * kl / denominators).sum() * data["dp_size"]
    metrics["anchor_kl_loss"] = Metric(value=anchor, aggregation=AggregationType.SUM)
    return loss + anchor, metrics | compared


def compared_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    """Take the rollout-actor comparison, if any, out of an update's metrics."""
    if f"actor/{GAPS[0]}" not in metrics:
        return {}
    found = {f"training/{name}": metrics.pop(f"actor/{name}") for name in DIFFS}
    return found | context_leak_metrics({name: metrics.pop(f"actor/{name}") for name in GAPS})


# the smallest mean difference of log-probs that is meaningful in float32
LOG_PROB_RESOLUTION = 1e-6


def context_gaps(
    rollout_log_probs: torch.Tensor, actor_log_probs: torch.Tensor, generated_mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """``GAPS`` of (B, T) columns: absolute differences in nats, and tokens, by context; games with
    a later context.

    ``generated_mask`` is 1 on generated tokens, trained on or not.
    """
    first = generated_mask.cumprod(1).bool()
    later = (generated_mask > 0) & ~first
    gap = (rollout_log_probs - actor_log_probs).abs().double()
    sums = (of.sum() for of in (gap[first], gap[later], first, later, later.any(1)))
    return dict(zip(GAPS, sums, strict=True))


def context_leak_metrics(gaps: Mapping[str, Any]) -> dict[str, float]:
    """Compare the rollout-actor difference in later contexts with that in each game's first one.

    The first context cannot contain another one, so it is the control: any difference there is
    numerical precision. A leaked context is visible to the actor but not to the rollout. Returns
    mean absolute differences in nats and their ratio; empty if no game has a second context.
    """
    gap_first, gap_later, tokens_first, tokens_later, games = (float(gaps[name]) for name in GAPS)
    if not tokens_first or not tokens_later:
        return {}
    control, measured = gap_first / tokens_first, gap_later / tokens_later
    return {
        "selfplay/log_prob_gap/first_context": control,
        "selfplay/log_prob_gap/later_contexts": measured,
        "selfplay/context_leak": measured / max(control, LOG_PROB_RESOLUTION),
        "selfplay/context_leak_games": games,
    }
