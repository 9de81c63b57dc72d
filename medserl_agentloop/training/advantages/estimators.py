"""The five estimators. Each takes the whole batch and treats every role as if it were alone in it.

In the formulas, of one role: ``i`` is a game, ``t`` one of the role's own tokens in it, counted without
what lies between them; ``r`` is a token's reward, ``R_i`` the sum of them, ``V`` the critic's value.
After the role's last token of a game there is nothing: rewards and values are 0 there. All estimators
then normalise (``selfplay.credit.normalize``), last comes the factor ``selfplay.credit.role_weights``.
A role without tokens in a batch gets no advantage, no metric and no update of state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_adv_est

from medserl_agentloop.training.advantages.batch import Advantages, BaselineState, RoleBatch, RoleTokens
from medserl_agentloop.training.advantages.statistics import (
    Moments,
    Turns,
    discounted_suffix_sums,
    game_returns,
    part_sums,
    returns_to_go,
    standardization,
)
from medserl_agentloop.training.credit import CreditSettings, Normalization

GROUP_STD_EPSILON = 1e-6
"""Added to a group's standard deviation, as in verl."""

RoleEstimator = Callable[[RoleBatch, CreditSettings, BaselineState], Advantages]
ROLE_ESTIMATORS: dict[str, RoleEstimator] = {}


