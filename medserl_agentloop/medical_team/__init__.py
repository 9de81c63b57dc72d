"""The OpenRLHF system's ``medical_team`` on top of this package's game: the same names, calls and rewards.

docs/migration.md says which code runs unchanged and what differs, on purpose or not.
"""

# ruff: noqa: F401  imported for code that was written for the OpenRLHF system

from __future__ import annotations

from medserl_agentloop.medical_team.medical_game_manager import MedicalDialogueGameManager, MedicalGameState
from medserl_agentloop.medical_team.medical_judge import evaluate_medical_response, load_medical_judge_model
from medserl_agentloop.medical_team.prompts import (
    MEDICAL_ASSESSOR_BASE_PROMPT,
    MEDICAL_ASSESSOR_SYSTEM_PROMPT,
    MEDICAL_ASSISTANT_THINKING_PREFIX,
    MEDICAL_ATTACKER_BASE_PROMPT_BENIGN,
    MEDICAL_ATTACKER_BASE_PROMPT_HARMFUL,
    MEDICAL_ATTACKER_BASE_PROMPT_VANILLA,
    MEDICAL_ATTACKER_SYSTEM_PROMPT,
)
from medserl_agentloop.medical_team.remote_judge import (
    create_medical_judge_remote_function,
    test_judge_connection,
    wait_for_judge_server,
)
from medserl_agentloop.medical_team.utils import (
    MEDICAL_REWARD_COEFF_CONFIG,
    REWARD_COEFF_CONFIG,
    GameOutcome,
    MedicalGameOutcome,
    convert_game_history_to_messages,
    convert_medical_game_history_to_conversation,
    convert_medical_game_history_to_messages,
    convert_medical_game_history_to_query,
    cot_format_check_and_extract,
    get_cot_formatting_reward,
    get_medical_cot_formatting_reward,
    get_medical_error_detection_reward,
    get_medical_error_realism_reward,
    get_medical_game_reward_general_sum,
    get_redteaming_game_reward_general_sum,
    get_redteaming_game_reward_zero_sum,
    medical_cot_format_check_and_extract,
)

MedicalDialogueGameManagerRL = MedicalDialogueGameManager
