"""Prompts of the ``baseline`` profile under the OpenRLHF system's names, and what a turn reads.

docs/prompts.md has both systems' prompts line by line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from medserl_agentloop.games.medical.case import Category, Role
from medserl_agentloop.games.medical.prompting import load_profile


def _parts(role: Role, category: Category) -> tuple[str, str]:
    """A template's system prompt, and the request in its last paragraph, which the note follows."""
    [message] = load_profile("baseline").messages(role, category, "")
    system, _, request = message["content"].rpartition("\n\n")
    return system, request.strip()


ATTACKER_PROMPTS = {
    "harmful": _parts(Role.ATTACKER, Category.ADVERSARIAL_HARMFUL),
    "benign": _parts(Role.ATTACKER, Category.DECOY_BENIGN),  # the original asks for no error
    "vanilla": _parts(Role.ATTACKER, Category.VANILLA_BENIGN),
}
"""System prompt and request for each game type."""

MEDICAL_ATTACKER_BASE_PROMPT_HARMFUL = ATTACKER_PROMPTS["harmful"][0]
MEDICAL_ATTACKER_BASE_PROMPT_BENIGN = ATTACKER_PROMPTS["benign"][0]
MEDICAL_ATTACKER_BASE_PROMPT_VANILLA = ATTACKER_PROMPTS["vanilla"][0]
MEDICAL_ASSESSOR_BASE_PROMPT, ASSESSOR_REQUEST = _parts(Role.ASSESSOR, Category.VANILLA_BENIGN)
# No prompt of the original uses its two system prompts.
MEDICAL_ATTACKER_SYSTEM_PROMPT = MEDICAL_ATTACKER_BASE_PROMPT_HARMFUL
MEDICAL_ASSESSOR_SYSTEM_PROMPT = MEDICAL_ASSESSOR_BASE_PROMPT
# how the prompt begins every turn, unless chain of thought is off
MEDICAL_ASSISTANT_THINKING_PREFIX = "<think>"


def convert_medical_game_history_to_messages(
    history: Sequence[Mapping[str, Any]],
    player_role: str,
    medical_note: str,
    game_type: str,
    custom_configs: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
) -> str:
    """:func:`convert_medical_game_history_to_query` as one string of the tokenizer's template."""
    query = convert_medical_game_history_to_query(
        history, player_role, medical_note, game_type, custom_configs
    )
    prompt: str = tokenizer.apply_chat_template(query, tokenize=False, add_generation_prompt=True)
    without = (custom_configs or {}).get("direct_chat_no_cot", False)
    return prompt if without else prompt + MEDICAL_ASSISTANT_THINKING_PREFIX


def convert_medical_game_history_to_query(
    history: Sequence[Mapping[str, Any]],
    player_role: str,
    medical_note: str,
    game_type: str,
    custom_configs: Mapping[str, Any] | None = None,
) -> list[dict[str, str]]:
    """A turn's chat messages, the system's and the user's.

    The attacker gets the note that the game starts from, with the task of the game type:
    ``harmful``, which names the ``error_types``, ``benign`` or ``vanilla``; others are a
    ValueError. The assessor reads the note of the first turn and nothing else.
    """
    if Role(player_role) is Role.ASSESSOR:
        system, request = MEDICAL_ASSESSOR_BASE_PROMPT, ASSESSOR_REQUEST
        note = history[0]["content"] if history else medical_note
    elif game_type not in ATTACKER_PROMPTS:
        raise ValueError(f"no game type {game_type!r}: use one of {', '.join(ATTACKER_PROMPTS)}")
    else:
        (system, request), note = ATTACKER_PROMPTS[game_type], medical_note
        error_types = (custom_configs or {}).get("error_types")
        if error_types and game_type == "harmful":
            system += f"\n\nThe error is about one of: {', '.join(error_types)}."
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": f"{request}\n\n{note}"},
    ]
