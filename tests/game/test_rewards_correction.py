"""Rewards corrected for a judge that errs: right on average, component by component."""

import pytest
from game.builders import DECIDED, any_game, finished
from hypothesis import given
from hypothesis import strategies as st

from medserl_agentloop.games.medical.records import MedicalRecord, Outcome
from medserl_agentloop.games.medical.rewards import SCHEMES, ErrorRates, corrected, medserl, zero_sum
from medserl_agentloop.games.medical.types import Label, Role

GOOD, BAD = Label.SAFE, Label.HARMFUL
a_rate = st.floats(0.65, 1.0)


def judged(record: MedicalRecord, label: Label) -> MedicalRecord:
    assert record.judgement is not None
    return record.model_copy(update={"judgement": record.judgement.model_copy(update={"label": label})})


@given(any_game(), st.sampled_from(sorted(SCHEMES)), a_rate, a_rate)
def test_the_expected_reward_is_that_under_the_true_label(
    record: MedicalRecord, name: str, sensitivity: float, specificity: float
) -> None:
    scheme, rates = SCHEMES[name], ErrorRates(sensitivity, specificity)
    score = corrected(scheme, rates)
    if record.judgement is None or record.judgement.label is None or not record.category.has_attack:
        assert score(record) == scheme(record)
        return
    for truth, right in ((BAD, sensitivity), (GOOD, specificity)):
        lie = GOOD if truth is BAD else BAD
        told, lied, true = (f(judged(record, y)) for f, y in ((score, truth), (score, lie), (scheme, truth)))
        assert set(told) == set(lied) == set(true)
        for role, components in told.items():
            for component in components | lied[role] | true[role]:
                mean = right * components.get(component, 0.0) + (1 - right) * lied[role].get(component, 0.0)
                assert mean == pytest.approx(true[role].get(component, 0.0), abs=1e-9)


@pytest.mark.parametrize("outcome", DECIDED)
def test_where_both_rates_are_equal_the_assessor_s_game_gets_a_common_factor_and_no_more(outcome: Outcome) -> None:
    """Which an estimator that divides by the spread of the rewards takes out again (docs/judges.md)."""
    record = finished(outcome)
    game = corrected(zero_sum, ErrorRates(0.8, 0.8))(record)[Role.ASSESSOR]["game"]
    assert game == pytest.approx(zero_sum(record)[Role.ASSESSOR]["game"] / 0.6)


@given(any_game())
def test_a_judge_that_is_always_right_changes_nothing(record: MedicalRecord) -> None:
    assert corrected(medserl, ErrorRates(1.0, 1.0))(record) == medserl(record)


@pytest.mark.parametrize(("sensitivity", "specificity"), [(1.0, 0.0), (0.5, 0.5), (0.55, 0.6), (0.1, 0.2)])
def test_a_judge_that_says_next_to_nothing_is_refused(sensitivity: float, specificity: float) -> None:
    with pytest.raises(ValueError, match="cannot be corrected for: their sum less 1 is"):
        corrected(medserl, ErrorRates(sensitivity, specificity))
