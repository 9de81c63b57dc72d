"""The constant part of every prompt comes first, so that an engine's prefix cache can share it between games."""

import pytest

from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.types import Category, Role

NOTE = "A NOTE."
PROMPTS = [(Role.ASSESSOR, category) for category in Category]
PROMPTS += [(Role.ATTACKER, category) for category in Category if category.has_attack]


@pytest.mark.parametrize(("role", "category"), PROMPTS)
def test_nothing_follows_the_note_in_a_prompt(role: Role, category: Category) -> None:
    messages = load_profile("medserl").messages(role, category, NOTE)
    assert messages[-1]["content"].strip().endswith(NOTE)
    assert sum(NOTE in message["content"] for message in messages) == 1
