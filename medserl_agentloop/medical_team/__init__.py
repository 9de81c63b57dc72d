"""The OpenRLHF system's ``medical_team`` on top of this package's game: its names, calls, rewards.

docs/migration.md says which code runs unchanged and what differs. The original's prompts are in
``prompts``.
"""

# ruff: noqa: F401  imported for code that was written for the OpenRLHF system

from __future__ import annotations

from medserl_agentloop.medical_team.medical_game_manager import (
    MedicalDialogueGameManager,
    MedicalGameState,
)
from medserl_agentloop.medical_team.prompts import (
    convert_medical_game_history_to_messages,
    convert_medical_game_history_to_query,
)
from medserl_agentloop.medical_team.remote_judge import (
    create_medical_judge_remote_function,
    test_judge_connection,
    wait_for_judge_server,
)
from medserl_agentloop.medical_team.utils import (
    MEDICAL_REWARD_COEFF_CONFIG,
    MedicalGameOutcome,
    get_medical_cot_formatting_reward,
    get_medical_error_detection_reward,
    get_medical_error_realism_reward,
    get_medical_game_reward_general_sum,
    medical_cot_format_check_and_extract,
)

MedicalDialogueGameManagerRL = MedicalDialogueGameManager
