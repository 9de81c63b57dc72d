"""What the estimators count, refuse and leave at 0; their formulas are in test_advantages_properties.py."""

from dataclasses import replace

import pytest
import torch
from training.advantage_batches import (
    ASSESSOR,
    ATTACKER,
    FORMS,
    estimate,
    random_batch,
    starting_state,
    with_forms,
    written_batch,
)
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from medserl_agentloop.core.advantages import ROLE_ESTIMATORS, Baselines
from medserl_agentloop.core.config import NORMALIZATIONS, CreditSettings
from medserl_agentloop.games.medical.types import Role

estimators = pytest.mark.parametrize("name", sorted(ROLE_ESTIMATORS))
TWO_PROMPTS = ([[ATTACKER, ATTACKER, ASSESSOR], [ATTACKER, 0, 0], [ATTACKER, 0, 0]], [[0, 1, 5], [3, 0, 0], [9, 0, 0]])
TWO_KINDS = {"kinds": ["c", "c", "d", "d"]}


def test_groups_without_a_signal_are_counted() -> None:
    batch = written_batch(*TWO_PROMPTS, groups=["p", "p", "q"])
    assert estimate("role_grpo", batch).metrics == {
        "selfplay/attacker/small_groups": 0.5,
        "selfplay/attacker/constant_groups": 0.0,
        "selfplay/attacker/no_signal_groups": 0.5,
        "selfplay/assessor/small_groups": 1.0,
        "selfplay/assessor/constant_groups": 0.0,
        "selfplay/assessor/no_signal_groups": 1.0,
    }
    constant = written_batch([[ATTACKER]] * 4, [[1.0], [3], [7], [7]], **TWO_KINDS)
    assert estimate("role_rloo", constant).metrics["selfplay/attacker/constant_groups"] == 0.5


def test_role_rae_computed_by_hand_over_two_batches() -> None:
    settings, state = with_forms(None, rae_decay=0.9), Baselines({"attacker": {"c": 0.5}})
    first = estimate("role_rae", written_batch([[ATTACKER], [ATTACKER]], [[1.0], [0]]), settings, state)
    assert first.advantages.tolist() == [[0.5], [-0.5]]
    assert first.metrics == {"selfplay/attacker/baseline/c": 0.5}
    assert state == {"attacker": {"c": pytest.approx(0.5)}}
    second = estimate("role_rae", written_batch([[ATTACKER]], [[1.0]]), settings, state)
    assert second.advantages.tolist() == [[0.5]]
    assert state == {"attacker": {"c": pytest.approx(0.55)}}


def test_role_weights_scale_what_is_normalised() -> None:
    batch = random_batch(5, dense=True)
    settings = CreditSettings.model_validate({"role_weights": {"attacker": 0.0, "assessor": 2.5}})
    plain, weighted = estimate("role_reinforce_pp", batch), estimate("role_reinforce_pp", batch, settings)
    assert weighted.advantages[batch.role_ids == ATTACKER].eq(0).all()
    assessor = batch.role_ids == ASSESSOR
    torch.testing.assert_close(weighted.advantages[assessor], 2.5 * plain.advantages[assessor])
    assert torch.equal(weighted.returns, plain.returns)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"normalize\.attacker=kind makes no sense with role_rae: .*none, mean"):
        estimate("role_rae", random_batch(0), with_forms("kind"))
    with pytest.raises(ValueError, match=r"critic\.enable=True"):
        estimate("role_gae", replace(random_batch(0), values=None))


@pytest.mark.parametrize(("name", "how"), [form for form in FORMS if form[1] != "none" or form[0] == "role_rloo"])
@pytest.mark.parametrize("width", [1, 5, 300])
@pytest.mark.parametrize("reward", [0.1, -1e4, 0.0])
def test_equal_rewards_give_exact_zeros(name: str, how: str, width: int, reward: float) -> None:
    """Whatever the rounding of the sums over long rows; not where nothing is taken off the rewards."""
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
def test_the_role_that_is_not_trained_gets_nothing_and_moves_no_baseline(name: str, untrained: int) -> None:
    batch = random_batch(4, dense=True)
    both = estimate(name, batch)
    state = starting_state()
    one = estimate(name, replace(batch, mask=batch.mask * (batch.role_ids != untrained)), state=state)
    assert one.advantages[batch.role_ids == untrained].eq(0).all()
    assert torch.equal(one.advantages[batch.role_ids != untrained], both.advantages[batch.role_ids != untrained])
    before = starting_state()
    role = next(role for role in Role if role.id == untrained)
    assert state.get(role.value) == before[role.value]


@estimators
def test_verls_registry_knows_the_name_and_says_which_trainer_it_needs(name: str) -> None:
    with pytest.raises(ValueError, match="trainer_mode=selfplay_sync"):
        get_adv_estimator_fn(name)(token_level_rewards=None, response_mask=None, config=None)


def test_the_config_lists_every_estimator() -> None:
    assert sorted(ROLE_ESTIMATORS) == sorted(NORMALIZATIONS)
