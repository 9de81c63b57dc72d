"""The estimators: their formulas spelt out game by game, their invariances, what they count, refuse
and leave at 0.
"""

import math
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medserl_agentloop.core.advantages import ROLE_ESTIMATORS, Advantages, Baselines, RoleBatch
from medserl_agentloop.core.config import NORMALIZATIONS, CreditSettings
from medserl_agentloop.games.medical.case import Role

ROLES = [role.value for role in Role]
ATTACKER, ASSESSOR = Role.ATTACKER.id, Role.ASSESSOR.id
CATEGORIES = ("vanilla_benign", "adversarial_benign", "adversarial_harmful")
TENSORS = ("rewards", "mask", "role_ids", "values")
FORMS = [(name, how) for name, allowed in NORMALIZATIONS.items() for how in allowed]


def random_batch(
    seed: int,
    rows: int = 12,
    *,
    dense: bool = False,
    scattered: bool = False,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> RoleBatch:
    """Random games: attacker turn, observation, assessor turn; some lack a turn, some are void.

    Rewards are multiples of 1/16: sums of them are exact, so that whitening finds either no spread
    or one that is far above rounding. ``dense`` puts a penalty on every token, as KL in the reward
    does; ``scattered`` has the roles' tokens lie all over the row, not in one turn each.
    """
    rng = np.random.default_rng(seed)
    width = 40
    role_ids = np.zeros((rows, width), dtype=np.int64)
    mask = np.zeros_like(role_ids)
    rewards = np.zeros((rows, width), dtype=np.float32)
    for row in range(rows):
        kind = rng.choice(["both", "both", "both", "no_assessor", "no_attacker", "void"])
        at = 0
        for role in (ATTACKER, ASSESSOR):
            if kind == ("no_attacker" if role == ATTACKER else "no_assessor"):
                continue
            n = int(rng.integers(1, 12))
            role_ids[row, at : at + n] = role
            at += n + int(rng.integers(1, 12))
        if scattered:
            rng.shuffle(role_ids[row])
        mask[row] = (role_ids[row] > 0) & (kind != "void")
        for role in (ATTACKER, ASSESSOR):
            own = ((role_ids[row] == role) & (mask[row] > 0)).nonzero()[0]
            if len(own):
                rewards[row, own[-1]] = rng.choice([-1.0, 0.125, 1.0]) + rng.choice([0.0, 0.375])
        if dense:
            rewards[row] -= rng.integers(1, 4, width) / 16 * mask[row]
    groups = [f"prompt-{row // 4}" for row in range(rows)]
    return RoleBatch(
        rewards=torch.tensor(rewards),
        mask=torch.tensor(mask),
        role_ids=torch.tensor(role_ids),
        groups=groups,
        roles=ROLES,
        kinds=[CATEGORIES[row // 4 % len(CATEGORIES)] for row in range(rows)],
        values=torch.tensor(rng.normal(size=(rows, width)), dtype=torch.float32),
        gamma=gamma,
        lam=lam,
    )


def written_batch(
    role_ids: list[list[int]], rewards: list[list[float]], **others: Any
) -> RoleBatch:
    """A batch of one prompt and category; every role token is trained on."""
    ids, paid, rows = torch.tensor(role_ids), torch.tensor(rewards).float(), len(role_ids)
    mask, names = (ids > 0).long(), {"groups": ["p"] * rows, "kinds": ["c"] * rows}
    return RoleBatch(rewards=paid, mask=mask, role_ids=ids, roles=ROLES, **names, **others)


def take(batch: RoleBatch, rows: list[int]) -> RoleBatch:
    """The rows of ``batch`` with these numbers, in this order."""
    tensors = {name: getattr(batch, name)[rows] for name in TENSORS}
    groups, categories = [batch.groups[r] for r in rows], [batch.kinds[r] for r in rows]
    return replace(batch, groups=groups, kinds=categories, **tensors)


def with_forms(how: str | None, **settings: Any) -> CreditSettings:
    """Settings with the same normalisation for both roles."""
    return CreditSettings.model_validate({"normalize": dict.fromkeys(ROLES, how), **settings})


def starting_state() -> Baselines:
    return {"attacker": {CATEGORIES[1]: 0.25}, "assessor": {CATEGORIES[0]: -0.5}}


def estimate(
    name: str,
    batch: RoleBatch,
    settings: CreditSettings | None = None,
    state: Baselines | None = None,
) -> Advantages:
    credited = ROLE_ESTIMATORS[name](batch, settings or CreditSettings(), state or starting_state())
    assert credited.advantages.shape == credited.returns.shape == batch.mask.shape
    assert credited.advantages.dtype == credited.returns.dtype == torch.float32
    return credited


# --- what they count, refuse and leave at 0 ---


estimators = pytest.mark.parametrize("name", sorted(ROLE_ESTIMATORS))


def test_role_rae_computed_by_hand_over_two_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medserl_agentloop.core.advantages.RAE_DECAY", 0.9)
    settings, state = with_forms(None), {"attacker": {"c": 0.5}}
    two = written_batch([[ATTACKER], [ATTACKER]], [[1.0], [0]])
    first = estimate("role_rae", two, settings, state)
    assert first.advantages.tolist() == [[0.5], [-0.5]]
    assert first.metrics == {"selfplay/attacker/baseline/c": 0.5}
    assert state == {"attacker": {"c": pytest.approx(0.5)}}
    second = estimate("role_rae", written_batch([[ATTACKER]], [[1.0]]), settings, state)
    assert second.advantages.tolist() == [[0.5]]
    assert state == {"attacker": {"c": pytest.approx(0.55)}}


def test_role_weights_scale_what_is_normalised() -> None:
    batch = random_batch(5, dense=True)
    settings = CreditSettings.model_validate({"role_weights": {"attacker": 0.0, "assessor": 2.5}})
    plain = estimate("role_reinforce_pp", batch)
    weighted = estimate("role_reinforce_pp", batch, settings)
    assert weighted.advantages[batch.role_ids == ATTACKER].eq(0).all()
    assessor = batch.role_ids == ASSESSOR
    torch.testing.assert_close(weighted.advantages[assessor], 2.5 * plain.advantages[assessor])
    assert torch.equal(weighted.returns, plain.returns)


def test_estimators_refuse_settings_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match=r"normalize\.attacker=kind makes no sense with role_rae"):
        estimate("role_rae", random_batch(0), with_forms("kind"))
    with pytest.raises(ValueError, match=r"critic\.enable=True"):
        estimate("role_gae", replace(random_batch(0), values=None))


@pytest.mark.parametrize(
    ("name", "how"), [form for form in FORMS if form[1] != "none" or form[0] == "role_rloo"]
)
@pytest.mark.parametrize("width", [1, 5, 300])
@pytest.mark.parametrize("reward", [0.1, -1e4, 0.0])
def test_equal_rewards_give_exact_zeros(name: str, how: str, width: int, reward: float) -> None:
    """Whatever the rounding of the sums over long rows; not where nothing is taken off the
    rewards."""
    rows = 7
    role_ids = torch.full((rows, width), ATTACKER)
    role_ids[0, 2:] = 0
    rewards = torch.zeros(rows, width)
    rewards[torch.arange(rows), (role_ids > 0).sum(1) - 1] = reward
    batch = written_batch(role_ids.tolist(), rewards.tolist(), values=torch.zeros(rows, width))
    for lam in (1.0, 0.9) if reward == 0 else (1.0,):
        assert estimate(name, replace(batch, lam=lam), with_forms(how)).advantages.eq(0).all()


@estimators
@pytest.mark.parametrize("untrained", [ATTACKER, ASSESSOR])
def test_the_role_that_is_not_trained_gets_nothing_and_moves_no_baseline(
    name: str, untrained: int
) -> None:
    batch = random_batch(4, dense=True)
    both, state, trained = estimate(name, batch), starting_state(), batch.role_ids != untrained
    one = estimate(name, replace(batch, mask=batch.mask * trained), state=state)
    assert one.advantages[~trained].eq(0).all()
    assert torch.equal(one.advantages[trained], both.advantages[trained])
    role = ROLES[untrained - 1]
    assert state.get(role) == starting_state()[role]


# --- on any batch ---


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
        self.rewards = {row: batch.rewards[row, own].tolist() for row, own in self.own.items()}
        self.total = {row: sum(rewards) for row, rewards in self.rewards.items()}

    def group(self, row: int) -> list[int]:
        groups = list(zip(self.batch.groups, self.batch.kinds, strict=True))
        return [other for other in self.own if groups[other] == groups[row]]

    def peers(self, row: int) -> list[float]:
        return [self.total[other] for other in self.group(row)]

    def role_reinforce_pp(self, row: int, how: str) -> list[float]:
        rewards, gamma = self.rewards[row], self.batch.gamma
        later = (rewards[t:] for t in range(len(rewards)))
        return [sum(gamma**k * r for k, r in enumerate(rest)) for rest in later]

    def role_grpo(self, row: int, how: str) -> list[float]:
        peers = self.peers(row)
        advantage = self.total[row] - float(np.mean(peers))
        if how == "group":
            advantage = advantage / (float(np.std(peers, ddof=1)) + 1e-6) if len(peers) > 1 else 0.0
        return [advantage] * len(self.own[row])

    def role_rloo(self, row: int, how: str) -> list[float]:
        peers = self.peers(row)
        if len(peers) == 1:
            return [0.0] * len(self.own[row])
        others = (sum(peers) - self.total[row]) / (len(peers) - 1)
        return [self.total[row] - others] * len(self.own[row])

    def role_rae(self, row: int, how: str) -> list[float]:
        baseline = self.state.get(self.role, {}).get(self.batch.kinds[row], 0.0)
        return [self.total[row] - baseline] * len(self.own[row])

    def role_gae(self, row: int, how: str) -> list[float]:
        assert self.batch.values is not None
        values = [float(self.batch.values[row, t]) for t in self.own[row]]
        advantages: list[float] = []
        after = next_value = 0.0
        gamma, lam = self.batch.gamma, self.batch.lam
        for reward, value in zip(reversed(self.rewards[row]), reversed(values), strict=True):
            after = reward + gamma * next_value - value + gamma * lam * after
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
    own = {"role_reinforce_pp": plain, "role_gae": plain + batch.values * batch.mask}
    returns = own.get(name, expected)
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
    """One delta is a constant added to all its rewards; several perturb each differently."""
    size = batch.mask.numel()
    noise = torch.tensor(deltas).repeat(size)[:size].view(batch.mask.shape)
    perturbed = replace(batch, rewards=batch.rewards + noise * (batch.role_ids == changed))
    before, after = (estimate(name, of, with_forms(how)) for of in (batch, perturbed))
    other = batch.role_ids != changed
    assert torch.equal(before.advantages[other], after.advantages[other])
    assert torch.equal(before.returns[other], after.returns[other])
    own, now = (
        {name: value for name, value in of.metrics.items() if f"/{ROLES[2 - changed]}/" in name}
        for of in (before, after)
    )
    assert own == now


@forms
@given(batch=batches, left=st.integers(0, 3), right=st.integers(0, 70), data=st.data())
def test_the_order_of_rows_and_padding_change_nothing(
    name: str, how: str, batch: RoleBatch, left: int, right: int, data: Any
) -> None:
    """More columns on either side, and rows as verl adds them: copies without a mask."""
    order = data.draw(st.permutations(range(len(batch.groups))))
    columns = {t: torch.nn.functional.pad(getattr(batch, t), (left, right)) for t in TENSORS}
    moved = take(replace(batch, **columns), order + order[:3])
    moved.mask[len(order) :] = 0
    here, there = starting_state(), starting_state()
    plain = estimate(name, batch, with_forms(how), here)
    credited = estimate(name, moved, with_forms(how), there)
    for column in ("advantages", "returns"):
        before, after = getattr(plain, column), getattr(credited, column)
        inside = after[: len(order), left : left + batch.mask.shape[1]]
        torch.testing.assert_close(inside, before[order], atol=1e-5, rtol=1e-5)
        assert after.count_nonzero() == inside.count_nonzero()
    assert credited.metrics == pytest.approx(plain.metrics)
    assert flat(here) == pytest.approx(flat(there), abs=1e-12)
