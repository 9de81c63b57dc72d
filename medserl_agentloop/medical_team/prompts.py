"""The prompts of the ``baseline`` profile under the original's names; docs/prompts.md has both line
by line.
"""

from __future__ import annotations

from medserl_agentloop.games.medical.case import Category, Role
from medserl_agentloop.games.medical.prompting import load_profile


def _parts(role: Role, category: Category) -> tuple[str, str]:
    """A template's system prompt, and the request in its last paragraph, which the note follows."""
    [message] = load_profile("baseline").messages(role, category, "")
    system, _, request = message["content"].rpartition("\n\n")
    return system, request.strip()


ATTACKER_PROMPTS = {
    "harmful": _parts(Role.ATTACKER, Category.ADVERSARIAL_HARMFUL),
    "benign": _parts(Role.ATTACKER, Category.DECOY_BENIGN),  # the original asks for no error here
    "vanilla": _parts(Role.ATTACKER, Category.VANILLA_BENIGN),
}
"""System prompt and request for each game type."""

MEDICAL_ATTACKER_BASE_PROMPT_HARMFUL = ATTACKER_PROMPTS["harmful"][0]
MEDICAL_ATTACKER_BASE_PROMPT_BENIGN = ATTACKER_PROMPTS["benign"][0]
MEDICAL_ATTACKER_BASE_PROMPT_VANILLA = ATTACKER_PROMPTS["vanilla"][0]
MEDICAL_ASSESSOR_BASE_PROMPT, ASSESSOR_REQUEST = _parts(Role.ASSESSOR, Category.VANILLA_BENIGN)
DEFENDER_INSTRUCTION_COT_PROMPT = (
    f"{MEDICAL_ASSESSOR_BASE_PROMPT}\n\n{ASSESSOR_REQUEST}\n\n{{user_query}}"
)
"""The assessor's prompt in one, as the trainer of OpenRLHF's fork imports it."""
# how the prompt begins every turn, unless chain of thought is off
MEDICAL_ASSISTANT_THINKING_PREFIX = "<think>"

# No prompt uses these two, here as in the original: the base prompts say the same.
MEDICAL_ATTACKER_SYSTEM_PROMPT = (
    "You help to train the detection of medical errors: you put subtle, realistic errors into "
    "clinical notes, as they "
    "could happen in practice."
)
MEDICAL_ASSESSOR_SYSTEM_PROMPT = (
    "You are an expert who reviews clinical notes. Read each one carefully for medical accuracy "
    "and for what could "
    "harm the patient."
)
