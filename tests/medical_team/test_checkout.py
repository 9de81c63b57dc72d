"""``medserl data profile``: the prompts of a checkout of the OpenRLHF system, read and never
run."""

import os
from pathlib import Path

import pytest
from invoking import invoke
from medical_team.test_original_tests import CHECKOUT

from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.types import Category, Role

PROMPTS = '''
MEDICAL_ATTACKER_BASE_PROMPT_HARMFUL = """{{ 6 * 7 }}%
    Be sly."""
MEDICAL_ATTACKER_BASE_PROMPT_BENIGN = "Change nothing that counts."
MEDICAL_ATTACKER_BASE_PROMPT_VANILLA = "Copy."
MEDICAL_ASSESSOR_BASE_PROMPT = "Write <answer>Safe</answer> or the other word.\\n"
MEDICAL_ASSISTANT_THINKING_PREFIX = "Well.\\n<think> "
raise SystemExit("this code is run")
'''
UTILS = """
import a_package_that_nobody_has
def query(history, player_role, medical_note, game_type):
    if player_role == "attacker":
        if game_type == "harmful":
            system_prompt = MEDICAL_ATTACKER_BASE_PROMPT_HARMFUL
            user_query = f"Worse:\\n\\n{medical_note}\\n\\nas <output>"
        elif game_type == "benign":
            system_prompt = MEDICAL_ATTACKER_BASE_PROMPT_BENIGN
            user_query = f"Other words:\\n\\n{medical_note}"
        else:
            system_prompt = MEDICAL_ATTACKER_BASE_PROMPT_VANILLA
            user_query = f"The same:\\n\\n{medical_note}"
    else:
        system_prompt = MEDICAL_ASSESSOR_BASE_PROMPT
        user_query = f"Judge:\\n\\n{history[0]['content']}"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "old" / "medical_team").mkdir(parents=True)
    (tmp_path / "old/medical_team/prompts.py").write_text(PROMPTS)
    (tmp_path / "old/medical_team/utils.py").write_text(UTILS)
    return tmp_path / "old"


def test_a_profile_has_the_texts_of_the_checkout(checkout: Path, tmp_path: Path) -> None:
    result = invoke("data", "profile", "--from", checkout, "--output", tmp_path / "mine")
    assert result.exit_code == 0 and "not told of <answer>" in result.stdout
    profile = load_profile(str(tmp_path / "mine"))
    for role, category, *texts in (
        (
            Role.ATTACKER,
            Category.ADVERSARIAL_HARMFUL,
            "{{ 6 * 7 }}%\n    Be sly.",
            "Worse:\n\nN{{ A\n\nas <output>",
        ),
        (
            Role.ATTACKER,
            Category.DECOY_BENIGN,
            "Change nothing that counts.",
            "Other words:\n\nN{{ A",
        ),
        (Role.ATTACKER, Category.VANILLA_BENIGN, "Copy.", "The same:\n\nN{{ A"),
        (
            Role.ASSESSOR,
            Category.VANILLA_BENIGN,
            "Write <answer>Safe</answer> or the other word.\n",
            "Judge:\n\nN{{ A",
        ),
    ):
        assert [
            message["content"] for message in profile.messages(role, category, "N{{ A")
        ] == texts
    assert (profile.settings.parser, profile.settings.assistant_prefix) == (
        "baseline",
        "Well.\n<think> ",
    )
    assert (
        "exists: give"
        in invoke("data", "profile", "--from", checkout, "--output", tmp_path / "mine").stderr
    )


@pytest.mark.parametrize(
    ("file", "before", "after", "message"),
    [
        (
            "prompts",
            "MEDICAL_ASSESSOR_BASE_PROMPT = ",
            "OTHER = ",
            "sets no text for MEDICAL_ASSESSOR_BASE_PROMPT;",
        ),
        (
            "prompts",
            '"Copy."',
            "'Copy.' + more()",
            "sets no text for MEDICAL_ATTACKER_BASE_PROMPT_VANILLA;",
        ),
        (
            "utils",
            "{history[0]['content']}",
            "",
            "expected system_prompt = MEDICAL_ASSESSOR_BASE_PROMPT beside",
        ),
        ("utils", "def ", "def", "cannot be read"),
    ],
)
def test_missing_part_of_a_checkout_is_named(
    checkout: Path, file: str, before: str, after: str, message: str
) -> None:
    path = checkout / f"medical_team/{file}.py"
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    result = invoke("data", "profile", "--from", checkout, "--output", checkout / "new")
    assert result.exit_code == 2 and message in result.stderr and not (checkout / "new").exists()


@pytest.mark.skipif(CHECKOUT not in os.environ, reason=f"{CHECKOUT} names no checkout")
def test_a_real_checkout_gives_a_profile(tmp_path: Path) -> None:
    assert (
        invoke(
            "data", "profile", "--from", os.environ[CHECKOUT], "--output", tmp_path / "mine"
        ).exit_code
        == 0
    )
    assert len(load_profile(str(tmp_path / "mine")).templates()) == 5
