"""What holds for every estimator on any batch: the formulas, spelt out game by game, and the invariances."""

import math
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training.advantage_batches import (
    ASSESSOR,
    ATTACKER,
    FORMS,
    TENSORS,
    estimate,
    random_batch,
    starting_state,
    take,
    with_forms,
)

from medserl_agentloop.core.advantages import Baselines, RoleBatch
from medserl_agentloop.games.medical.types import Role

forms = pytest.mark.parametrize(("name", "how"), FORMS)
batches = st.builds(
    random_batch,
    seed=st.integers(0, 10_000),
    rows=st.integers(0, 14),
    dense=st.booleans(),
    scattered=st.booleans(),
    gamma=st.sampled_from([1.0, 1.0, 0.9]),
    lam=st.sampled_from([1.0, 0.95, 0.0]),
)
any_batch = given(batch=batches)


class Reference:
    """The estimators in float64 and one game at a time, as slow as the formulas read."""

    def __init__(self, batch: RoleBatch, role: Role, state: Baselines) -> None:
        self.batch, self.role, self.state = batch, role, state
        self.own: dict[int, list[int]] = defaultdict(list)
        for row, token in ((batch.role_ids == role.id) & (batch.mask > 0)).nonzero().tolist():
            self.own[row].append(token)
        self.rewards = {row: [float(batch.rewards[row, t]) for t in own] for row, own in self.own.items()}
        self.total = {row: sum(rewards) for row, rewards in self.rewards.items()}

    def group(self, row: int) -> list[int]:
        groups = list(zip(self.batch.groups, self.batch.kinds, strict=True))
        return [other for other in self.own if groups[other] == groups[row]]

    def peers(self, row: int) -> list[float]:
        return [self.total[other] for other in self.group(row)]

    def role_reinforce_pp(self, row: int, how: str) -> list[float]:
        rewards = self.rewards[row]
        return [sum(self.batch.gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]

    def role_grpo(self, row: int, how: str) -> list[float]:
        peers = self.peers(row)
        advantage = self.total[row] - float(np.mean(peers))
        if how == "group":
            advantage = advantage / (float(np.std(peers, ddof=1)) + 1e-6) if len(peers) > 1 else 0.0
        return [advantage] * len(self.own[row])

    def role_rloo(self, row: int, how: str) -> list[float]:
        peers = self.peers(row)
        others = (sum(peers) - self.total[row]) / (len(peers) - 1) if len(peers) > 1 else self.total[row]
        return [self.total[row] - others] * len(self.own[row])

    def role_opo(self, row: int, how: str) -> list[float]:
        weights = [len(self.own[other]) for other in self.group(row)]
        baseline = float(np.average(self.peers(row), weights=weights))
        return [self.total[row] - baseline] * len(self.own[row])

    def role_rae(self, row: int, how: str) -> list[float]:
        baseline = self.state.get(self.role, {}).get(self.batch.kinds[row], 0.0)
        return [self.total[row] - baseline] * len(self.own[row])

    def role_gae(self, row: int, how: str) -> list[float]:
        assert self.batch.values is not None
        values = [float(self.batch.values[row, t]) for t in self.own[row]]
        advantages: list[float] = []
        after = next_value = 0.0
        for reward, value in zip(reversed(self.rewards[row]), reversed(values), strict=True):
            after = reward + self.batch.gamma * next_value - value + self.batch.gamma * self.batch.lam * after
            next_value = value
            advantages.insert(0, after)
        return advantages

    def advantages(self, name: str, how: str) -> torch.Tensor:
        signals = {row: getattr(self, name)(row, how) for row in self.own}
        if how in ("batch", "kind", "mean") and (name, how) != ("role_grpo", "mean"):
            parts: dict[str, list[int]] = defaultdict(list)
            for row in signals:
                parts[self.batch.kinds[row] if how == "kind" else "batch"].append(row)
            for rows in parts.values():
                tokens = [s for row in rows for s in signals[row]]
                mean, variance = np.mean(tokens), np.var(tokens)
                std = 1.0 if how == "mean" else math.sqrt(max(variance, 1e-8))
                if variance <= (1e-6 * mean) ** 2:
                    std = math.inf
                for row in rows:
                    signals[row] = [float(s - mean) / std for s in signals[row]]
        out = torch.zeros(self.batch.mask.shape)
        for row, signal in signals.items():
            out[row, self.own[row]] = torch.tensor(signal)
        return out


def flat(state: Baselines) -> dict[tuple[str, str], float]:
    return {(role, kind): value for role, kinds in state.items() for kind, value in kinds.items()}


@forms
@any_batch
def test_the_estimator_is_its_formula(name: str, how: str, batch: RoleBatch) -> None:
    credited = estimate(name, batch, with_forms(how))
    expected = sum(Reference(batch, role, starting_state()).advantages(name, how) for role in Role)
    assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(credited.advantages, expected, atol=2e-5, rtol=2e-5)
    plain = sum(Reference(batch, role, starting_state()).advantages(name, "none") for role in Role)
    returns = {"role_reinforce_pp": plain, "role_gae": plain + batch.values * batch.mask}.get(name, expected)
    torch.testing.assert_close(credited.returns, returns, atol=2e-5, rtol=2e-5)


@forms
@given(
    batch=batches,
    changed=st.sampled_from([ATTACKER, ASSESSOR]),
    deltas=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=5),
)
def test_nothing_one_role_earns_changes_a_bit_of_the_others_advantages(
    name: str, how: str, batch: RoleBatch, changed: int, deltas: list[float]
) -> None:
    """One delta is a constant added to all its rewards; several perturb each of them differently."""
    noise = torch.tensor(deltas).repeat(batch.mask.numel())[: batch.mask.numel()].view(batch.mask.shape)
    perturbed = replace(batch, rewards=batch.rewards + noise * (batch.role_ids == changed))
    before, after = estimate(name, batch, with_forms(how)), estimate(name, perturbed, with_forms(how))
    other = batch.role_ids != changed
    assert torch.equal(before.advantages[other], after.advantages[other])
    assert torch.equal(before.returns[other], after.returns[other])
    role = next(role for role in Role if role.id not in (0, changed))
    own = {k: v for k, v in before.metrics.items() if f"/{role.value}/" in k}
    assert own == {k: v for k, v in after.metrics.items() if f"/{role.value}/" in k}


