"""Sums over time and statistics over games that the estimators share.

A *signal* is what a role's tokens are credited with: (B, 1) if all tokens of a game get the same,
else (B, T), known by its :class:`Moments`. Statistics are over tokens, summed in float64 over rows, so
that neither the length nor the number of games costs precision.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from medserl_agentloop.training.advantages.batch import RoleTokens, Window
from medserl_agentloop.training.credit import Normalization

VARIANCE_FLOOR = 1e-8
RESOLUTION = 1e-6
"""Signals that differ by less than this share of their mean are equal as far as float32 can tell."""

BLOCK = 64


class Moments:
    """Mean and spread, per row, of a signal that differs from token to token.

    They are taken while a window is in the cache, so that the signal of a role is never stored as such.

    Attributes:
        means: (B, 1) float64: each row's mean over the role's tokens.
        squares: (B, 1) float64: the sum of squared distances from it.
    """

    def __init__(self, tokens: RoleTokens) -> None:
        self._counts = tokens.counts
        self.means = torch.zeros_like(tokens.counts)
        self.squares = torch.zeros_like(tokens.counts)

    def take_up(self, window: Window, weights: torch.Tensor, signal: torch.Tensor) -> None:
        """Add a window, in which ``signal`` is 0 outside the role's tokens; it is overwritten."""
        rows, _ = window
        means = signal.sum(1, keepdim=True) / self._counts[rows].clamp_min(1).float()
        self.means[rows] = means
        distances = torch.linalg.vector_norm(signal.addcmul_(weights, means, value=-1), dim=1, keepdim=True)
        self.squares[rows] = distances.double().square()


def game_returns(tokens: RoleTokens) -> torch.Tensor | None:
    """(B, 1) float64: what all the role's tokens of a row return, or None if they differ within rows.

    They agree where nothing is discounted and each role is rewarded on its last token only.
    """
    if tokens.batch.gamma != 1.0:
        return None
    returns = torch.zeros_like(tokens.counts)
    for window, weights in tokens.blocks():
        rewards = tokens.rewards(window, weights)
        returns[window[0]] = rewards.sum(1, keepdim=True)
        positions = torch.arange(rewards.shape[1], dtype=torch.float32, device=rewards.device)
        last = (weights * positions).amax(1, keepdim=True).long()
        if torch.linalg.vector_norm(rewards.scatter_(1, last, 0.0)):
            return None
    return returns


def returns_to_go(tokens: RoleTokens, window: Window, weights: torch.Tensor) -> torch.Tensor:
    """Discounted sum of the role's rewards at and after each of its tokens in a window, 0 elsewhere.

    The tokens need not be adjacent: what lies between them neither adds a reward nor discounts one.
    """
    rewards = tokens.rewards(window, weights)
    if tokens.batch.gamma == 1.0:  # what is left of the row's sum: turning the row round costs more than summing it
        before = rewards.cumsum(1)
        total = before[:, -1:].clone()
        return rewards.add_(torch.sub(total, before, out=before)).mul_(weights)
    turns = Turns(weights)
    return turns.spread_out(discounted_suffix_sums(turns.close_up(rewards), tokens.batch.gamma))


class Turns:
    """Brings the role's tokens of a window side by side, so that a recurrence runs from one to the next.

    Rows in which they are neighbours already, as in every two-turn game, stay where they are.

    Args:
        weights: (rows, columns) 1 on the role's tokens, 0 elsewhere.
    """

    def __init__(self, weights: torch.Tensor) -> None:
        self._weights = weights
        counts = weights.sum(1)
        neighbours = (weights[:, 1:] * weights[:, :-1]).sum(1)
        self._together = bool((counts - neighbours <= 1).all())
        if not self._together:
            self._slots = torch.arange(int(counts.max()), device=weights.device) < counts[:, None]

    def close_up(self, values: torch.Tensor) -> torch.Tensor:
        """``values``, 0 outside the role's tokens, with neighbouring tokens of the role side by side."""
        if self._together:
            return values
        closed = values.new_zeros(self._slots.shape)
        return closed.masked_scatter_(self._slots, values[self._weights.bool()])

    def spread_out(self, values: torch.Tensor) -> torch.Tensor:
        """The reverse of :meth:`close_up`, whatever ``values`` has outside the role's tokens."""
        if self._together:
            return values * self._weights
        return torch.zeros_like(self._weights).masked_scatter_(self._weights.bool(), values[self._slots])


def discounted_suffix_sums(values: torch.Tensor, discount: float) -> torch.Tensor:
    """``y[t] = values[t] + discount * y[t + 1]`` along the second of two axes.

    Within blocks of ``BLOCK`` steps this is one matrix product; the sums at the starts of the blocks
    obey the same recurrence with ``discount ** BLOCK`` and come in first, at the end of the block before.
    No power of the discount beyond a block's length is ever divided by, so long rows do not underflow.
    """
    rows, length = values.shape
    blocks = pad(values, (0, -length % BLOCK)).view(rows, -(-length // BLOCK), BLOCK)
    steps = torch.arange(BLOCK, dtype=torch.float64, device=values.device)
    powers = (discount ** (steps[:, None] - steps)).tril().to(values.dtype)  # (later, earlier)
    if blocks.shape[1] > 1:
        starts = discounted_suffix_sums(blocks @ powers[:, 0], discount**BLOCK)
        blocks[:, :-1, -1].add_(starts[:, 1:], alpha=discount)
    return (blocks @ powers).flatten(1)[:, :length]


def standardization(
    signal: torch.Tensor | Moments, tokens: RoleTokens, how: Normalization
) -> tuple[torch.Tensor, torch.Tensor]:
    """What to take off each row's signal and what to multiply it by then: (B, 1) float64 both.

    The mean of the role's tokens and, but for ``mean``, one over their standard deviation; the factor is
    exactly 0 where signals are all equal. ``none`` and ``group`` are the estimator's affair: 0 and 1.
    """
    if how in ("none", "group"):
        return torch.zeros_like(tokens.counts), torch.ones_like(tokens.counts)
    if how == "category":
        parts = tokens.numbered(tokens.batch.categories)
    else:
        parts = torch.zeros_like(tokens.present, dtype=torch.int64)
    size = part_sums(tokens.counts, parts).clamp_min_(1)
    means = signal.means if isinstance(signal, Moments) else signal
    mean = part_sums(means * tokens.counts, parts) / size
    squares = (means - mean).square() * tokens.counts
    if isinstance(signal, Moments):
        squares += signal.squares
    variance = part_sums(squares, parts) / size
    differ = variance > (RESOLUTION * mean).square()
    scale = variance.clamp_min(VARIANCE_FLOOR).rsqrt() if how != "mean" else torch.ones_like(variance)
    return mean, scale * differ


def part_sums(per_row: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """For each row the sum (B, 1) of ``per_row`` (B, 1) over the rows of the same part."""
    sums = per_row.new_zeros(len(parts), 1).index_add_(0, parts, per_row)
    return sums[parts]
