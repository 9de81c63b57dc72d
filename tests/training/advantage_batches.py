"""Batches for the tests of the estimators: random ones and small ones written down."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from medserl_agentloop.core.advantages import ROLE_ESTIMATORS, Advantages, Baselines, RoleBatch
from medserl_agentloop.core.config import NORMALIZATIONS, CreditSettings
from medserl_agentloop.games.medical.types import Role

ROLES = [role.value for role in Role]
ATTACKER, ASSESSOR = Role.ATTACKER.id, Role.ASSESSOR.id
CATEGORIES = ("vanilla_benign", "adversarial_benign", "adversarial_harmful")
TENSORS = ("rewards", "mask", "role_ids", "values")
FORMS = [(name, how) for name, allowed in NORMALIZATIONS.items() for how in allowed]


def random_batch(
    seed: int, rows: int = 12, *, dense: bool = False, scattered: bool = False, gamma: float = 1.0, lam: float = 1.0
) -> RoleBatch:
    """Random games: attacker turn, observation, assessor turn; some lack a turn, some are void.

    Rewards are multiples of 1/16: sums of them are exact, so that whitening finds either no spread or one that is far
    above rounding. ``dense`` puts a penalty on every token, as KL in the reward does; ``scattered`` has the roles'
    tokens lie all over the row, not in one turn each.
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


def written_batch(role_ids: list[list[int]], rewards: list[list[float]], **others: Any) -> RoleBatch:
    """A batch of one prompt and one category unless ``others`` say otherwise; every role token is trained on."""
    ids = torch.tensor(role_ids)
    fields: dict[str, Any] = {"groups": ["p"] * len(role_ids), "kinds": ["c"] * len(role_ids), **others}
    return RoleBatch(rewards=torch.tensor(rewards).float(), mask=(ids > 0).long(), role_ids=ids, roles=ROLES, **fields)


def take(batch: RoleBatch, rows: list[int]) -> RoleBatch:
    """The rows of ``batch`` with these numbers, in this order."""
    tensors = {name: getattr(batch, name)[rows] for name in TENSORS}
    groups, categories = [batch.groups[r] for r in rows], [batch.kinds[r] for r in rows]
    return replace(batch, groups=groups, kinds=categories, **tensors)


def with_forms(how: str | None, **settings: Any) -> CreditSettings:
    """Settings with the same normalisation for both roles."""
    return CreditSettings.model_validate({"normalize": {role.value: how for role in Role}, **settings})


def starting_state() -> Baselines:
    return Baselines({Role.ATTACKER.value: {CATEGORIES[1]: 0.25}, Role.ASSESSOR.value: {CATEGORIES[0]: -0.5}})


def estimate(
    name: str, batch: RoleBatch, settings: CreditSettings | None = None, state: Baselines | None = None
) -> Advantages:
    credited = ROLE_ESTIMATORS[name](batch, settings or CreditSettings(), state or starting_state())
    assert credited.advantages.shape == credited.returns.shape == batch.mask.shape
    assert credited.advantages.dtype == credited.returns.dtype == torch.float32
    return credited
