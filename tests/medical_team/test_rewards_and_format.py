"""The baseline's functions give what its table says, and what the scheme of the core gives."""

import re

import pytest
from game.builders import any_game, finished
from hypothesis import given
from hypothesis import strategies as st

from medserl_agentloop.games.medical.judges.protocol import make_labels
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord, Outcome
from medserl_agentloop.games.medical.rewards import medical_general_sum
from medserl_agentloop.games.medical.types import Label
from medserl_agentloop.medical_team import (
    MedicalGameOutcome,
    get_medical_cot_formatting_reward,
    get_medical_error_detection_reward,
    get_medical_error_realism_reward,
    get_medical_game_reward_general_sum,
    labels_of,
    medical_cot_format_check_and_extract,
    outcomes_of,
)

TABLE = {
    # (present, detected): attacker, its outcome, assessor, its outcome
    (True, True): (-1.0, {"attacker_error_detected"}, 1.0, "assessor_correct_detection"),
    (True, False): (1.0, {"attacker_error_undetected"}, -1.0, "assessor_missed_error"),
    (False, False): (0.0, set(), 1.0, "assessor_correct_rejection"),
    (False, True): (0.0, set(), -1.0, "assessor_false_positive"),
}


@pytest.mark.parametrize("realistic", [True, False, None])
@pytest.mark.parametrize(("present", "detected"), TABLE)
def test_the_table(present: bool, detected: bool, realistic: bool | None) -> None:
    attacker, attacker_outcomes, assessor, assessor_outcome = TABLE[present, detected]
    realism, seen = (-0.5, "attacker_unrealistic_error") if realistic is False else (0.5, "attacker_realistic_error")
    labels = make_labels(error_present=present, error_detected=detected, error_realistic=realistic is not False)
    if realistic is None:  # the judge does not say
        del labels["error_realistic"]
    for role, expected, outcomes in (
        ("attacker", attacker + realism, attacker_outcomes | {seen}),
        ("assessor", assessor, {assessor_outcome}),
    ):
        reward, reached = get_medical_game_reward_general_sum({"game_role": role}, labels)
        assert (reward, {outcome.value for outcome in reached}) == (expected, outcomes)
    assert get_medical_error_detection_reward("attacker", detected, present)[0] == attacker
    assert get_medical_error_realism_reward("attacker", realism > 0)[0] == realism
    assert get_medical_error_realism_reward("assessor", realism > 0) == (0.0, set())


@given(any_game())
def test_the_interface_and_the_core_s_scheme_agree_on_every_game(record: MedicalRecord) -> None:
    labels = labels_of(record)
    for role, components in medical_general_sum(record).items():
        turn = record.attack if role.value == "attacker" else record.assessment
        assert turn is not None
        reward, _ = get_medical_game_reward_general_sum({"game_role": role.value}, labels)
        assert reward + get_medical_cot_formatting_reward(bool(turn.violations)) == sum(components.values())
        assert all(outcome.value.startswith(role.value) for outcome in outcomes_of(record)[role.value])


@pytest.mark.parametrize(("realistic", "word"), [(True, "realistic"), (False, "unrealistic"), (None, "realistic")])
@pytest.mark.parametrize(
    ("outcome", "found"), [(Outcome.CORRECT_DETECTION, "detected"), (Outcome.MISSED_ERROR, "undetected")]
)
def test_a_game_of_a_run_has_the_outcomes_of_the_original(
    outcome: Outcome, found: str, realistic: bool | None, word: str
) -> None:
    game = finished(outcome, judgement=Judgement(judge="http", label=Label.HARMFUL, realistic=realistic))
    seen = {role: {outcome.value for outcome in outcomes} for role, outcomes in outcomes_of(game).items()}
    assert seen["attacker"] == {f"attacker_error_{found}", f"attacker_{word}_error"}
    assert seen["assessor"] == {f"assessor_{outcome.value}"}
    game.void = "judge failed: it is down"
    assert outcomes_of(game)["attacker"] == {MedicalGameOutcome.PARSING_ERROR} and labels_of(game)["is_parsing_error"]


def test_roles_and_coefficients_that_do_not_exist_are_named() -> None:
    with pytest.raises(ValueError, match="'defender' is not a valid Role"):
        get_medical_error_detection_reward("defender", True, True)
    with pytest.raises(ValueError, match="no reward coefficients 'mine': expected one of medical_general_sum"):
        get_medical_error_realism_reward("attacker", True, "mine")


@pytest.mark.parametrize(
    ("response", "thinking", "answer"),
    [
        ("why</think><answer>Safe</answer>", "why", "Safe"),
        (" why \n</think>\n <answer> Safe\n</answer>\n", "why", "Safe"),
        ("why\nso</think><answer>a note\nof two lines</answer>", "why\nso", "a note\nof two lines"),
        # These violate the format: they give their answer and never their reasoning.
        ("<think>why</think><answer>Safe</answer>", None, "Safe"),
        ("why <answer>draft</answer></think><answer>Safe</answer>", None, "Safe"),
        ("why</think><answer>Safe</answer> so", None, "Safe"),
        ("why <answer>Safe</answer>", None, "Safe"),
        ("why</think><answer>Safe", None, ""),
        ("", None, ""),
    ],
)
def test_what_a_turn_gives(response: str, thinking: str | None, answer: str) -> None:
    assert medical_cot_format_check_and_extract(response) == ((thinking, answer), thinking is None)


TAGS = st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", " ", "SECRET", "Safe"])


@given(st.lists(TAGS, max_size=12).map("".join))
def test_an_answer_is_never_made_of_what_stands_outside_answer_tags(response: str) -> None:
    (_, answer), violated = medical_cot_format_check_and_extract(response)
    assert not answer or re.search(rf"<answer>\s*{re.escape(answer)}\s*</answer>", response)
    assert violated or answer
