"""Turns rewards into advantages: each role gets credit as if it were alone in the batch.

verl's own estimators let rewards cross the border between opposed roles: REINFORCE++ and GAE carry
a later reward back over masked tokens, GRPO and RLOO sum all rewards of a row. Here returns,
baselines and normalization stay within a role. The trainer calls :class:`RoleCredit`, below the
estimators; they are registered with verl so that ``algorithm.adv_estimator`` knows the names.

In the formulas for one role, ``i`` is a conversation, ``t`` one of the role's own tokens in it,
``r`` a token's reward, ``R_i`` their sum, ``V`` the critic's value; after the role's last token
both are 0. All estimators then normalize (``selfplay.credit.normalize``) and weight
(``selfplay.credit.role_weights``). Group estimators compare games of the same prompt group and
kind; a single game (verl's own keep its raw reward) and equal rewards get exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.trainer.ppo.core_algos import register_adv_est
from verl.trainer.ppo.ray_trainer import apply_kl_penalty
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.workers.utils.padding import response_to_nested

from medserl_agentloop.core.columns import context_ids, read_columns, stacked, write_columns
from medserl_agentloop.core.config import CreditSettings, Normalization, SelfPlayConfig
from medserl_agentloop.core.metrics import role_token_metrics

VARIANCE_FLOOR = 1e-8
RESOLUTION = 1e-6  # smallest difference of signals that float32 can tell, as a share of their mean
RAE_DECAY = 0.95  # what is left of a role's baseline after one more game
GROUP_STD_EPSILON = 1e-6  # added to a group's standard deviation, as in verl


@dataclass(frozen=True)
class RoleBatch:
    """All games of one training step, before verl splits them over its workers. Columns are (B, T).

    Each turn's reward is on its last token; with KL in the reward, every token has a penalty.
    Conversations of ``repeated_roles`` all answer the same prompt in a game, so they form a group
    smaller than the prompt group.
    """

    rewards: torch.Tensor  # finite on role tokens; values on others are ignored
    mask: torch.Tensor  # 1 on trained tokens; void games and verl's padding rows are all 0
    role_ids: torch.Tensor  # number of each token's role in ``roles``, from 1; 0: none
    roles: Sequence[str]
    groups: Sequence[str]  # the prompt group of each of the B rows
    kinds: Sequence[str]  # of their games
    conversations: torch.Tensor | None = None  # each token's, by row; None if no role has two
    repeated_roles: Collection[str] = ()
    values: torch.Tensor | None = None  # the critic's, for estimators that need one
    gamma: float = 1.0  # discount per token of the role
    lam: float = 1.0  # GAE's lambda


class _RoleTokens:
    """One role's ``n`` trained tokens in ``C`` conversations, as an estimator sees them.

    ``where`` (B, T) marks them in the batch, conversation by conversation; ``lengths``, ``earned``
    (C,), ``groups`` and ``kinds`` are per conversation, ``rewards`` (n,) per token. ``metrics``
    gets the estimator's numbers.
    """

    def __init__(
        self, batch: RoleBatch, where: torch.Tensor, role: str, how: Normalization
    ) -> None:
        self.batch, self.where, self.role, self.how = batch, where, role, how
        number = batch.conversations
        number = torch.zeros_like(batch.role_ids) if number is None else number
        owners = torch.stack([where.nonzero()[:, 0], number[where]])  # (2, n)
        keys, lengths = torch.unique_consecutive(owners, dim=1, return_counts=True)
        self.lengths: list[int] = lengths.tolist()
        self.rewards = batch.rewards[where].double()
        of_conversations = torch.split(self.rewards, self.lengths)
        self.earned = torch.stack([rewards.sum() for rewards in of_conversations])
        games = keys[0].tolist()
        self.groups = [batch.groups[game] for game in games]
        # In the certificate's batch every game has one: its claim is about whole prompt groups.
        if role in batch.repeated_roles and len(set(games)) < len(games):
            self.groups = [f"{batch.groups[game]}/{game}" for game in games]
        self.kinds = [batch.kinds[game] for game in games]
        self.metrics: dict[str, float] = {}

    def per_token(self, of_conversations: torch.Tensor) -> torch.Tensor:
        """(C,) -> (n,)."""
        return of_conversations.repeat_interleave(torch.tensor(self.lengths))

    def grouped_by(self, *keys: Sequence[str]) -> list[list[int]]:
        """Numbers of the conversations with equal ``keys``, a list per combination of values."""
        members: dict[tuple[str, ...], list[int]] = {}
        for number, key in enumerate(zip(*keys, strict=True)):
            members.setdefault(key, []).append(number)
        return list(members.values())

    def groups_with_signal(self) -> list[list[int]]:
        """The conversations of each prompt group and kind whose rewards differ."""
        groups = self.grouped_by(self.groups, self.kinds)
        return [group for group in groups if self.earned[group].min() < self.earned[group].max()]

    def discounted_sums(self, signal: torch.Tensor, discount: float) -> torch.Tensor:
        """``y[t] = signal[t] + discount * y[t + 1]`` within each conversation; (n,) -> (n,)."""
        # (longest, C), 0 after each conversation's end
        sums = pad_sequence(list(torch.split(signal, self.lengths)))
        for t in range(len(sums) - 2, -1, -1):
            sums[t] += discount * sums[t + 1]
        return torch.cat([own[:length] for own, length in zip(sums.t(), self.lengths, strict=True)])

    def normalized(self, signal: torch.Tensor) -> torch.Tensor:
        """A signal (n,) minus its mean over the role's tokens, divided by their standard deviation
        except for ``mean``; ``kind`` does so kind by kind. Equal signals become exactly 0.
        """
        if self.how == "none":
            return signal
        result = torch.zeros_like(signal)
        every = torch.arange(len(self.lengths))
        for part in self.grouped_by(self.kinds) if self.how == "kind" else [every.tolist()]:
            own = self.per_token(torch.isin(every, torch.tensor(part)))
            variance, mean = torch.var_mean(signal[own], correction=0)
            if variance > (RESOLUTION * mean).square():
                std = 1.0 if self.how == "mean" else variance.clamp_min(VARIANCE_FLOOR).sqrt()
                result[own] = (signal[own] - mean) / std
        return result


Baselines = dict[str, dict[str, float]]
"""Running mean reward of each role and kind, for ``role_rae``; 0 if missing."""


@dataclass
class Advantages:
    """An estimator's float32 columns (B, T), 0 on other tokens; a critic learns ``returns``."""

    advantages: torch.Tensor
    returns: torch.Tensor
    metrics: dict[str, float] = field(default_factory=dict)


