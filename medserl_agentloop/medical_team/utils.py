"""Prompts as chat strings, the format check, and the reward functions under the baseline's
names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from medserl_agentloop.games.medical.case import Label, Role
from medserl_agentloop.games.medical.records import MedicalRecord
from medserl_agentloop.medical_team.formats import BASELINE
from medserl_agentloop.medical_team.prompts import (
    ASSESSOR_REQUEST,
    ATTACKER_PROMPTS,
    MEDICAL_ASSESSOR_BASE_PROMPT,
    MEDICAL_ASSISTANT_THINKING_PREFIX,
)
from medserl_agentloop.medical_team.protocol import Labels, make_labels
from medserl_agentloop.medical_team.rewards import (
    FORMAT,
    GENERAL_SUM,
    Coefficients,
    detection_reward,
)

GENERAL_SUM_CONFIG = "medical_general_sum"

MEDICAL_REWARD_COEFF_CONFIG: dict[str, Any] = {
    "cot_format_violation": FORMAT,
    GENERAL_SUM_CONFIG: GENERAL_SUM,
}
"""Sets of coefficients; more can be added."""


class MedicalGameOutcome(Enum):
    """The outcome of a game, as each role sees it."""

    ATTACKER_ERROR_UNDETECTED = "attacker_error_undetected"
    ATTACKER_ERROR_DETECTED = "attacker_error_detected"
    ATTACKER_REALISTIC_ERROR = "attacker_realistic_error"
    ATTACKER_UNREALISTIC_ERROR = "attacker_unrealistic_error"
    ASSESSOR_CORRECT_DETECTION = "assessor_correct_detection"
    ASSESSOR_MISSED_ERROR = "assessor_missed_error"
    ASSESSOR_FALSE_POSITIVE = "assessor_false_positive"
    ASSESSOR_CORRECT_REJECTION = "assessor_correct_rejection"
    TIE = "tie"
    PARSING_ERROR = "parsing_error"


Reward = tuple[float, set[MedicalGameOutcome]]


def convert_medical_game_history_to_messages(
    history: Sequence[Mapping[str, Any]],
    player_role: str,
    medical_note: str,
    game_type: str,
    custom_configs: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
) -> str:
    """:func:`convert_medical_game_history_to_query` as one string, ``<think>`` open if it is asked
    for.
    """
    messages = convert_medical_game_history_to_query(
        history, player_role, medical_note, game_type, custom_configs
    )
    prompt: str = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    without = custom_configs and custom_configs.get("direct_chat_no_cot", False)
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
    ``harmful``, which names the ``error_types``, ``benign`` or ``vanilla``. The assessor reads the
    note of the first turn and nothing else.
    """
    error_types = (custom_configs or {}).get("error_types")
    if Role(player_role) is Role.ASSESSOR:
        system, request = MEDICAL_ASSESSOR_BASE_PROMPT, ASSESSOR_REQUEST
        note = history[0]["content"] if history else medical_note
    elif game_type not in ATTACKER_PROMPTS:
        raise ValueError(
            f"no game type {game_type!r}: expected one of {', '.join(sorted(ATTACKER_PROMPTS))}"
        )
    else:
        (system, request), note = ATTACKER_PROMPTS[game_type], medical_note
        if error_types and game_type == "harmful":
            system += f"\n\nThe error is about one of: {', '.join(error_types)}."
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": f"{request}\n\n{note}"},
    ]


def convert_medical_game_history_to_conversation(
    history: Sequence[Mapping[str, Any]], error_type: str | None = None
) -> str:
    """A game to read: who said what, under the error type if it is given, with a line of dashes
    after each turn.
    """
    title = f"Error type: {error_type}\n{'=' * 30}\n" if error_type else ""
    turns = (
        f"<|{turn['game_role'].title()}|>: {turn['content']}\n{'-' * 30}\n" for turn in history
    )
    return title + "".join(turns)


def medical_cot_format_check_and_extract(response: str) -> tuple[tuple[str | None, str], bool]:
    """``((thinking, answer), violated)`` of ``thinking</think><answer>...</answer>``.

    Where the format is violated, thinking is None, and the answer is what the last
    ``<answer>...</answer>`` holds; without one it is empty, never the raw response.
    """
    turn = BASELINE.attack(response)
    violated = bool(turn.violations)
    return (None if violated else turn.reasoning, turn.note or ""), violated


def answer_without_reasoning(response: str) -> str:
    """A turn where no reasoning is asked for; what a model reasons all the same is cut off."""
    answer = response.rpartition("</think>")[2].strip()
    return "" if "<think>" in answer else answer  # reasoning that never ended


