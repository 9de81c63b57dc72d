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
    if gamma == 1.0 and all(_on_last_token_only(tokens.rewards(*block), block[1]) for block in tokens.blocks()):
        return tokens.game_rewards
    signal = torch.empty_like(tokens.batch.rewards, dtype=torch.float32)
    for part, weights in tokens.blocks():
        rewards = tokens.rewards(part, weights)
        if gamma == 1.0:
            sums = rewards.flip(1).cumsum(1).flip(1)
        else:
            turns = Turns(weights)
            sums = turns.spread_out(discounted_suffix_sums(turns.close_up(rewards), gamma))
        torch.mul(sums, weights, out=signal[part])
    return signal


class Turns:
    """Brings the role's tokens of a block side by side, so that a recurrence runs from one to the next.

    Rows in which they are neighbours already, as in every two-turn game, stay where they are.

    Args:
        weights: (rows, T) 1 on the role's tokens, 0 elsewhere.
    """

    def __init__(self, weights: torch.Tensor) -> None:
        self._weights = weights
        counts = weights.sum(1)
        neighbours = torch.linalg.vecdot(weights[:, 1:], weights[:, :-1])
        self._together = bool((counts - neighbours <= 1).all())
        if not self._together:
            self._slots = torch.arange(int(counts.max()), device=weights.device) < counts[:, None]

    def close_up(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` (rows, T) with neighbouring tokens of the role side by side, 0 where there are none."""
        if self._together:
            return values * self._weights
        closed = values.new_zeros(self._slots.shape)
        return closed.masked_scatter_(self._slots, values[self._weights.bool()])

    def spread_out(self, values: torch.Tensor) -> torch.Tensor:
        """The reverse of :meth:`close_up`; what it puts on other tokens means nothing."""
        if self._together:
            return values
        return torch.zeros_like(self._weights).masked_scatter_(self._weights.bool(), values[self._slots])


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

    A signal (B, T) is overwritten. Signals that are all equal become exactly 0. ``none`` and ``group``
    are the estimator's affair.
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
        centred = signal
        squares = torch.empty_like(tokens.counts)
        for part, weights in tokens.blocks():
            centred[part].addcmul_(weights, -mean[part].float())
            squares[part] = torch.linalg.vector_norm(centred[part], dim=1, keepdim=True).double().square()
    variance = part_sums(squares, parts) / size
    differ = variance > (RESOLUTION * mean).square()
    scale = variance.clamp_min(VARIANCE_FLOOR).rsqrt() if how != "mean" else torch.ones_like(variance)
    return centred.mul_((scale * differ).to(centred.dtype))


def part_sums(per_row: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """For each row the sum (B, 1) of ``per_row`` (B, 1) over the rows of the same part."""
    sums = per_row.new_zeros(len(parts), 1).index_add_(0, parts, per_row)
    return sums[parts]


def _on_last_token_only(rewards: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether every row of a block (rows, T) rewards the role on its last token and nowhere before."""
    if not rewards.numel():
        return True
    positions = torch.arange(rewards.shape[1], dtype=torch.float32, device=rewards.device)
    last = (weights * positions).amax(1, keepdim=True).long()
    return not torch.linalg.vector_norm(rewards.scatter_(1, last, 0.0))