RoleEstimator = Callable[[RoleBatch, CreditSettings, Baselines], Advantages]
ROLE_ESTIMATORS: dict[str, RoleEstimator] = {}

_Credit = tuple[torch.Tensor, "torch.Tensor | None"]
"""A role's normalized advantages and its returns, (n,) each; None: the same."""


def _role_estimator(
    credit: Callable[[_RoleTokens, CreditSettings, Baselines], _Credit],
) -> RoleEstimator:
    """Register a single-role estimator as an estimator of whole batches."""
    name = credit.__name__

    def estimator(batch: RoleBatch, settings: CreditSettings, baselines: Baselines) -> Advantages:
        zeros = torch.zeros_like(batch.rewards, dtype=torch.float32)
        result = Advantages(zeros, zeros.clone())
        for number, role in enumerate(batch.roles, start=1):
            where = (batch.role_ids == number) & (batch.mask > 0)
            if not where.any():
                continue
            tokens = _RoleTokens(batch, where, role, settings.normalization(name, role))
            advantages, returns = credit(tokens, settings, baselines)
            weighted = advantages * settings.role_weights.get(role, 1.0)
            result.advantages[where] = weighted.float()
            result.returns[where] = (weighted if returns is None else returns).float()
            result.metrics |= {
                f"selfplay/{role}/{metric}": value for metric, value in tokens.metrics.items()
            }
        return result

    ROLE_ESTIMATORS[name] = estimator
    register_adv_est(name)(_without_roles)
    estimator.__doc__ = credit.__doc__
    return estimator


