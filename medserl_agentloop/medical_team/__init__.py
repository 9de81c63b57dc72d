"""The OpenRLHF baseline's interface, on top of this package's game: code written for it runs unchanged.

docs/medical_team.md lists what is the same and what differs on purpose.
"""

from __future__ import annotations

from medserl_agentloop.medical_team.medical_game_manager import MedicalDialogueGameManager, MedicalGameState
from medserl_agentloop.medical_team.remote_judge import (
    create_medical_judge_remote_function,
    test_judge_connection,
    wait_for_judge_server,
)
from medserl_agentloop.medical_team.utils import (
    MEDICAL_REWARD_COEFF_CONFIG,
    MedicalGameOutcome,
    convert_medical_game_history_to_messages,
    get_medical_cot_formatting_reward,
    get_medical_error_detection_reward,
    get_medical_error_realism_reward,
    get_medical_game_reward_general_sum,
    medical_cot_format_check_and_extract,
)

__all__ = [
    "MEDICAL_REWARD_COEFF_CONFIG",
    "MedicalDialogueGameManager",
    "MedicalGameOutcome",
    "MedicalGameState",
    "convert_medical_game_history_to_messages",
    "create_medical_judge_remote_function",
    "get_medical_cot_formatting_reward",
    "get_medical_error_detection_reward",
    "get_medical_error_realism_reward",
    "get_medical_game_reward_general_sum",
    "medical_cot_format_check_and_extract",
    "test_judge_connection",
    "wait_for_judge_server",
]
