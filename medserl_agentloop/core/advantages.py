"""Role-separated advantage estimators: each role is credited as if it were alone in the batch.

verl's own estimators let rewards cross the border between opposed roles: REINFORCE++ and GAE carry a later reward
back over masked tokens, GRPO and RLOO sum all rewards of a row. Here returns, baselines and normalisation stay
within a role. Called by the trainer; registered with verl so that ``algorithm.adv_estimator`` knows the names.

In the formulas, of one role: ``i`` is a game, ``t`` one of the role's own tokens in it, counted without
what lies between them; ``r`` is a token's reward, ``R_i`` the sum of them, ``V`` the critic's value.
After the role's last token of a game there is nothing: rewards and values are 0 there. All estimators
then normalise (``selfplay.credit.normalize``), last comes the factor ``selfplay.credit.role_weights``.
A role without tokens in a batch gets no advantage, no metric and no update of state.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_adv_est

from medserl_agentloop.core.credit import CreditSettings, Normalization

VARIANCE_FLOOR = 1e-8
RESOLUTION = 1e-6
"""Signals that differ by less than this share of their mean are equal as far as float32 can tell."""

GROUP_STD_EPSILON = 1e-6
"""Added to a group's standard deviation, as in verl."""


@dataclass(frozen=True)
class RoleBatch:
    """All games of one training step.

    The trainer builds it from the whole batch before verl splits that over its workers, so that the
    number of workers changes no statistic.

    Attributes:
        rewards: (B, T) finite rewards on role tokens: each turn's reward on its last token and, with
            KL in the reward, a penalty on every token. What stands on other tokens is ignored.
        mask: (B, T) 1 on the tokens that are trained on. Void games and rows that verl added as
            padding are all 0.
        role_ids: (B, T) the number of each token's role in ``roles``, from 1; 0 where there is none.
        roles: Names of the roles.
        groups: The prompt group of each of the B rows.
        kinds: The kind of each row's game.
        conversations: (B, T) which conversation of its row each token belongs to; None where no role has two.
        values: (B, T) the critic's values, for estimators that need one.
        gamma: Discount per token of the role.
        lam: Lambda of GAE.
    """

    rewards: torch.Tensor
    mask: torch.Tensor
    role_ids: torch.Tensor
    roles: Sequence[str]
    groups: Sequence[str]
    kinds: Sequence[str]
    conversations: torch.Tensor | None = None
    values: torch.Tensor | None = None
    gamma: float = 1.0
    lam: float = 1.0

    def __post_init__(self) -> None:
        shape = self.rewards.shape
        if len(shape) != 2:
            raise ValueError(f"rewards have shape {tuple(shape)}; expected (rows, tokens)")
        for name in ("mask", "role_ids", "values", "conversations"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, rewards have {tuple(shape)}")
        for name in ("groups", "kinds"):
            if len(getattr(self, name)) != shape[0]:
                raise ValueError(f"{len(getattr(self, name))} {name} for {shape[0]} rows")

    def of_roles(self) -> Iterator[RoleTokens]:
        """The roles that have trained tokens in this batch, each with its tokens."""
        for number, role in enumerate(self.roles, start=1):
            tokens = (self.role_ids == number) & (self.mask > 0)
            if tokens.any():
                yield RoleTokens(role, self, *self._by_conversation(tokens))

    def _by_conversation(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A role's tokens (B, T) as one row per conversation (C, T), and the row of the batch that each is of."""
        if self.conversations is None:
            parts = [tokens]
        else:
            parts = [tokens & (self.conversations == number) for number in torch.unique(self.conversations[tokens])]
        rows = [part.any(1).nonzero()[:, 0] for part in parts]
        return torch.cat([part[row] for part, row in zip(parts, rows, strict=True)]), torch.cat(rows)


@dataclass(frozen=True)
class RoleTokens:
    """The trained tokens of one role, side by side. Whatever another role has or earns is out of sight here.

    Returns and statistics are per conversation: C of them, most often one for each game. In *packed* form a column is
    (C, N) float64, N being the most tokens of a conversation: the role's tokens stand at the left, in their order, and
    behind them is 0.

    Attributes:
        where: (C, T) bool: the tokens of each conversation.
        rows: (C,) int64: the row of the batch that holds it.
    """

    role: str
    batch: RoleBatch
    where: torch.Tensor
    rows: torch.Tensor

    @cached_property
    def groups(self) -> list[str]:
        """Of each conversation, its game's prompt group."""
        return [self.batch.groups[row] for row in self.rows.tolist()]

    @cached_property
    def kinds(self) -> list[str]:
        """Of each conversation, its game's kind."""
        return [self.batch.kinds[row] for row in self.rows.tolist()]

    @cached_property
    def counts(self) -> torch.Tensor:
        """(C, 1) float64: how many tokens each conversation has."""
        return self.where.sum(1, keepdim=True).double()

    @cached_property
    def filled(self) -> torch.Tensor:
        """(C, N) bool: the places of a packed column that hold a token."""
        return torch.arange(int(self.counts.max()), device=self.where.device) < self.counts

    @cached_property
    def rewards(self) -> torch.Tensor:
        """Packed rewards."""
        return self.packed(self.batch.rewards)

    @cached_property
    def game_rewards(self) -> torch.Tensor:
        """(C, 1) float64: each conversation's rewards, summed."""
        return self.rewards.sum(1, keepdim=True)

    def packed(self, column: torch.Tensor) -> torch.Tensor:
        """(B, T) -> packed."""
        packed = torch.zeros(self.filled.shape, dtype=torch.float64, device=column.device)
        packed.view(-1)[self._to] = column.flatten()[self._from].double()
        return packed

    def write(self, packed: torch.Tensor, column: torch.Tensor) -> None:
        """Put a packed column, or one value per conversation (C, 1), where the tokens stand in ``column`` (B, T)."""
        column.view(-1)[self._from] = packed.expand(self.filled.shape).flatten()[self._to].to(column.dtype)

    @cached_property
    def _from(self) -> torch.Tensor:
        conversation, token = self.where.nonzero().unbind(1)
        return self.rows[conversation] * self.where.shape[1] + token

    @cached_property
    def _to(self) -> torch.Tensor:
        return self.filled.flatten().nonzero()[:, 0]

    def numbered(self, *keys: Sequence[str]) -> torch.Tensor:
        """(C,) int64: conversations that agree in all of ``keys`` get the same number, counted from 0."""
        numbers: dict[tuple[str, ...], int] = {}
        found = [numbers.setdefault(key, len(numbers)) for key in zip(*keys, strict=True)]
        return torch.tensor(found, dtype=torch.int64, device=self.where.device)

    def metric(self, name: str) -> str:
        """``name`` as the metric of this role."""
        return f"selfplay/{self.role}/{name}"


@dataclass
class BaselineState:
    """Running mean reward per role and kind, for ``role_rae``; saved in the checkpoint.

    Attributes:
        values: Baseline by (role, kind); one that is missing is 0.
        roles: The game's roles; states of others are refused. Empty for any.
    """

    values: dict[tuple[str, str], float] = field(default_factory=dict)
    roles: Sequence[str] = ()

    def read(self, role: str, kind: str) -> float:
        """The baseline of ``role`` in games of ``kind``."""
        return self.values.get((role, kind), 0.0)

    def to_dict(self) -> dict[str, dict[str, float]]:
        """The baselines as JSON can hold them: by role, then by kind."""
        nested: dict[str, dict[str, float]] = {}
        for (role, kind), value in self.values.items():
            nested.setdefault(role, {})[kind] = value
        return nested

    def load_dict(self, nested: Mapping[str, Mapping[str, float]]) -> None:
        """Take up what :meth:`to_dict` wrote.

        Raises:
            ValueError: It names a role that the game does not have.
        """
        if unknown := [role for role in nested if self.roles and role not in self.roles]:
            raise ValueError(f"{unknown[0]!r} is no role of this game")
        self.values = {(role, kind): float(v) for role, per in nested.items() for kind, v in per.items()}


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


RoleEstimator = Callable[[RoleBatch, CreditSettings, BaselineState], Advantages]
ROLE_ESTIMATORS: dict[str, RoleEstimator] = {}


@dataclass(frozen=True)
class _Task:
    """What an estimator is given for one role: how to normalise, its settings and state, and a place for metrics."""

    how: Normalization
    settings: CreditSettings
    baselines: BaselineState
    metrics: dict[str, float]


_Credit = tuple[torch.Tensor, "torch.Tensor | None"]
"""A role's normalised advantages, packed or (C, 1), and its packed returns; None if these are the advantages."""


def _role_estimator(credit: Callable[[RoleTokens, _Task], _Credit]) -> RoleEstimator:
    """Make an estimator of whole batches of one that credits a single role, and register it."""
    name = credit.__name__

    def estimator(batch: RoleBatch, settings: CreditSettings, baselines: BaselineState) -> Advantages:
        zeros = torch.zeros_like(batch.rewards, dtype=torch.float32)
        result = Advantages(zeros, zeros.clone())
        for tokens in batch.of_roles():
            task = _Task(settings.normalization(name, tokens.role), settings, baselines, result.metrics)
            advantages, returns = credit(tokens, task)
            weighted = advantages * settings.weight(tokens.role)
            tokens.write(weighted, result.advantages)
            tokens.write(weighted if returns is None else returns, result.returns)
        return result

    def from_verl(*_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise ValueError(
            f"algorithm.adv_estimator={name} needs to know each token's role, which verl's own trainer "
            "does not pass on. Set trainer.v1.trainer_mode=selfplay_sync."
        )

    ROLE_ESTIMATORS[name] = estimator
    register_adv_est(name)(from_verl)
    estimator.__doc__ = credit.__doc__
    return estimator


@_role_estimator
def role_reinforce_pp(tokens: RoleTokens, task: _Task) -> _Credit:
    """REINFORCE++ within each role (arXiv 2501.03262; per role as in Self-RedTeam, arXiv 2506.07468).

    ``G_it = sum over u >= t of gamma^(u - t) r_iu`` and ``A_it = (G_it - mean) / std``, mean and biased
    std over all tokens of the role in the batch; the variance is floored at ``VARIANCE_FLOOR``.

    State: none. Normalisation: ``batch`` is the paper's; ``kind`` takes mean and std per kind,
    ``mean`` takes off the mean only, ``none`` is REINFORCE without a baseline.

    Example: two games in which the role wrote 2 tokens for a reward of 1 and 1 token for 3. Its
    tokens return 1, 1, 3: mean 5/3, variance 8/9, so A = -0.707107, -0.707107, 1.414214.
    """
    returns = _discounted_sums(tokens.rewards, tokens.batch.gamma)
    return _normalized(returns, tokens, task.how), returns


@_role_estimator
def role_grpo(tokens: RoleTokens, task: _Task) -> _Credit:
    """GRPO within each role (arXiv 2402.03300): a prompt's games are compared role by role.

    ``A_it = (R_i - mean) / (std + 1e-6)``, mean and unbiased std over the games of the same prompt
    group and kind in which the role has tokens. A group with one such game, or with equal rewards,
    carries no signal and gets exactly 0. ``gamma`` has no part in it.

    State: none. Normalisation: ``group`` is the paper's; ``mean`` does not divide (Dr. GRPO, arXiv
    2503.20783); ``batch`` and ``kind`` take off the group's mean and then whiten over the role's
    tokens of the batch or kind (REINFORCE++-baseline, arXiv 2501.03262).

    Metrics: ``no_signal_groups`` is the share of groups without signal, ``small_groups`` of those with
    one game, ``constant_groups`` of larger ones whose rewards are equal.

    Example: the role earns 1 and 3 in a group: mean 2, std 1.414214, so A = -0.707106 and 0.707106.
    """
    centred, size, variance = _within_groups(tokens, task.metrics)
    if task.how == "mean":
        return centred, None
    if task.how == "group":
        unbiased = variance * size / (size - 1).clamp_min(1)
        return centred / (unbiased.sqrt() + GROUP_STD_EPSILON), None
    return _normalized(centred, tokens, task.how), None


@_role_estimator
def role_rloo(tokens: RoleTokens, task: _Task) -> _Credit:
    """REINFORCE leave-one-out within each role (arXiv 2402.14740).

    ``A_it = R_i - mean of R_j over j != i``, over the games of the same prompt group and kind in
    which the role has tokens. A game that is alone in its group has nothing to be compared with and
    gets exactly 0 (verl's own leaves its bare reward). ``gamma`` has no part in it.

    State: none. Normalisation: ``none`` is the paper's; ``batch`` and ``kind`` whiten over the role's
    tokens of the batch or kind. Metrics: as of ``role_grpo``.

    Example: the role earns 1, 2 and 6 in a group: A = 1 - 4 = -3, 2 - 3.5 = -1.5, 6 - 1.5 = 4.5.
    """
    centred, size, _ = _within_groups(tokens, task.metrics)
    return _normalized(centred * size / (size - 1).clamp_min(1), tokens, task.how), None


@_role_estimator
def role_rae(tokens: RoleTokens, task: _Task) -> _Credit:
    """Role-conditioned advantage estimation of SPIRAL (arXiv 2506.24119), a kind being what the paper calls a game.

    ``A_it = R_i - b[role, kind of i]`` and ``b <- decay * b + (1 - decay) * R_i`` for every game,
    ``decay`` being ``selfplay.credit.rae_decay``. ``gamma`` has no part in it.

    State: ``b``, starting at 0. It is read before it is updated, as in the authors' code: a baseline
    that has seen the reward it is taken off from would be biased. Here all games of a batch read it as
    it stood before the batch, and the ``n`` updates of a kind are made at once, by their mean over
    all orders of the games: ``b <- decay^n b + (1 - decay^n) * mean of R_i``. So the order of rows
    changes nothing, and a game counts as much as in the paper, whatever the size of the batch.

    Normalisation: ``none`` is the paper's; ``batch`` whitens over the role's tokens of the batch, ``mean``
    takes off their mean. Metrics: ``baseline/<kind>``, as read.

    Example: b = 0.5 and decay = 0.9; two games of the kind earn the role 1 and 0: A = 0.5 and
    -0.5, then b = 0.81 * 0.5 + 0.19 * 0.5 = 0.5. The next single game earns 1: A = 0.5, b = 0.55.
    """
    kinds, decay = tokens.kinds, task.settings.rae_decay
    read = {kind: task.baselines.read(tokens.role, kind) for kind in kinds}
    rewards = tokens.game_rewards
    baseline = rewards.new_tensor([read[kind] for kind in kinds])[:, None]

    earned: dict[str, list[float]] = defaultdict(list)
    for kind, reward, count in zip(kinds, rewards[:, 0].tolist(), tokens.counts[:, 0].tolist(), strict=True):
        if count:
            earned[kind].append(reward)
    for kind, games in earned.items():
        # Added to the old value, so that a baseline that equals all rewards stays where it is.
        step = (1 - decay ** len(games)) * (math.fsum(games) / len(games) - read[kind])
        task.baselines.values[tokens.role, kind] = read[kind] + step
        task.metrics[tokens.metric(f"baseline/{kind}")] = read[kind]
    return _normalized(rewards - baseline, tokens, task.how), None


@_role_estimator
def role_gae(tokens: RoleTokens, task: _Task) -> _Credit:
    """Generalised advantage estimation (arXiv 1506.02438) that ends at the role's border.

    ``delta_t = r_t + gamma V_(t+1) - V_t`` and ``A_t = delta_t + gamma lambda A_(t+1)`` over the role's
    own tokens; both are 0 after the last, so neither a reward nor a value of the other role comes in.
    Returns, which the critic is fitted to, are ``A_t + V_t`` before normalisation.

    State: none. Normalisation: ``batch`` (whitened over the role's tokens, as verl's over all),
    ``kind``, ``mean`` or ``none``.

    Example: gamma = 1, lambda = 0.5; a role's two tokens have values 0.5 and 1 and earn 0 and 2.
    delta = 0.5, 1; A = 1, 1; returns = 1.5, 2. The only tokens of the role, equal advantages: A = 0, 0
    after normalisation.

    Raises:
        ValueError: The batch has no values.
    """
    batch = tokens.batch
    if batch.values is None:
        raise ValueError("role_gae needs the values of a critic: set critic.enable=True")
    values = tokens.packed(batch.values)
    delta = tokens.rewards - values
    delta[:, :-1] += batch.gamma * values[:, 1:]
    advantages = _discounted_sums(delta, batch.gamma * batch.lam)
    return _normalized(advantages, tokens, task.how), advantages + values


def _discounted_sums(packed: torch.Tensor, discount: float) -> torch.Tensor:
    """``y[t] = packed[t] + discount * y[t + 1]`` along the second of two axes."""
    sums = packed.t().contiguous()  # a step's column side by side
    for t in range(len(sums) - 2, -1, -1):
        sums[t] += discount * sums[t + 1]
    return sums.t()


def _within_groups(tokens: RoleTokens, metrics: dict[str, float]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards of games less their group's mean, the group's size and biased variance: (C, 1) each.

    Games without tokens of the role belong to no group's statistics.
    """
    groups = tokens.numbered(tokens.groups, tokens.kinds)
    rewards, present = tokens.game_rewards, (tokens.counts > 0).double()
    size = _part_sums(present, groups)
    centred = (rewards - _part_sums(rewards, groups) / size.clamp_min(1)) * present
    variance = _part_sums(centred.square(), groups) / size.clamp_min(1)

    share = present / size.clamp_min(1)  # so that a group's games sum to 1
    count = share.sum()
    small, constant = share[size == 1].sum() / count, share[(size > 1) & (variance == 0)].sum() / count
    metrics[tokens.metric("small_groups")] = small.item()
    metrics[tokens.metric("constant_groups")] = constant.item()
    metrics[tokens.metric("no_signal_groups")] = (small + constant).item()
    return centred, size, variance


def _normalized(signal: torch.Tensor, tokens: RoleTokens, how: Normalization) -> torch.Tensor:
    """A role's signal, packed or (C, 1), less its mean over the role's tokens and, but for ``mean``, divided by
    their standard deviation; ``none`` leaves it as it is. Signals that are all equal become exactly 0."""
    if how == "none":
        return signal
    by_category = tokens.numbered(tokens.kinds)
    parts = by_category if how == "kind" else torch.zeros_like(by_category)
    size = _part_sums(tokens.counts, parts).clamp_min(1)
    mean = _part_sums((signal * tokens.filled).sum(1, keepdim=True), parts) / size
    centred = (signal - mean) * tokens.filled
    variance = _part_sums(centred.square().sum(1, keepdim=True), parts) / size
    centred = centred * (variance > (RESOLUTION * mean).square())
    return centred if how == "mean" else centred * variance.clamp_min(VARIANCE_FLOOR).rsqrt()


def _part_sums(per_game: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """For each game the sum (C, 1) of ``per_game`` (C, 1) over the games of the same part."""
    sums = per_game.new_zeros(len(parts), 1).index_add_(0, parts, per_game)
    return sums[parts]