def _without_roles(*_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    raise ValueError(
        "a role_ estimator needs each token's role, which verl's own trainer does not pass on. Set "
        "trainer.v1.trainer_mode=selfplay_sync."
    )


@_role_estimator
def role_reinforce_pp(
    tokens: _RoleTokens, settings: CreditSettings, baselines: Baselines
) -> _Credit:
    """REINFORCE++ within each role (arXiv 2501.03262; per role as in Self-RedTeam, arXiv
    2506.07468).

    ``G_it = sum over u >= t of gamma^(u - t) r_iu`` and ``A_it = (G_it - mean) / std``, mean and
    biased std over all tokens of the role in the batch; the variance is floored at
    ``VARIANCE_FLOOR``.

    Normalization: ``batch`` is the paper's; ``none`` is REINFORCE without a baseline.

    Example: two games in which the role wrote 2 tokens for a reward of 1 and 1 token for 3. Its
    tokens return 1, 1, 3: mean 5/3, variance 8/9, so A = -0.707107, -0.707107, 1.414214.
    """
    returns = tokens.discounted_sums(tokens.rewards, tokens.batch.gamma)
    return tokens.normalized(returns), returns


@_role_estimator
def role_grpo(tokens: _RoleTokens, settings: CreditSettings, baselines: Baselines) -> _Credit:
    """GRPO within each role (arXiv 2402.03300): a prompt's games are compared role by role.

    ``A_it = (R_i - mean) / (std + 1e-6)``, mean and unbiased std over the group. ``gamma`` is not
    used.

    Normalization: ``group`` is the paper's; ``mean`` does not divide (Dr. GRPO, arXiv 2503.20783);
    ``batch`` and ``kind`` also whiten (REINFORCE++-baseline, arXiv 2501.03262).

    Example: the role earns 1 and 3 in a group: mean 2, std 1.414214, so A = -0.707106 and 0.707106.
    """
    advantages = torch.zeros_like(tokens.earned)
    for group in tokens.groups_with_signal():
        earned = tokens.earned[group]
        advantages[group] = earned - earned.mean()
        if tokens.how == "group":
            advantages[group] /= earned.std() + GROUP_STD_EPSILON
    signal = tokens.per_token(advantages)
    return signal if tokens.how in ("group", "mean") else tokens.normalized(signal), None


@_role_estimator
def role_rloo(tokens: _RoleTokens, settings: CreditSettings, baselines: Baselines) -> _Credit:
    """REINFORCE leave-one-out within each role (arXiv 2402.14740).

    ``A_it = R_i - mean of R_j over j != i`` of the group. ``gamma`` is not used.

    Example: the role earns 1, 2 and 6 in a group: A = 1 - 4 = -3, 2 - 3.5 = -1.5, 6 - 1.5 = 4.5.
    """
    advantages = torch.zeros_like(tokens.earned)
    for group in tokens.groups_with_signal():
        earned = tokens.earned[group]
        advantages[group] = earned - (earned.sum() - earned) / (len(group) - 1)
    return tokens.normalized(tokens.per_token(advantages)), None


@_role_estimator
def role_rae(tokens: _RoleTokens, settings: CreditSettings, baselines: Baselines) -> _Credit:
    """Role-conditioned advantage estimation of SPIRAL (arXiv 2506.24119); a kind is what the paper
    calls a game.

    ``A_it = R_i - b[role, kind of i]`` and ``b <- decay * b + (1 - decay) * R_i`` for every game,
    ``decay`` being :data:`RAE_DECAY`. ``gamma`` is not used.

    ``b`` starts at 0. All games of a batch use its value from before the batch: a baseline that
    includes the current reward would be biased. The ``n`` updates of a kind are applied at once,
    averaged over all orders of the games: ``b <- decay^n b + (1 - decay^n) * mean of R_i``. So the
    order of rows does not matter.

    Example: b = 0.5 and decay = 0.9; two games of the kind earn the role 1 and 0: A = 0.5 and
    -0.5, then b = 0.81 * 0.5 + 0.19 * 0.5 = 0.5. The next single game earns 1: A = 0.5, b = 0.55.
    """
    known = baselines.setdefault(tokens.role, {})
    advantages = torch.zeros_like(tokens.earned)
    for games in tokens.grouped_by(tokens.kinds):
        kind, earned = tokens.kinds[games[0]], tokens.earned[games]
        baseline = known.get(kind, 0.0)
        advantages[games] = earned - baseline
        # Added to the old value, so that a baseline that equals all rewards stays where it is.
        mean = math.fsum(earned.tolist()) / len(games)
        known[kind] = baseline + (1 - RAE_DECAY ** len(games)) * (mean - baseline)
        tokens.metrics[f"baseline/{kind}"] = baseline
    return tokens.normalized(tokens.per_token(advantages)), None


@_role_estimator
def role_gae(tokens: _RoleTokens, settings: CreditSettings, baselines: Baselines) -> _Credit:
    """Generalized advantage estimation (arXiv 1506.02438) within one role's tokens.

    ``delta_t = r_t + gamma V_(t+1) - V_t`` and ``A_t = delta_t + gamma lambda A_(t+1)`` over the
    role's own tokens; both are 0 after the last one, so no reward or value of the other role
    enters. Returns, the critic's targets, are ``A_t + V_t`` before normalization.

    Example: gamma = 1, lambda = 0.5; a role's two tokens have values 0.5 and 1 and earn 0 and 2.
    delta = 0.5, 1; A = 1, 1; returns = 1.5, 2. Equal advantages become 0, 0 after normalization.
    """
    batch = tokens.batch
    if batch.values is None:
        raise ValueError("role_gae needs the values of a critic: set critic.enable=True")
    values = batch.values[tokens.where].double()
    following = values.roll(-1)
    following[torch.tensor(tokens.lengths).cumsum(0) - 1] = 0.0
    delta = tokens.rewards + batch.gamma * following - values
    advantages = tokens.discounted_sums(delta, batch.gamma * batch.lam)
    return tokens.normalized(advantages), advantages + values


# -- a training step -------------------------------------------------------------------------------

_READ = (
    *("uid", "kind", "response_mask", "role_ids", "context_lengths", "rm_scores"),
    *("rollout_log_probs", "old_log_probs", "ref_log_prob", "values", "entropy"),
)
_WRITTEN = (
    *("advantages", "returns", "response_mask", "loss_mask"),
    *("token_level_rewards", "rollout_is_weights"),
)


class RoleCredit:
    """Assigns credit within each role; ``baselines``, kept between steps, go into checkpoints."""

    def __init__(self, algorithm: Any, selfplay: SelfPlayConfig, roles: Sequence[str]) -> None:
        self._algorithm, self._selfplay, self._roles = algorithm, selfplay, roles
        self.baselines: Baselines = {}

    def assign(
        self, batch: KVBatchMeta, repeated_roles: Sequence[str], kl_controller: Any
    ) -> tuple[KVBatchMeta, dict[str, float]]:
        """Write a batch's advantages and return metrics; ``kl_controller`` is verl's."""
        columns = read_columns(batch, *_READ)
        names = {name: columns.pop(name).tolist() for name in ("uid", "kind")}
        rows = {name: np.array(values, dtype=object) for name, values in names.items()}
        role_ids, lengths = (columns.pop(of).unbind() for of in ("role_ids", "context_lengths"))
        contexts = [context_ids(c, len(r)) for c, r in zip(lengths, role_ids, strict=True)]
        nested_mask = columns["response_mask"]
        data = DataProto(batch=columns.to_padded_tensor(), non_tensor_batch=rows)
        mask = data.batch["response_mask"]
        data.batch["role_ids"], data.batch["contexts"] = (
            stacked(of, mask) for of in (role_ids, contexts)
        )
        data, metrics = self.credit(data, repeated_roles, kl_controller)
        found = {name: data.batch[name] for name in _WRITTEN if name in data.batch}
        written = {name: response_to_nested(of, nested_mask) for name, of in found.items()}
        return write_columns(batch, written), metrics

    def credit(
        self, data: DataProto, repeated_roles: Sequence[str], kl_controller: Any = None
    ) -> tuple[DataProto, dict[str, float]]:
        """Do as ``assign``, given verl's (B, T) columns, ``role_ids``, ``contexts`` and row names.

        Narrows ``response_mask`` and ``loss_mask`` to the trained roles: verl weights its loss by
        the latter, so other roles also leave the token counts.
        """
        algorithm, selfplay = self._algorithm, self._selfplay
        metrics: dict[str, float] = {}
        for number, role in enumerate(self._roles, start=1):
            if not selfplay.trains(role):
                data.batch["response_mask"] *= data.batch["role_ids"] != number

        rewards = data.batch["rm_scores"]
        data.batch["token_level_scores"] = data.batch["token_level_rewards"] = rewards
        if algorithm.use_kl_in_reward:
            data, metrics = apply_kl_penalty(data, kl_controller, algorithm.kl_penalty)

        correction = algorithm.get("rollout_correction", None)
        corrects = correction is not None and not correction.get("bypass_mode", False)
        known = {"rollout_log_probs", "old_log_probs"} <= set(data.batch.keys())
        # verl's correction refuses a batch without a trained token, e.g. one of void games.
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
        batch["advantages"], batch["returns"] = credit.advantages, credit.returns
        batch["loss_mask"] = mask
        per_token = {"advantage": credit.advantages}
        if "entropy" in batch:  # not if verl uses the rollout's log-probs
            per_token["entropy"] = batch["entropy"]
        per_role = selfplay.credit.loss == "per_role"
        of_roles = role_token_metrics(per_token, mask, role_ids, self._roles, per_role)
        return data, metrics | credit.metrics | of_roles