def _role_estimator(name: str) -> Callable[[RoleEstimator], RoleEstimator]:
    def decorator(estimator: RoleEstimator) -> RoleEstimator:
        def from_verl(*_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
            raise ValueError(
                f"algorithm.adv_estimator={name} needs to know each token's role, which verl's own trainer "
                "does not pass on. Set trainer.v1.trainer_mode=selfplay_sync."
            )

        ROLE_ESTIMATORS[name] = estimator
        register_adv_est(name)(from_verl)
        return estimator

    return decorator


@_role_estimator("role_reinforce_pp")
def role_reinforce_pp(batch: RoleBatch, settings: CreditSettings, baselines: BaselineState) -> Advantages:
    """REINFORCE++ within each role (arXiv 2501.03262; per role as in Self-RedTeam, arXiv 2506.07468).

    ``G_it = sum over u >= t of gamma^(u - t) r_iu`` and ``A_it = (G_it - mean) / std``, mean and biased
    std over all tokens of the role in the batch; the variance is floored at ``VARIANCE_FLOOR``.

    State: none. Normalisation: ``batch`` is the paper's; ``category`` takes mean and std per category,
    ``mean`` takes off the mean only, ``none`` is REINFORCE without a baseline.

    Example: two games in which the attacker wrote 2 tokens for a reward of 1 and 1 token for 3. Its
    tokens return 1, 1, 3: mean 5/3, variance 8/9, so A = -0.707107, -0.707107, 1.414214.
    """
    result = _empty(batch)
    result.returns = torch.zeros_like(result.advantages)
    for tokens in batch.roles():
        how = settings.normalization("role_reinforce_pp", tokens.role)
        signal = game_returns(tokens)
        if signal is not None:  # all tokens of a game get the same
            _credit(result, tokens, signal, how, settings)
            continue
        moments = Moments(tokens)
        for window, weights in tokens.blocks():
            returns = returns_to_go(tokens, window, weights)
            result.returns[window].add_(returns)
            moments.take_up(window, weights, returns)
        _credit_returns(result, tokens, moments, how, settings)
    return result


@_role_estimator("role_grpo")
def role_grpo(batch: RoleBatch, settings: CreditSettings, baselines: BaselineState) -> Advantages:
    """GRPO within each role (arXiv 2402.03300): a prompt's games are compared role by role.

    ``A_it = (R_i - mean) / (std + 1e-6)``, mean and unbiased std over the games of the same prompt
    group and category in which the role has tokens. A group with one such game, or with equal rewards,
    carries no signal and gets exactly 0. ``gamma`` has no part in it.

    State: none. Normalisation: ``group`` is the paper's; ``mean`` does not divide (Dr. GRPO, arXiv
    2503.20783); ``batch`` and ``category`` take off the group's mean and then whiten over the role's
    tokens of the batch or category (REINFORCE++-baseline, arXiv 2501.03262).

    Metrics: ``no_signal_groups`` is the share of groups without signal, ``small_groups`` of those with
    one game, ``constant_groups`` of larger ones whose rewards are equal.

    Example: a group's attackers earn 1 and 3: mean 2, std 1.414214, so A = -0.707106 and 0.707106.
    """
    result = _empty(batch)
    for tokens in batch.roles():
        how = settings.normalization("role_grpo", tokens.role)
        centred, size, variance = _within_groups(tokens, result.metrics)
        if how == "group":
            centred /= variance.sqrt() * (size / (size - 1).clamp_min(1)).sqrt() + GROUP_STD_EPSILON
        _credit(result, tokens, centred, "none" if how == "mean" else how, settings)
    return result


@_role_estimator("role_rloo")
def role_rloo(batch: RoleBatch, settings: CreditSettings, baselines: BaselineState) -> Advantages:
    """REINFORCE leave-one-out within each role (arXiv 2402.14740).

    ``A_it = R_i - mean of R_j over j != i``, over the games of the same prompt group and category in
    which the role has tokens. A game that is alone in its group has nothing to be compared with and
    gets exactly 0 (verl's own leaves its bare reward). ``gamma`` has no part in it.

    State: none. Normalisation: ``none`` is the paper's; ``batch`` and ``category`` whiten over the role's
    tokens of the batch or category. Metrics: as of ``role_grpo``.

    Example: a group's attackers earn 1, 2 and 6: A = 1 - 4 = -3, 2 - 3.5 = -1.5, 6 - 1.5 = 4.5.
    """
    result = _empty(batch)
    for tokens in batch.roles():
        centred, size, _ = _within_groups(tokens, result.metrics)
        centred *= size / (size - 1).clamp_min(1)
        _credit(result, tokens, centred, settings.normalization("role_rloo", tokens.role), settings)
    return result


@_role_estimator("role_rae")
def role_rae(batch: RoleBatch, settings: CreditSettings, baselines: BaselineState) -> Advantages:
    """Role-conditioned advantage estimation of SPIRAL (arXiv 2506.24119), the category being the game.

    ``A_it = R_i - b[role, category of i]`` and ``b <- decay * b + (1 - decay) * R_i`` for every game,
    ``decay`` being ``selfplay.credit.rae_decay``. ``gamma`` has no part in it.

    State: ``b``, starting at 0. It is read before it is updated, as in the authors' code: a baseline
    that has seen the reward it is taken off from would be biased. Here all games of a batch read it as
    it stood before the batch, and the ``n`` updates of a category are made at once, by their mean over
    all orders of the games: ``b <- decay^n b + (1 - decay^n) * mean of R_i``. So the order of rows
    changes nothing, and a game counts as much as in the paper, whatever the size of the batch.

    Normalisation: ``none`` is the paper's; ``batch`` whitens over the role's tokens of the batch, ``mean``
    takes off their mean. Metrics: ``baseline/<category>``, as read.

    Example: b = 0.5 and decay = 0.9; two games of the category earn the attacker 1 and 0: A = 0.5 and
    -0.5, then b = 0.81 * 0.5 + 0.19 * 0.5 = 0.5. The next single game earns 1: A = 0.5, b = 0.55.
    """
    result = _empty(batch)
    for tokens in batch.roles():
        read = {category: baselines.read(tokens.role, category) for category in batch.categories}
        rewards = tokens.game_rewards
        signal = rewards - rewards.new_tensor([read[category] for category in batch.categories])[:, None]
        _credit(result, tokens, signal, settings.normalization("role_rae", tokens.role), settings)

        played = tokens.present.tolist()
        earned: dict[str, list[float]] = {}
        for category, reward, present in zip(batch.categories, rewards[:, 0].tolist(), played, strict=True):
            if present:
                earned.setdefault(category, []).append(reward)
        for category, games in earned.items():
            kept = settings.rae_decay ** len(games)
            # Added to the old value, so that a baseline that equals all rewards stays where it is.
            step = (1 - kept) * (math.fsum(games) / len(games) - read[category])
            baselines.values[tokens.role, category] = read[category] + step
            result.metrics[f"{_prefix(tokens)}baseline/{category}"] = read[category]
    return result


@_role_estimator("role_gae")
def role_gae(batch: RoleBatch, settings: CreditSettings, baselines: BaselineState) -> Advantages:
    """Generalised advantage estimation (arXiv 1506.02438) that ends at the role's border.

    ``delta_t = r_t + gamma V_(t+1) - V_t`` and ``A_t = delta_t + gamma lambda A_(t+1)`` over the role's
    own tokens; both are 0 after the last, so neither a reward nor a value of the other role comes in.
    Returns, which the critic is fitted to, are ``A_t + V_t`` before normalisation.

    State: none. Normalisation: ``batch`` (whitened over the role's tokens, as verl's over all),
    ``category``, ``mean`` or ``none``.

    Example: gamma = 1, lambda = 0.5; an attacker's two tokens have values 0.5 and 1 and earn 0 and 2.
    delta = 0.5, 1; A = 1, 1; returns = 1.5, 2. The only tokens of the role, equal advantages: A = 0, 0
    after normalisation.

    Raises:
        ValueError: The batch has no values.
    """
    if batch.values is None:
        raise ValueError("role_gae needs the values of a critic: set critic.enable=True")
    gamma, lam = batch.gamma, batch.lam
    result = _empty(batch)
    result.returns = torch.zeros_like(result.advantages)
    for tokens in batch.roles():
        moments = Moments(tokens)
        for window, weights in tokens.blocks():
            values = batch.values[window].float() * weights
            if gamma == lam == 1.0:  # the values in between cancel
                returns = returns_to_go(tokens, window, weights)
                advantages = returns - values
            else:
                turns = Turns(weights)
                near = turns.close_up(values)
                delta = turns.close_up(tokens.rewards(window, weights)) - near
                delta[:, :-1].add_(near[:, 1:], alpha=gamma)
                advantages = turns.spread_out(discounted_suffix_sums(delta, gamma * lam))
                returns = values.add_(advantages)
            result.returns[window].add_(returns)
            moments.take_up(window, weights, advantages)
        _credit_returns(
            result, tokens, moments, settings.normalization("role_gae", tokens.role), settings, batch.values
        )
    return result


def _within_groups(tokens: RoleTokens, metrics: dict[str, float]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards of games less their group's mean, the group's size and biased variance: (B, 1) each.

    Rows without tokens of the role belong to no group's statistics.
    """
    groups = tokens.numbered(tokens.batch.groups, tokens.batch.categories)
    rewards, present = tokens.game_rewards, tokens.present[:, None].double()
    size = part_sums(present, groups)
    centred = (rewards - part_sums(rewards, groups) / size.clamp_min(1)) * present
    variance = part_sums(centred.square(), groups) / size.clamp_min(1)

    share = present / size.clamp_min(1)  # so that a group's rows sum to 1
    count = share.sum()
    small, constant = share[size == 1].sum() / count, share[(size > 1) & (variance == 0)].sum() / count
    metrics[_prefix(tokens) + "small_groups"] = small.item()
    metrics[_prefix(tokens) + "constant_groups"] = constant.item()
    metrics[_prefix(tokens) + "no_signal_groups"] = (small + constant).item()
    return centred, size, variance


def _prefix(tokens: RoleTokens) -> str:
    return f"selfplay/{tokens.role.value}/"


def _empty(batch: RoleBatch) -> Advantages:
    """Zeros; returns are the advantages, for estimators that compare whole games."""
    zeros = torch.zeros_like(batch.rewards, dtype=torch.float32)
    return Advantages(zeros, zeros)


def _credit(
    result: Advantages, tokens: RoleTokens, signal: torch.Tensor, how: Normalization, settings: CreditSettings
) -> None:
    """Write the signal of a role's games (B, 1) into the returns and, normalised and weighted, the advantages."""
    mean, scale = standardization(signal, tokens, how)
    credit = ((signal - mean) * scale * settings.weight(tokens.role)).float()
    signal = signal.float()
    for window, weights in tokens.blocks():
        rows, _ = window
        result.advantages[window].addcmul_(weights, credit[rows])
        if result.returns is not result.advantages:
            result.returns[window].addcmul_(weights, signal[rows])


def _credit_returns(
    result: Advantages,
    tokens: RoleTokens,
    moments: Moments,
    how: Normalization,
    settings: CreditSettings,
    values: torch.Tensor | None = None,
) -> None:
    """Write what a role's returns have over the critic's values, normalised and weighted, into the advantages.

    Args:
        moments: Of that difference.
    """
    mean, scale = standardization(moments, tokens, how)
    mean, scale = mean.float(), (scale * settings.weight(tokens.role)).float()
    for window, weights in tokens.blocks():
        rows, _ = window
        signal = result.returns[window] - mean[rows]
        if values is not None:
            signal -= values[window]
        result.advantages[window].addcmul_(weights, signal.mul_(scale[rows]))
