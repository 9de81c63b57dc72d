"""What holds for every scheme, how one is found, and how one is corrected for a judge that errs."""

import math
from pathlib import Path

import pytest
from game.builders import DECIDED, any_game, finished
from hypothesis import given
from hypothesis import strategies as st

from medserl_agentloop.games.medical.records import MedicalRecord, Outcome
from medserl_agentloop.games.medical.rewards import SCHEMES, ErrorRates, corrected, load_scheme, medserl, zero_sum
from medserl_agentloop.games.medical.types import Label, Role


@given(any_game(), st.sampled_from(sorted(SCHEMES)))
def test_a_scheme_rewards_whoever_generated_a_turn_that_counts_and_leaves_the_record_as_it_was(
    record: MedicalRecord, name: str
) -> None:
    scheme, before = SCHEMES[name], record.model_dump_json()
    rewards = scheme(record)
    assert scheme(record) == rewards
    assert record.model_dump_json() == before
    played = {Role.ATTACKER: record.attack, Role.ASSESSOR: record.assessment}
    assert set(rewards) == {
        role for role, turn in played.items() if turn is not None and record.outcome is not Outcome.VOID
    }
    record.rewards = rewards
    for role in Role:
        assert record.reward(role) == (sum(rewards[role].values()) if role in rewards else None)


USERS_SCHEME = """
def flat(record):
    return {role: {"flat": 0.25} for role in record.rewards}
number = 3
"""


def test_constants_of_a_scheme_can_be_replaced() -> None:
    record = finished(Outcome.CORRECT_REJECTION, category="adversarial_benign")
    assert medserl(record)[Role.ATTACKER]["validity"] == -2.0
    assert load_scheme("medserl", {"failed_attack": -1.6})(record)[Role.ATTACKER]["validity"] == -1.6
    assert load_scheme("medserl", {"failed_attack": None}) is medserl
    assert set(SCHEMES) == {"medserl", "zero_sum", "learnable", "medical_general_sum", "medical_general_sum_no_cot"}


@pytest.mark.parametrize(
    ("name", "terms", "says"),
    [
        ("medsrl", {}, r"\(did you mean 'medserl'\?\): expected one of learnable, .*or package.module:function"),
        ("", {}, "no reward scheme"),
        ("no_such_module:flat", {}, "cannot be loaded: ModuleNotFoundError"),
        ("flat_rewards:sharp", {}, "cannot be loaded: AttributeError"),
        ("flat_rewards:number", {}, "no reward scheme 'flat_rewards:number'"),
        (
            "medserl",
            {"faild_attack": -1.0},
            r"has no term 'faild_attack' \(did you mean 'failed_attack'\?\): it has win, invalid_attack, ",
        ),
        ("medserl", {"win": -1.0}, "win=-1 of 'medserl' must be a number, at least 0; its own is 1"),
        ("zero_sum", {"failed_attack": 100.0}, "failed_attack=100 of 'zero_sum' must be a number, at most 0"),
        ("learnable", {"sentence": math.nan}, "sentence=nan of 'learnable' must be a number"),
        ("medserl", {"decoy": math.inf}, "decoy=inf of 'medserl' must be a number"),
        ("medical_general_sum", {"realism": 1.0}, "it has none, so leave selfplay.reward_terms as it is"),
        (
            "flat_rewards:flat",
            {"faild_attack": -1.0},
            "it has none, so leave selfplay.reward_terms as it is",
        ),
    ],
)
def test_a_scheme_or_a_constant_that_cannot_be_found_is_named(
    name: str, terms: dict[str, float], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flat_rewards.py").write_text(USERS_SCHEME)
    monkeypatch.syspath_prepend(tmp_path)
    assert load_scheme("flat_rewards:flat").__name__ == "flat"
    with pytest.raises(ValueError, match=says):
        load_scheme(name, terms)


# Rewards corrected for a judge that errs: right on average, component by component.

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
