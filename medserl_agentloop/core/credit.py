"""Credit of a step: from the rewards in verl's columns to each role's advantages and returns.

The trainer calls it in place of verl's ``_compute_advantage``; the estimators are in
:mod:`core.advantages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.trainer.ppo.ray_trainer import apply_kl_penalty
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.workers.utils.padding import response_to_nested

from medserl_agentloop.core.advantages import ROLE_ESTIMATORS, Baselines, RoleBatch
from medserl_agentloop.core.columns import context_ids, read_columns, stacked, write_columns
from medserl_agentloop.core.config import SelfPlayConfig

_READ = (
    *("uid", "kind", "response_mask", "role_ids", "context_lengths", "rm_scores"),
    *("rollout_log_probs", "old_log_probs", "ref_log_prob", "values", "entropy"),
)
_WRITTEN = (
    "advantages",
    "returns",
    "response_mask",
    "loss_mask",
    "token_level_rewards",
    "rollout_is_weights",
)


class RoleCredit:
    """Assigns credit within each role; ``baselines``, which estimators keep between steps, go into
    checkpoints.
    """

    def __init__(self, algorithm: Any, selfplay: SelfPlayConfig, roles: Sequence[str]) -> None:
        self._algorithm, self._selfplay, self._roles = algorithm, selfplay, roles
        self.baselines: Baselines = {}

    def assign(
        self, batch: KVBatchMeta, repeated_roles: Sequence[str], kl_controller: Any
    ) -> tuple[KVBatchMeta, dict[str, float]]:
        """A batch with its advantages written, and the metrics; ``kl_controller`` is for
        ``use_kl_in_reward``.
        """
        columns = read_columns(batch, *_READ)
        rows = {
            name: np.array(columns.pop(name).tolist(), dtype=object) for name in ("uid", "kind")
        }
        role_rows, context_lengths = (
            columns.pop(name).unbind() for name in ("role_ids", "context_lengths")
        )
        context_rows = [
            context_ids(own, len(row)) for own, row in zip(context_lengths, role_rows, strict=True)
        ]
        lengths = columns["response_mask"]
        data = DataProto(batch=columns.to_padded_tensor(), non_tensor_batch=rows)
        for name, numbers in (("role_ids", role_rows), ("contexts", context_rows)):
            data.batch[name] = stacked(numbers, data.batch["response_mask"])
        data, metrics = self.credited(data, repeated_roles, kl_controller)
        nested = {
            name: response_to_nested(data.batch[name], lengths)
            for name in _WRITTEN
            if name in data.batch
        }
        return write_columns(batch, nested), metrics

    def credited(
        self, data: DataProto, repeated_roles: Sequence[str], kl_controller: Any = None
    ) -> tuple[DataProto, dict[str, float]]:
        """As ``assign``, on (B, T) columns of verl's, ``role_ids`` and ``contexts``, and rows'
        ``uid`` and ``kind``.

        Narrows ``response_mask`` and ``loss_mask`` to the roles that are trained: verl weights its
        loss by the latter, so other roles leave the token counts as well.
        """
        algorithm, selfplay, metrics = self._algorithm, self._selfplay, dict[str, float]()
        for number, role in enumerate(self._roles, start=1):
            if not selfplay.trains(role):
                data.batch["response_mask"] *= data.batch["role_ids"] != number

        data.batch["token_level_scores"] = data.batch["token_level_rewards"] = data.batch[
            "rm_scores"
        ]
        if algorithm.use_kl_in_reward:
            data, kl_metrics = apply_kl_penalty(
                data, kl_ctrl=kl_controller, kl_penalty=algorithm.kl_penalty
            )
            metrics |= kl_metrics

        correction = algorithm.get("rollout_correction", None)
        corrects = correction is not None and not correction.get("bypass_mode", False)
        known = {"rollout_log_probs", "old_log_probs"} <= set(data.batch.keys())
        # verl's correction refuses a batch without a trained token, e.g. one whose games are all
        # void.
        if corrects and known and data.batch["response_mask"].any():
            data, correction_metrics = compute_rollout_correction_and_add_to_batch(data, correction)
            metrics |= correction_metrics

        batch = data.batch
        mask, role_ids = batch["response_mask"], batch["role_ids"]
        games = RoleBatch(
            rewards=batch["token_level_rewards"],
            mask=mask,
            role_ids=role_ids,
            roles=self._roles,
            groups=data.non_tensor_batch["uid"].tolist(),
            kinds=data.non_tensor_batch["kind"].tolist(),
            conversations=batch["contexts"],
            repeated_roles=repeated_roles,
            values=batch.get("values", None),
            gamma=algorithm.gamma,
            lam=algorithm.lam,
        )
        settings = selfplay.credit
        if selfplay.adapters == "per_role":  # its optimizer has the weights
            settings = settings.model_copy(update={"role_weights": {}})
        credit = ROLE_ESTIMATORS[algorithm.adv_estimator](games, settings, self.baselines)
        batch["advantages"], batch["returns"], batch["loss_mask"] = (
            credit.advantages,
            credit.returns,
            mask,
        )
        per_token: dict[str, torch.Tensor] = {"advantage": batch["advantages"]}
        if (
            "entropy" in batch
        ):  # verl leaves it out where it takes the rollout's log-probs as they are
            per_token["entropy"] = batch["entropy"]
        per_role = selfplay.credit.loss == "per_role"
        return data, metrics | credit.metrics | role_token_metrics(
            per_token, mask, role_ids, self._roles, per_role
        )


def role_token_metrics(
    columns: Mapping[str, torch.Tensor],
    response_mask: torch.Tensor,
    role_ids: torch.Tensor,
    roles: Sequence[str],
    per_role: bool = True,
) -> dict[str, float]:
    """Mean and spread of (B, T) columns over a role's trained tokens, their number, and their share
    of the signal.

    The signal is the mean of a role's absolute advantages, or their sum where its loss is not taken
    ``per_role``.
    """
    metrics: dict[str, float] = {}
    tokens = [(role_ids == number) & (response_mask > 0) for number in range(1, len(roles) + 1)]
    sizes = [columns["advantage"][own].abs() for own in tokens]
    signals = [(size.mean() if per_role and len(size) else size.sum()).item() for size in sizes]
    for role, own, signal in zip(roles, tokens, signals, strict=True):
        metrics[f"selfplay/{role}/trained_tokens"] = float(own.sum())
        if any(signals):
            metrics[f"selfplay/{role}/signal_share"] = signal / sum(signals)
        for name, column in columns.items() if own.any() else ():
            metrics[f"selfplay/{role}/{name}_mean"] = column[own].mean().item()
            metrics[f"selfplay/{role}/{name}_std"] = column[own].std(unbiased=False).item()
    return metrics