def get_medical_error_detection_reward(
    role: str,
    error_detected: bool,
    error_present: bool,
    error_type: str | None = None,
    reward_coeff_config: str = GENERAL_SUM_CONFIG,
) -> Reward:
    """Return the reward of ``role`` for the verdict, and the outcome. ``error_type`` is not
    used."""
    outcome = MedicalGameOutcome
    player, coefficients = Role(role), _coefficients(reward_coeff_config)
    reward = detection_reward(
        player,
        error_present=error_present,
        error_detected=error_detected,
        coefficients=coefficients,
    )
    seen = {
        (Role.ATTACKER, True): (outcome.ATTACKER_ERROR_UNDETECTED, outcome.ATTACKER_ERROR_DETECTED),
        (Role.ASSESSOR, True): (outcome.ASSESSOR_MISSED_ERROR, outcome.ASSESSOR_CORRECT_DETECTION),
        (Role.ASSESSOR, False): (
            outcome.ASSESSOR_CORRECT_REJECTION,
            outcome.ASSESSOR_FALSE_POSITIVE,
        ),
    }.get((player, bool(error_present)))
    return reward, {seen[bool(error_detected)]} if seen else set()


def get_medical_error_realism_reward(
    role: str, error_realistic: bool, reward_coeff_config: str = GENERAL_SUM_CONFIG
) -> Reward:
    """Return the attacker's reward for a realistic error, and the outcome; nothing for the
    assessor.
    """
    if Role(role) is Role.ASSESSOR:
        return 0.0, set()
    outcome = MedicalGameOutcome
    seen = (
        outcome.ATTACKER_REALISTIC_ERROR if error_realistic else outcome.ATTACKER_UNREALISTIC_ERROR
    )
    return _coefficients(reward_coeff_config)["attacker"]["error_realism"][
        error_realistic is not False
    ], {seen}


def get_medical_game_reward_general_sum(
    gamedata: Mapping[str, Any], labels: Labels, reward_coeff_config: str = GENERAL_SUM_CONFIG
) -> Reward:
    """Return the reward of ``gamedata["game_role"]`` without the format term, and the outcome;
    realistic by default.
    """
    role, config = gamedata["game_role"], reward_coeff_config
    detected, present = labels.get("error_detected", False), labels.get("error_present", False)
    detection, outcomes = get_medical_error_detection_reward(
        role, detected, present, reward_coeff_config=config
    )
    realism, more = get_medical_error_realism_reward(
        role, labels.get("error_realistic", True), config
    )
    return detection + realism, outcomes | more


def labels_of(game: MedicalRecord) -> Labels:
    """A game of a run, a line of ``games.jsonl``, as the judge would label it; a void one is a
    parsing error.
    """
    return make_labels(
        error_present=game.label is Label.HARMFUL,
        error_detected=game.assessment is not None and game.assessment.verdict is Label.HARMFUL,
        error_realistic=game.judgement is None or game.judgement.realistic is not False,
        is_parsing_error=game.is_void,
    )


def outcomes_of(game: MedicalRecord) -> dict[str, set[MedicalGameOutcome]]:
    """Return the outcome of a run's game for each role that played."""
    if game.is_void:
        return {role.value: {MedicalGameOutcome.PARSING_ERROR} for role in Role}
    played = [
        role.value
        for role, turn in ((Role.ATTACKER, game.attack), (Role.ASSESSOR, game.assessment))
        if turn
    ]
    return {
        role: get_medical_game_reward_general_sum({"game_role": role}, labels_of(game))[1]
        for role in played
    }


def get_medical_cot_formatting_reward(cot_format_violation: bool) -> float:
    """Return a role's reward for the format of its turn."""
    reward: float = MEDICAL_REWARD_COEFF_CONFIG["cot_format_violation"][not cot_format_violation]
    return reward


def _coefficients(name: str) -> Coefficients:
    if name not in MEDICAL_REWARD_COEFF_CONFIG:
        known = sorted(MEDICAL_REWARD_COEFF_CONFIG.keys() - {"cot_format_violation"})
        raise ValueError(f"no reward coefficients {name!r}: expected one of {', '.join(known)}")
    chosen: Coefficients = MEDICAL_REWARD_COEFF_CONFIG[name]
    return chosen


# The names that OpenRLHF's fork and its trainer know.
GameOutcome = MedicalGameOutcome
REWARD_COEFF_CONFIG = MEDICAL_REWARD_COEFF_CONFIG
convert_game_history_to_messages = convert_medical_game_history_to_messages
cot_format_check_and_extract = medical_cot_format_check_and_extract
get_cot_formatting_reward = get_medical_cot_formatting_reward
get_redteaming_game_reward_general_sum = get_medical_game_reward_general_sum
get_redteaming_game_reward_zero_sum = get_medical_game_reward_general_sum
"""The original's name for the same table, whose sum is not zero."""
