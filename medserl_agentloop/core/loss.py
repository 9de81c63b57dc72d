"""The actor's loss: verl's own, with an anchor to the reference policy, and what its pass tells of the contexts.

Roles that share weights drift where one of them is trained: the anchor, with a coefficient per role, holds on to tokens
that the policy loss does not see.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from verl.trainer.ppo.core_algos import kl_penalty
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding, response_to_nested

from medserl_agentloop.core.columns import ANCHOR_COLUMN, stacked

DIFFS = ("rollout_probs_diff_mean", "rollout_probs_diff_max")  # verl's names, after "training/"

GAPS = ("gap_first", "gap_later", "tokens_first", "tokens_later", "games_later")
"""Sums over a batch, of its games' first contexts and of later ones: what ``context_leak_metrics`` divides."""


def selfplay_loss(
    config: Any, model_output: Any, data: Any, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """verl's ``ppo_loss`` plus ``anchor_kl_loss``: ``sum(coef * KL estimate) / trained tokens``.

    The anchor is normalised as verl's token-mean policy loss is, so a coefficient weighs a token of an untrained role
    like one of a trained role. ``actor.kl_loss_type`` chooses the estimate, and so the direction of the pull. On
    samples of the current policy the gradient of ``low_var_kl`` is that of KL(reference || policy), cut off by verl's
    clamps; that of ``k2`` and of the forms with ``+`` is that of KL(policy || reference); that of ``k1`` is 0 on
    average (kl_penalty in verl's core_algos.py). A mini-batch without a trained token, because all of its games are
    void, costs 0 where verl's own loss would divide by their number. Old log-probs that nobody wrote are those of this
    pass, and are compared with the rollout's (``DIFFS``, ``GAPS``).
    """
    log_prob, compared = no_padding_2_padding(model_output["log_probs"], data), {}
    if not data["batch_num_tokens"]:
        return 0.0 * log_prob.sum(), {}
    if "old_log_probs" not in data:
        own, columns = log_prob.detach(), data.select("rollout_log_probs", "response_mask").to_padded_tensor(0)
        rollout, trained = columns["rollout_log_probs"], columns["response_mask"] > 0
        # Of an untrained role, too: its context may be the control group.
        generated = (stacked(data["role_ids"].unbind(), trained) > 0) & trained.any(1, keepdim=True)
        apart = (rollout.exp() - own.exp()).abs() * trained
        sums = {DIFFS[0]: apart.sum() / data["batch_num_tokens"], **context_gaps(rollout, own, generated)}
        compared = Metric.from_dict({name: of * data["dp_size"] for name, of in sums.items()}, AggregationType.SUM)
        compared[DIFFS[1]] = apart.max().item()
        data = data.copy().update({"old_log_probs": response_to_nested(own, data["response_mask"])})
    loss, metrics = ppo_loss(config, model_output, data, dp_group)
    if ANCHOR_COLUMN not in data:
        return loss, metrics | compared
    columns = data.select(ANCHOR_COLUMN, "ref_log_prob").to_padded_tensor()
    kl = kl_penalty(logprob=log_prob, ref_logprob=columns["ref_log_prob"], kl_penalty=config.kl_loss_type)
    anchor = (columns[ANCHOR_COLUMN] * kl).sum() / data["batch_num_tokens"] * data["dp_size"]
    metrics["anchor_kl_loss"] = Metric(value=anchor, aggregation=AggregationType.SUM)
    return loss + anchor, metrics | compared


LOG_PROB_RESOLUTION = 1e-6  # the smallest mean difference of log-probs that means something in float32


def context_gaps(
    rollout_log_probs: torch.Tensor, actor_log_probs: torch.Tensor, generated_mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """``GAPS`` of (B, T) columns: absolute differences in nats, and tokens, by context; games with a later context.

    ``generated_mask`` is 1 on generated tokens, trained on or not.
    """
    first = generated_mask.cumprod(1).bool()
    later = (generated_mask > 0) & ~first
    gap = (rollout_log_probs - actor_log_probs).abs().double()
    return dict(zip(GAPS, (of.sum() for of in (gap[first], gap[later], first, later, later.any(1))), strict=True))


def context_leak_metrics(gaps: Mapping[str, Any]) -> dict[str, float]:
    """Compare how far rollout and actor are apart in later contexts and in the first one of each game.

    The first context cannot hold another one, so it is the control group: what the two engines differ by there is
    their precision. A context that leaks is seen by the actor and not by the rollout. Returns mean absolute
    differences in nats and their ratio; nothing if no game has a second context.
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
