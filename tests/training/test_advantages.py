"""Credit stops at the role's border."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.trainer.ppo.core_algos import compute_reinforce_plus_plus_outcome_advantage, get_adv_estimator_fn

from medserl_agentloop.config import ROLE_ESTIMATOR_NAMES
from medserl_agentloop.game.types import Role
from medserl_agentloop.training.advantages import ROLE_ESTIMATORS, reward_to_go, role_grpo, role_reinforce_pp

ATTACKER, ASSESSOR = Role.ATTACKER.id, Role.ASSESSOR.id
estimators = pytest.mark.parametrize("name", sorted(ROLE_ESTIMATORS))


def batch(seed: int, rows: int = 12, *, contexts: int = 2) -> dict[str, Any]:
    """Random trajectories: attacker turn, observation, assessor turn; some rows without one of the turns.

    In the shared context the observation is a short delta, in the isolated one a whole prompt; the
    estimators see no other difference.
    """
    rng = np.random.default_rng(seed)
    width = 40
    rewards, mask, roles = torch.zeros(rows, width), torch.zeros(rows, width, dtype=torch.int64), None
    roles = torch.zeros(rows, width, dtype=torch.int64)
    for row in range(rows):
        kind = rng.integers(0, 4)  # 0: invalid attack, 1: vanilla, else both turns
        at = 0
        if kind != 1:
            n = int(rng.integers(1, 12))
            roles[row, :n], mask[row, :n] = ATTACKER, 1
            rewards[row, n - 1] = float(rng.normal())
            at = n + int(rng.integers(8, 14) if contexts == 2 else rng.integers(1, 4))
        if kind != 0:
            n = int(rng.integers(1, 12))
            roles[row, at : at + n], mask[row, at : at + n] = ASSESSOR, 1
            rewards[row, at + n - 1] = float(rng.normal())
    return {"rewards": rewards, "mask": mask, "roles": roles, "index": [f"g{r // 4}" for r in range(rows)]}


def estimate(name: str, b: dict[str, Any], rewards: torch.Tensor | None = None) -> torch.Tensor:
    advantages, returns = ROLE_ESTIMATORS[name](
        b["rewards"] if rewards is None else rewards, b["mask"], b["roles"], index=b["index"]
    )
    assert advantages.shape == returns.shape == b["mask"].shape
    return advantages


@estimators
@given(
    seed=st.integers(0, 10_000),
    delta=st.floats(-1e3, 1e3, allow_nan=False),
    changed=st.sampled_from([ATTACKER, ASSESSOR]),
    contexts=st.sampled_from([1, 2]),
)
@settings(max_examples=150, deadline=None)
def test_one_roles_reward_changes_no_advantage_of_the_other(
    name: str, seed: int, delta: float, changed: int, contexts: int
) -> None:
    b = batch(seed, contexts=contexts)
    perturbed = b["rewards"] + delta * ((b["rewards"] != 0) & (b["roles"] == changed))
    perturbed[0] += delta * ((b["rewards"][0] != 0) & (b["roles"][0] == changed))  # not the same for every row
    other = (b["roles"] != changed) & (b["mask"] > 0)
    assert torch.equal(estimate(name, b)[other], estimate(name, b, perturbed)[other])


def zero_sum_games() -> dict[str, Any]:
    """Four games that the assessor wins, loses, wins, loses: rewards of opposite sign in one row."""
    roles = torch.tensor([[ATTACKER] * 3 + [0] * 4 + [ASSESSOR] * 2]).repeat(4, 1)
    rewards = torch.zeros(4, 9)
    for row, won in enumerate([1.0, -1.0, 1.0, -1.0]):
        rewards[row, 2], rewards[row, 8] = -won, won
    return {"rewards": rewards, "mask": (roles > 0).long(), "roles": roles, "index": ["g"] * 4}


def test_verls_reinforce_plus_plus_gives_a_zero_sum_attacker_nothing_and_ours_does() -> None:
    """The reason this project exists."""
    b = zero_sum_games()
    config = type("Algorithm", (), {"gamma": 1.0})()
    _, stock = compute_reinforce_plus_plus_outcome_advantage(b["rewards"], b["mask"], config)
    attacker = b["roles"] == ATTACKER
    assert stock[attacker].eq(0).all()

    _, ours = role_reinforce_pp(b["rewards"], b["mask"], b["roles"])
    assert ours[attacker].tolist() == [-1.0] * 3 + [1.0] * 3 + [-1.0] * 3 + [1.0] * 3


def test_role_reinforce_pp_equals_the_formula_on_a_hand_computed_batch() -> None:
    """Attacker tokens return 1, 1, 3: mean 5/3, std sqrt(8/9). Assessor tokens return 2, 2, 2, 0."""
    roles = torch.tensor([[ATTACKER, ATTACKER, 0, ASSESSOR, ASSESSOR, ASSESSOR], [ATTACKER, 0, ASSESSOR, 0, 0, 0]])
    rewards = torch.tensor([[0.0, 1, 0, 0, 0, 2], [3, 0, 0, 0, 0, 0]])
    advantages, returns = role_reinforce_pp(rewards, (roles > 0).long(), roles)
    low, high = (1 - 5 / 3) / math.sqrt(8 / 9), (3 - 5 / 3) / math.sqrt(8 / 9)
    a, b = 0.5 / math.sqrt(0.75), -1.5 / math.sqrt(0.75)
    expected = torch.tensor([[low, low, 0, a, a, a], [high, 0, b, 0, 0, 0]])
    assert torch.allclose(advantages, expected, atol=1e-6)
    assert returns.tolist() == [[1, 1, 0, 2, 2, 2], [3, 0, 0, 0, 0, 0]]


def test_role_grpo_equals_the_formula_on_a_hand_computed_group() -> None:
    """Attackers of one prompt earn 1 and 3: mean 2, unbiased std sqrt(2). One assessor alone: no signal."""
    roles = torch.tensor([[ATTACKER, 0, ASSESSOR], [ATTACKER, 0, 0], [ATTACKER, 0, 0]])
    rewards = torch.tensor([[1.0, 0, 5], [3, 0, 0], [9, 0, 0]])
    advantages, _ = role_grpo(rewards, (roles > 0).long(), roles, index=["p", "p", "q"])
    unit = 1 / (math.sqrt(2) + 1e-6)
    assert torch.allclose(advantages, torch.tensor([[-unit, 0, 0], [unit, 0, 0], [0, 0, 0]]), atol=1e-6)


@estimators
def test_permuting_rows_permutes_advantages(name: str) -> None:
    b = batch(1)
    order = torch.randperm(len(b["mask"]), generator=torch.Generator().manual_seed(0))
    permuted = {k: v[order] if isinstance(v, torch.Tensor) else [v[i] for i in order] for k, v in b.items()}
    assert torch.allclose(estimate(name, b)[order], estimate(name, permuted), atol=1e-6)


@estimators
def test_padding_changes_nothing(name: str) -> None:
    b = batch(2)
    wide = {k: torch.nn.functional.pad(v, (0, 7)) if isinstance(v, torch.Tensor) else v for k, v in b.items()}
    assert torch.equal(estimate(name, wide)[:, :-7], estimate(name, b))


@estimators
@pytest.mark.parametrize("case", ["empty", "no_attacker", "constant", "single_token", "masked"])
def test_degenerate_batches_give_finite_numbers(name: str, case: str) -> None:
    b = batch(3)
    if case == "empty":
        b = {**b, "mask": torch.zeros_like(b["mask"]), "roles": torch.zeros_like(b["roles"])}
    elif case == "no_attacker":
        b["roles"][b["roles"] == ATTACKER] = 0
    elif case == "constant":
        b["rewards"] = (b["rewards"] != 0).float()
    elif case == "single_token":
        b = {k: v[:1, :1] if isinstance(v, torch.Tensor) else v[:1] for k, v in b.items()}
    else:
        b["mask"][:] = 0
    advantages = estimate(name, b)
    assert advantages.isfinite().all()
    if case in ("empty", "masked"):
        assert advantages.eq(0).all()


@estimators
def test_masked_tokens_get_no_advantage(name: str) -> None:
    b = batch(4)
    assert estimate(name, b)[b["mask"] == 0].eq(0).all()


@given(seed=st.integers(0, 1000), gamma=st.sampled_from([0.5, 0.9, 1.0]))
@settings(deadline=None)
def test_reward_to_go_is_the_discounted_sum_over_the_roles_own_tokens(seed: int, gamma: float) -> None:
    rng = np.random.default_rng(seed)
    rewards = torch.tensor(rng.normal(size=(3, 9)), dtype=torch.float64)
    mask = torch.tensor(rng.integers(0, 2, size=(3, 9)), dtype=torch.bool)
    expected = torch.zeros_like(rewards)
    for row in range(3):
        own = mask[row].nonzero().flatten().tolist()
        for i, t in enumerate(own):
            expected[row, t] = sum(gamma**k * rewards[row, u] for k, u in enumerate(own[i:]))
    assert torch.allclose(reward_to_go(rewards, mask, gamma), expected)


@estimators
def test_verls_registry_knows_the_name_and_says_which_trainer_it_needs(name: str) -> None:
    with pytest.raises(ValueError, match="trainer_mode=selfplay_sync"):
        get_adv_estimator_fn(name)(token_level_rewards=None, response_mask=None, config=None)


def test_the_config_lists_every_estimator() -> None:
    assert tuple(sorted(ROLE_ESTIMATORS)) == ROLE_ESTIMATOR_NAMES
