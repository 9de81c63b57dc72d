"""The actor's loss: verl's own, and an anchor to the reference policy with a coefficient per role.

The roles share weights, so training one lets the other drift; the anchor holds on to tokens that
the policy loss does not see. The trainer gives it to verl's workers with ``set_loss_fn``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from verl.trainer.ppo.core_algos import kl_penalty
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

ANCHOR_COLUMN = "anchor_coef"
"""(B, T) coefficient of each token's KL to the reference policy; absent in runs without an anchor."""


def anchor_coefficients(
    role_ids: torch.Tensor, generated_mask: torch.Tensor, per_role: Mapping[int, float]
) -> torch.Tensor:
    """The anchor column (B, T) float32 of a batch, from the coefficient by role id.

    ``generated_mask`` is 1 on tokens that the policy generated, whether trained on or not; 0 in void games.
    """
    coefficients = torch.zeros(role_ids.shape, dtype=torch.float32)
    for role, coefficient in per_role.items():
        coefficients += coefficient * ((role_ids == role) & (generated_mask > 0))
    return coefficients


def selfplay_loss(
    config: Any, model_output: Any, data: Any, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """verl's ``ppo_loss`` plus ``anchor_kl_loss``: ``sum(coef * KL(policy || reference)) / trained tokens``.

    The anchor is normalised as verl's token-mean policy loss is, so a coefficient weighs a token of
    an untrained role like one of a trained role. KL per token is estimated as
    ``actor.kl_loss_type`` says. A mini-batch that trains on no token, because all of its games are
    void, costs 0 where verl's own loss would divide by the number of its tokens.
    """
    if not data["batch_num_tokens"]:
        return 0.0 * no_padding_2_padding(model_output["log_probs"], data).sum(), {}
    loss, metrics = ppo_loss(config, model_output, data, dp_group)
    if ANCHOR_COLUMN not in data:
        return loss, metrics
    columns = data.select(ANCHOR_COLUMN, "ref_log_prob").to_padded_tensor()
    log_prob = no_padding_2_padding(model_output["log_probs"], data)
    kl = kl_penalty(logprob=log_prob, ref_logprob=columns["ref_log_prob"], kl_penalty=config.kl_loss_type)
    anchor = (columns[ANCHOR_COLUMN] * kl).sum() / data["batch_num_tokens"] * data["dp_size"]
    metrics["anchor_kl_loss"] = Metric(value=anchor, aggregation=AggregationType.SUM)
    return loss + anchor, metrics
