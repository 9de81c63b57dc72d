"""What an estimator gets and gives: the batch, the state it carries between batches, the advantages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from medserl_agentloop.game.types import Role

BLOCK_TOKENS = 2**18
"""Tokens of a block of rows: 1 MiB in float32."""

Window = tuple[slice, slice]
"""Rows and columns of a batch."""


@dataclass(frozen=True)
class RoleBatch:
    """All games of one training step.

    The trainer builds it from the whole batch before verl splits that over its workers, so that the
    number of workers changes no statistic.

    Attributes:
        rewards: (B, T) finite rewards on role tokens: each role's reward on its last token and, with
            KL in the reward, a penalty on every token. What stands on other tokens is ignored.
        mask: (B, T) 1 on the tokens that are trained on. Void games and rows that verl added as
            padding are all 0.
        role_ids: (B, T) :attr:`Role.id` of each token, 0 where there is none.
        groups: The prompt group of each of the B rows.
        categories: The category of each row's game.
        values: (B, T) the critic's values, for estimators that need one.
        gamma: Discount per token of the role.
        lam: Lambda of GAE.
    """

    rewards: torch.Tensor
    mask: torch.Tensor
    role_ids: torch.Tensor
    groups: Sequence[str]
    categories: Sequence[str]
    values: torch.Tensor | None = None
    gamma: float = 1.0
    lam: float = 1.0

    def __post_init__(self) -> None:
        shape = self.rewards.shape
        if len(shape) != 2:
            raise ValueError(f"rewards have shape {tuple(shape)}; expected (rows, tokens)")
        for name in ("mask", "role_ids", "values"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, rewards have {tuple(shape)}")
        for name in ("groups", "categories"):
            if len(getattr(self, name)) != shape[0]:
                raise ValueError(f"{len(getattr(self, name))} {name} for {shape[0]} rows")

    def roles(self) -> Iterator[RoleTokens]:
        """The roles that have trained tokens in this batch, each with its tokens."""
        # Bytes, because comparing in place on them is many times faster than on the columns' int64.
        trained = self.role_ids.to(torch.uint8).mul_(self.mask.to(torch.uint8))
        for role in Role:
            tokens = RoleTokens(role, self, trained)
            if tokens.present.any():
                yield tokens


@dataclass(frozen=True)
class RoleTokens:
    """The trained tokens of one role. Whatever the other role has or earns is out of sight here.

    Attributes:
        trained: (B, T) uint8 role ids, 0 on tokens that are not trained on.
    """

    role: Role
    batch: RoleBatch
    trained: torch.Tensor

    def blocks(self) -> Iterator[tuple[Window, torch.Tensor]]:
        """Windows of the batch that hold the role's tokens, each with its weights.

        Work on (B, T) goes window by window: it skips the columns in which the role never speaks,
        what it needs in between stays in the cache, and no pages are asked of the system for it,
        which costs more than the arithmetic.

        Yields:
            A slice of rows and one of columns, and the weights in there: float32, 1 on the role's
            tokens, 0 elsewhere.
        """
        for window in self._windows_and_counts[0]:
            yield window, self._weights(window)

    def rewards(self, window: Window, weights: torch.Tensor) -> torch.Tensor:
        """A window's rewards on the role's tokens, 0 elsewhere, float32."""
        return self.batch.rewards[window].float() * weights

    @property
    def counts(self) -> torch.Tensor:
        """(B, 1) float64: how many tokens each row has."""
        return self._windows_and_counts[1]

    @cached_property
    def present(self) -> torch.Tensor:
        """(B,) bool: the rows that have any."""
        return self.counts[:, 0] > 0

    @cached_property
    def game_rewards(self) -> torch.Tensor:
        """(B, 1) float64: the role's rewards summed over each row."""
        sums = torch.zeros_like(self.counts)
        for window, weights in self.blocks():
            sums[window[0]] = self.rewards(window, weights).sum(1, keepdim=True)
        return sums

    @cached_property
    def _windows_and_counts(self) -> tuple[list[Window], torch.Tensor]:
        total, width = self.trained.shape
        height = max(1, BLOCK_TOKENS // max(1, width))
        windows: list[Window] = []
        counts = self.trained.new_zeros(total, 1, dtype=torch.float64)
        for start in range(0, total, height):
            rows = slice(start, start + height)
            columns = self.trained[rows].clone().eq_(self.role.id).amax(0).nonzero()
            if len(columns):
                windows.append((rows, slice(int(columns[0]), int(columns[-1]) + 1)))
                counts[rows] = self._weights(windows[-1]).sum(1, keepdim=True)
        return windows, counts

    def _weights(self, window: Window) -> torch.Tensor:
        return self.trained[window].clone().eq_(self.role.id).float()

    def numbered(self, *keys: Sequence[str]) -> torch.Tensor:
        """(B,) int64: rows that agree in all of ``keys`` get the same number, counted from 0."""
        numbers: dict[tuple[str, ...], int] = {}
        rows = [numbers.setdefault(key, len(numbers)) for key in zip(*keys, strict=True)]
        return torch.tensor(rows, dtype=torch.int64, device=self.trained.device)


@dataclass
class BaselineState:
    """Running mean reward per role and category, for ``role_rae``; saved in the checkpoint.

    Attributes:
        values: Baseline by (role, category); one that is missing is 0.
    """

    values: dict[tuple[Role, str], float] = field(default_factory=dict)

    def read(self, role: Role, category: str) -> float:
        """The baseline of ``role`` in games of ``category``."""
        return self.values.get((role, category), 0.0)

    def to_dict(self) -> dict[str, dict[str, float]]:
        """The baselines as JSON can hold them: by role, then by category."""
        nested: dict[str, dict[str, float]] = {}
        for (role, category), value in self.values.items():
            nested.setdefault(role.value, {})[category] = value
        return nested

    def load_dict(self, nested: Mapping[str, Mapping[str, float]]) -> None:
        """Take up what :meth:`to_dict` wrote.

        Raises:
            ValueError: It names a role that the game does not have.
        """
        self.values = {(Role(role), category): float(v) for role, per in nested.items() for category, v in per.items()}


@dataclass
class Advantages:
    """What an estimator gives; 0 outside the trained tokens.

    Attributes:
        advantages: (B, T) float32, normalised and weighted by role.
        returns: (B, T) float32, what a critic is fitted to; in estimators that compare whole games
            the advantages again, as in verl.
        metrics: Numbers under ``selfplay/<role>/``.
    """

    advantages: torch.Tensor
    returns: torch.Tensor
    metrics: dict[str, float] = field(default_factory=dict)
