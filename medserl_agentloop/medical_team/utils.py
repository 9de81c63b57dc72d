"""Rewards and the format check of the OpenRLHF system, and the reward schemes made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from medserl_agentloop.games.medical.case import Label, Role
from medserl_agentloop.games.medical.records import MedicalRecord, Outcome, Rewards
from medserl_agentloop.games.medical.rewards import RewardScheme
from medserl_agentloop.medical_team.formats import BASELINE
from medserl_agentloop.medical_team.prompts import (  # noqa: F401  the original has them here
    convert_medical_game_history_to_messages,
    convert_medical_game_history_to_query,
)

GENERAL_SUM = "medical_general_sum"

MEDICAL_REWARD_COEFF_CONFIG: dict[str, Any] = {
    "cot_format_violation": (-1.0, 1.0),  # violated, kept
    GENERAL_SUM: {  # each as (lost, won)
        "attacker": {
            # an error that is there: detected, undetected; without an error it is 0
            "error_detected": (-1.0, 1.0),
            "error_realism": (-0.5, 0.5),
        },
        "assessor": {
            "error_detection": (-1.0, 1.0),
            "explanation_quality": (-0.5, 0.5),  # nothing uses it, as in the original
        },
    },
}
"""Sets of coefficients by name; more can be added. docs/rewards.md lists an attacker's gains."""


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

_DETECTION = {  # by role, error present, error detected; the attacker of no error has no outcome
    (Role.ATTACKER, True, False): MedicalGameOutcome.ATTACKER_ERROR_UNDETECTED,
    (Role.ATTACKER, True, True): MedicalGameOutcome.ATTACKER_ERROR_DETECTED,
    (Role.ASSESSOR, True, True): MedicalGameOutcome.ASSESSOR_CORRECT_DETECTION,
    (Role.ASSESSOR, True, False): MedicalGameOutcome.ASSESSOR_MISSED_ERROR,
    (Role.ASSESSOR, False, False): MedicalGameOutcome.ASSESSOR_CORRECT_REJECTION,
    (Role.ASSESSOR, False, True): MedicalGameOutcome.ASSESSOR_FALSE_POSITIVE,
}


def medical_cot_format_check_and_extract(response: str) -> tuple[tuple[str | None, str], bool]:
    """``((thinking, answer), violated)`` of ``thinking</think><answer>...</answer>``.

    If violated, thinking is None and the answer that of the last tags: empty without, never the
    raw response.
    """
    turn = BASELINE.attack(response)
    violated = bool(turn.violations)
    return (None if violated else turn.reasoning, turn.note or ""), violated


def get_medical_cot_formatting_reward(cot_format_violation: bool) -> float:
    """Return a role's reward for the format of its turn."""
    reward: float = MEDICAL_REWARD_COEFF_CONFIG["cot_format_violation"][not cot_format_violation]
    return reward


def get_medical_error_detection_reward(
    role: str,
    error_detected: bool,
    error_present: bool,
    error_type: str | None = None,
    reward_coeff_config: str = GENERAL_SUM,
) -> Reward:
    """Return the reward of ``role`` for the verdict, and the outcome. ``error_type`` is unused."""
    player, detected, present = Role(role), bool(error_detected), bool(error_present)
    terms = _coefficients(reward_coeff_config)[player.value]
    if player is Role.ASSESSOR:
        reward = terms["error_detection"][detected is present]
    else:
        reward = terms["error_detected"][not detected] if present else 0.0
    outcome = _DETECTION.get((player, present, detected))
    return reward, {outcome} if outcome else set()


def get_medical_error_realism_reward(
    role: str, error_realistic: bool, reward_coeff_config: str = GENERAL_SUM
) -> Reward:
    """Return the attacker's reward for a realistic error, and the outcome; none for an assessor."""
    terms = _coefficients(reward_coeff_config)["attacker"]
    if Role(role) is Role.ASSESSOR:
        return 0.0, set()
    if error_realistic:
        return terms["error_realism"][True], {MedicalGameOutcome.ATTACKER_REALISTIC_ERROR}
    return terms["error_realism"][False], {MedicalGameOutcome.ATTACKER_UNREALISTIC_ERROR}


def get_medical_game_reward_general_sum(
    gamedata: Mapping[str, Any], labels: Mapping[str, Any], reward_coeff_config: str = GENERAL_SUM
) -> Reward:
    """Return the reward of ``gamedata["game_role"]`` without the format term, and the outcomes."""
    role, config = gamedata["game_role"], reward_coeff_config
    verdict = (labels.get("error_detected", False), labels.get("error_present", False))
    detection, outcomes = get_medical_error_detection_reward(role, *verdict, None, config)
    realistic = labels.get("error_realistic", True)
    realism, more = get_medical_error_realism_reward(role, realistic, config)
    return detection + realism, outcomes | more


def _coefficients(name: str) -> Any:
    known = MEDICAL_REWARD_COEFF_CONFIG.keys() - {"cot_format_violation"}
    if name not in known:
        raise ValueError(f"no reward coefficients {name!r}: use one of {', '.join(sorted(known))}")
    return MEDICAL_REWARD_COEFF_CONFIG[name]


@dataclass(frozen=True)
class MedicalGeneralSum(RewardScheme):
    """Detection, realism (attacker) and format, added up.

    The attacker's total is in [-2.5, 2.5], the assessor's in [-2, 2]. As in the original, an
    invalid attack presents no error and is realistic, and an unreadable verdict does not claim an
    error. Without ``chain_of_thought`` there is no format term.
    """

    chain_of_thought: bool = True

    def rewards(self, record: MedicalRecord) -> Rewards:
        invalid = record.outcome is Outcome.INVALID_ATTACK
        present = record.label is Label.HARMFUL and not invalid
        detected = record.assessment is not None and record.assessment.verdict is Label.HARMFUL
        realistic = record.judgement is None or record.judgement.realistic is not False
        rewards: Rewards = {}
        for role, turn in ((Role.ATTACKER, record.attack), (Role.ASSESSOR, record.assessment)):
            if turn is None:
                continue
            parts = {"detection": get_medical_error_detection_reward(role, detected, present)[0]}
            if role is Role.ATTACKER:
                parts["realism"] = get_medical_error_realism_reward(role, realistic)[0]
            if self.chain_of_thought:
                parts["format"] = get_medical_cot_formatting_reward(bool(turn.violations))
            rewards[role] = parts
        return rewards


@dataclass(frozen=True)
class MedicalGeneralSumNoCot(MedicalGeneralSum):
    """The same without the reward for the format."""

    chain_of_thought: bool = False
