"""Every public name of the original, and its functions' prompts, rewards and formats."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from serving import LocalServer

from medserl_agentloop import medical_team
from medserl_agentloop.medical_team import (
    get_medical_error_detection_reward,
    get_medical_error_realism_reward,
    get_medical_game_reward_general_sum,
    medical_cot_format_check_and_extract,
    prompts,
)
from medserl_agentloop.paths import resource

PAGE = (Path(__file__).parents[2] / "docs/migration.md").read_text(encoding="utf-8")
NAMES = {
    "medical_game_manager": "MedicalDialogueGameManager MedicalGameState",
    "utils": "MEDICAL_REWARD_COEFF_CONFIG convert_medical_game_history_to_messages "
    "convert_medical_game_history_to_query "
    "medical_cot_format_check_and_extract get_medical_game_reward_general_sum "
    "get_medical_cot_formatting_reward get_medical_error_detection_reward "
    "get_medical_error_realism_reward",
    "remote_judge": "create_medical_judge_remote_function test_judge_connection "
    "wait_for_judge_server",
}
PROMPTS = """MEDICAL_ATTACKER_SYSTEM_PROMPT MEDICAL_ASSESSOR_SYSTEM_PROMPT
    MEDICAL_ATTACKER_BASE_PROMPT_HARMFUL MEDICAL_ATTACKER_BASE_PROMPT_BENIGN
    MEDICAL_ATTACKER_BASE_PROMPT_VANILLA MEDICAL_ASSESSOR_BASE_PROMPT
    MEDICAL_ASSISTANT_THINKING_PREFIX"""


def test_every_name_of_the_original_is_where_it_was_and_in_the_package() -> None:
    for module, names in NAMES.items():
        here = import_module(f"medserl_agentloop.medical_team.{module}")
        for name in names.split():
            assert getattr(medical_team, name) is getattr(here, name)
    assert {name for name in PROMPTS.split() if not getattr(prompts, name)} == set()


SAFE = "Verify this medical note is safe"


@pytest.mark.parametrize(
    ("game_type", "phrase"),
    [("harmful", "Create an error variation"), ("benign", SAFE), ("vanilla", SAFE)],
)
def test_user_message_holds_the_phrase_that_the_original_tests_look_for(
    game_type: str, phrase: str
) -> None:
    query = medical_team.convert_medical_game_history_to_query
    system, user = query([], "attacker", "the note", game_type, {"error_types": ["frobnication"]})
    assert user["content"].startswith(phrase) and user["content"].endswith("\n\nthe note")
    assert ("frobnication" in system["content"]) is (game_type == "harmful")
    system, user = query([{"content": "the attack"}], "assessor", "the note", game_type)
    assert user["content"].startswith("Classify this medical note")
    assert user["content"].endswith("\n\nthe attack") and "the note" not in user["content"]
    with pytest.raises(ValueError, match="no game type 'odd'"):
        query([], "attacker", "note", "odd")


def test_example_of_the_page_runs_as_shown(
    judge: LocalServer, capsys: pytest.CaptureFixture[str]
) -> None:
    code = PAGE.partition("```python\n")[2].partition("```")[0]
    code = code.replace("http://localhost:8001", judge.url).replace(
        "assets/", f"{resource('assets')}/"
    )
    exec(code, {})
    first, second = capsys.readouterr().out.split("\n", 1)
    assert f"it prints `{first}` and `{second.strip()}`" in PAGE


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
    realism, seen = (0.5, "attacker_realistic_error")
    if realistic is False:
        realism, seen = (-0.5, "attacker_unrealistic_error")
    labels = {"error_present": present, "error_detected": detected}
    if realistic is not None:  # else the judge does not say
        labels["error_realistic"] = realistic
    for role, expected, outcomes in (
        ("attacker", attacker + realism, attacker_outcomes | {seen}),
        ("assessor", assessor, {assessor_outcome}),
    ):
        reward, reached = get_medical_game_reward_general_sum({"game_role": role}, labels)
        assert (reward, {outcome.value for outcome in reached}) == (expected, outcomes)
    assert get_medical_error_detection_reward("attacker", detected, present)[0] == attacker
    assert get_medical_error_realism_reward("attacker", realism > 0)[0] == realism
    assert get_medical_error_realism_reward("assessor", realism > 0) == (0.0, set())


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("why\nso</think><answer>Safe</answer>", (("why\nso", "Safe"), False)),
        ("<think>why</think><answer>Safe</answer>", ((None, "Safe"), True)),
        ("why</think><answer>Safe", ((None, ""), True)),
    ],
)
def test_format_check_extracts_thinking_and_answer(response: str, found: Any) -> None:
    """A turn that violates the format gives its answer and never its reasoning."""
    assert medical_cot_format_check_and_extract(response) == found
