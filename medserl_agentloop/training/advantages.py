"""Role-separated advantage estimators.

verl's own estimators let rewards cross the border between opposed roles: REINFORCE++ and GAE carry
a later reward back over masked tokens, GRPO and RLOO sum all rewards of a row. Here returns,
baselines and normalisation stay within a role. Called by the trainer; registered with verl so that
``algorithm.adv_estimator`` knows the names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_adv_est

from medserl_agentloop.game.types import Role

VARIANCE_FLOOR = 1e-8

RoleEstimator = Callable[..., tuple[torch.Tensor, torch.Tensor]]
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
def role_reinforce_pp(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    role_ids: torch.Tensor,
    *,
    index: Sequence[Any] | None = None,
    gamma: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++ within each role (arXiv 2501.03262; per role as in Self-RedTeam, arXiv 2506.07468).

    Order: reward-to-go over the role's own tokens of the row, then for each role
    ``A = (G - mean) / std`` over all of that role's tokens in the batch. A role without tokens is
    left at 0; one whose returns are all equal gets advantages of 0, its variance being floored at
    ``VARIANCE_FLOOR``.

    Args:
        token_level_rewards: (B, T) rewards, on role tokens only.
        response_mask: (B, T) 1 on tokens that are trained on.
        role_ids: (B, T) role of each token.
        index: Unused; the whole batch is the baseline.
        gamma: Discount per token of the role.

    Returns:
        Advantages (B, T) and returns (B, T), 0 outside ``response_mask``.
    """
    advantages = torch.zeros_like(token_level_rewards)
    returns = torch.zeros_like(token_level_rewards)
    for role in Role:
        mask = (role_ids == role.id) & (response_mask > 0)
        if not mask.any():
            continue
        to_go = reward_to_go(token_level_rewards, mask, gamma)
        values = to_go[mask]
        centred = values - values.mean()
        std = centred.square().mean().clamp_min(VARIANCE_FLOOR).sqrt()
        returns[mask] = values
        advantages[mask] = centred / std
    return advantages, returns


@_role_estimator("role_grpo")
def role_grpo(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    role_ids: torch.Tensor,
    *,
    index: Sequence[Any] | None = None,
    gamma: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GRPO within each role (arXiv 2402.03300): a prompt's games are compared role by role.

    Order: a role's reward of a game is the sum of the rewards on its own tokens; within a prompt
    group, over the games in which the role has tokens, ``A = (R - mean) / std`` (unbiased std, plus
    1e-6, as verl's). A group with one such game or equal rewards carries no signal and gets 0.

    Args:
        token_level_rewards: (B, T) rewards, on role tokens only.
        response_mask: (B, T) 1 on tokens that are trained on.
        role_ids: (B, T) role of each token.
        index: (B,) the prompt group of each row; required.
        gamma: Unused; every token of the role gets the game's advantage.

    Returns:
        Advantages (B, T) and, as in verl, the same again as returns; 0 outside ``response_mask``.
    """
    if index is None:
        raise ValueError("role_grpo compares games of one prompt: it needs the index of prompt groups")
    names = {name: number for number, name in enumerate(dict.fromkeys(index))}
    groups = torch.tensor([names[name] for name in index], device=token_level_rewards.device)
    advantages = torch.zeros_like(token_level_rewards)
    for role in Role:
        mask = (role_ids == role.id) & (response_mask > 0)
        rows = mask.any(dim=1)
        rewards = (token_level_rewards * mask).sum(dim=1)[rows]
        per_game = _standardise_groups(rewards, groups[rows], len(names))
        advantages[rows] += per_game[:, None] * mask[rows]
    return advantages, advantages.clone()


def reward_to_go(rewards: torch.Tensor, mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """Discounted sum (B, T) of the rewards at and after each masked token, counting masked tokens only.

    The masked tokens of a row need not be adjacent: what lies between them neither adds a reward
    nor discounts one.
    """
    rewards = rewards * mask
    if gamma == 1.0:
        return rewards.flip(1).cumsum(dim=1).flip(1) * mask
    # A scan, because gamma to the power of a long response underflows.
    to_go = torch.zeros_like(rewards)
    later = torch.zeros_like(rewards[:, 0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        here = mask[:, t].to(rewards.dtype)
        later = here * (rewards[:, t] + gamma * later) + (1 - here) * later
        to_go[:, t] = later * here
    return to_go


def _standardise_groups(values: torch.Tensor, groups: torch.Tensor, count: int) -> torch.Tensor:
    """``(value - mean) / (std + 1e-6)`` within each group; 0 in groups of one."""
    ones = torch.ones_like(values)
    size = values.new_zeros(count).index_add(0, groups, ones)
    mean = values.new_zeros(count).index_add(0, groups, values) / size.clamp_min(1)
    centred = values - mean[groups]
    variance = values.new_zeros(count).index_add(0, groups, centred.square()) / (size - 1).clamp_min(1)
    return centred / (variance.sqrt()[groups] + 1e-6)
