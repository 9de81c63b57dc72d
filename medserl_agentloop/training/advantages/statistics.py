"""Sums over time and statistics over games that the estimators share.

A *signal* is what a role's tokens are credited with: (B, 1) if all tokens of a game get the same,
else (B, T) and then 0 outside the role's tokens. Statistics are over tokens, summed in float64 over
rows, so that neither the length nor the number of games costs precision.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from medserl_agentloop.training.advantages.batch import RoleTokens
from medserl_agentloop.training.credit import Normalization

VARIANCE_FLOOR = 1e-8
RESOLUTION = 1e-6
"""Signals that differ by less than this share of their mean are equal as far as float32 can tell."""

BLOCK = 64


def returns_to_go(tokens: RoleTokens) -> torch.Tensor:
    """Discounted sum of the role's rewards at and after each of its tokens, as a signal.

    The tokens need not be adjacent: what lies between them neither adds a reward nor discounts one.
    """
    gamma = tokens.batch.gamma
    if gamma != 1.0:
        return tokens.spread_out(discounted_suffix_sums(tokens.close_up(tokens.rewards), gamma))
    if _on_last_token_only(tokens):
        return tokens.game_rewards[:, None]
    return tokens.rewards.flip(1).cumsum(1).flip(1).mul_(tokens.weights)


def discounted_suffix_sums(values: torch.Tensor, discount: float) -> torch.Tensor:
    """``y[t] = values[t] + discount * y[t + 1]`` along the second of two axes.

    Within blocks of ``BLOCK`` steps this is one matrix product; the sums at the starts of the blocks
    obey the same recurrence with ``discount ** BLOCK``. No power of the discount beyond a block's
    length is ever divided by, so long rows do not underflow.
    """
    rows, length = values.shape
    blocks = pad(values, (0, -length % BLOCK)).view(rows, -(-length // BLOCK), BLOCK)
    steps = torch.arange(BLOCK, dtype=torch.float64, device=values.device)
    powers = (discount ** (steps[:, None] - steps)).tril()  # (later, earlier)
    sums = blocks @ powers.to(values.dtype)
    if sums.shape[1] > 1:
        starts = discounted_suffix_sums(sums[:, :, 0], discount**BLOCK)
        sums[:, :-1].addcmul_(starts[:, 1:, None], (discount ** (BLOCK - steps)).to(values.dtype))
    return sums.flatten(1)[:, :length]


def normalize(signal: torch.Tensor, tokens: RoleTokens, how: Normalization) -> torch.Tensor:
    """The signal with the mean of the role's tokens taken off and, but for ``mean``, unit variance.

    Signals that are all equal become exactly 0. ``none`` and ``group`` are the estimator's affair.
    """
    if how in ("none", "group"):
        return signal
    if how == "category":
        parts = tokens.numbered(tokens.batch.categories)
    else:
        parts = torch.zeros_like(tokens.present, dtype=torch.int64)
    size = part_sums(tokens.counts, parts).clamp_min_(1)
    per_game = signal.shape[1] == 1
    mean = part_sums(signal * tokens.counts if per_game else signal.sum(1, True).double(), parts) / size
    if per_game:
        centred = signal - mean
        squares = centred.square() * tokens.counts
    else:
        centred = torch.addcmul(signal, tokens.weights, -mean.float())
        squares = torch.linalg.vector_norm(centred, dim=1, keepdim=True).double().square()
    variance = part_sums(squares, parts) / size
    differ = variance > (RESOLUTION * mean).square()
    scale = variance.clamp_min(VARIANCE_FLOOR).rsqrt() if how != "mean" else torch.ones_like(variance)
    return centred.mul_((scale * differ).to(centred.dtype))


def part_sums(per_row: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """For each row the sum (B, 1) of ``per_row`` (B, 1) over the rows of the same part."""
    sums = per_row.new_zeros(len(parts), 1).index_add_(0, parts, per_row)
    return sums[parts]


def _on_last_token_only(tokens: RoleTokens) -> bool:
    """Whether every game rewards the role on its last token and nowhere before."""
    rewards = tokens.rewards
    if not rewards.numel():
        return True
    positions = torch.arange(rewards.shape[1], dtype=torch.float32, device=rewards.device)
    last = (tokens.weights * positions).amax(1, keepdim=True).long()
    on_last = rewards.gather(1, last)
    rewards.scatter_(1, last, 0.0)  # in place and back again: a copy costs more than all the rest
    elsewhere = torch.linalg.vector_norm(rewards)
    rewards.scatter_(1, last, on_last)
    return not elsewhere
