"""The profiles that travel with the package: what their prompts show is what their parsers read."""

import pytest

from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.types import Category, Role

NOTE = "He has gout. He rests."
ATTACKED = [c for c in Category if c.has_attack]
PROFILES = pytest.mark.parametrize("name", ["baseline", "classic", "medserl"])


@PROFILES
def test_a_profile_has_a_prompt_for_every_turn_that_ends_with_the_note(name: str) -> None:
    profile = load_profile(name)
    prompts = [profile.messages(role, category, NOTE) for role in Role for category in Category]
    for *system, user in prompts:
        assert user["role"] == "user" and user["content"].endswith(f"\n{NOTE}") and user["content"].count(NOTE) == 1
        assert [message["role"] for message in system] == (["system"] if name == "classic" else [])
        assert all(NOTE not in message["content"] for message in system)
    assert (profile.settings.assistant_prefix == "<think>\n") == (name == "baseline")
    assert len({str(prompt) for prompt in prompts}) == len(ATTACKED) + 1 + 1  # the copy, and the assessor's


@PROFILES
@pytest.mark.parametrize("category", Category)
def test_the_format_that_an_attacker_is_shown_is_read(name: str, category: Category) -> None:
    """From the first line that looks like an answer, as if the model had copied the example."""
    prompt = load_profile(name).messages(Role.ATTACKER, category, NOTE)[-1]["content"]
    shown = {"medserl": "<think>", "classic": "generated_note:", "baseline": "</think><answer>"}[name]
    parsed = load_profile(name).parser.attack(prompt[prompt.index(shown) :])
    assert parsed.note is not None and parsed.note.startswith("the complete")


@PROFILES
def test_the_assessor_is_told_the_words_that_are_read_as_verdicts_and_the_prompt_is_none(name: str) -> None:
    profile = load_profile(name)
    prompt = profile.messages(Role.ASSESSOR, Category.VANILLA_BENIGN, NOTE)[-1]["content"]
    verdicts = {
        "baseline": ("Safe", "Harmful"),
        "medserl": ("safe", "harmful"),
        "classic": ('"CORRECT"', '"INCORRECT"'),
    }
    assert all(word in prompt for word in verdicts[name])
    assert profile.parser.assessment(prompt).verdict is None