@forms
@given(batch=batches, data=st.data())
def test_the_order_of_rows_is_irrelevant(name: str, how: str, batch: RoleBatch, data: Any) -> None:
    order = data.draw(st.permutations(range(len(batch.groups))))
    here, there = starting_state(), starting_state()
    straight = estimate(name, batch, with_forms(how), here)
    permuted = estimate(name, take(batch, order), with_forms(how), there)
    torch.testing.assert_close(straight.advantages[order], permuted.advantages, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(straight.returns[order], permuted.returns, atol=1e-5, rtol=1e-5)
    assert straight.metrics == pytest.approx(permuted.metrics)
    assert flat(here) == pytest.approx(flat(there), abs=1e-12)


@forms
@given(batch=batches, left=st.integers(0, 3), right=st.integers(0, 70))
def test_padding_is_invisible(name: str, how: str, batch: RoleBatch, left: int, right: int) -> None:
    """More columns on either side, and rows as verl adds them: copies of others with a mask of zeros."""
    columns = {t: torch.nn.functional.pad(getattr(batch, t), (left, right)) for t in TENSORS}
    rows = list(range(len(batch.groups)))
    padded = take(replace(batch, **columns), rows + rows[:3])
    padded.mask[len(rows) :] = 0
    here, there = starting_state(), starting_state()
    plain, credited = estimate(name, batch, with_forms(how), here), estimate(name, padded, with_forms(how), there)
    inside = credited.advantages[: len(rows), left : left + batch.mask.shape[1]]
    torch.testing.assert_close(inside, plain.advantages, atol=1e-5, rtol=1e-5)
    assert credited.advantages.count_nonzero() == inside.count_nonzero()
    assert credited.metrics == pytest.approx(plain.metrics)
    assert flat(here) == pytest.approx(flat(there), abs=1e-6)
