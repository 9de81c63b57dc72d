"""The four functions that OpenRLHF's trainer asks for, as :mod:`.utils` has them."""

from __future__ import annotations

from medserl_agentloop.medical_team.utils import (
    convert_medical_game_history_to_messages,
    get_medical_cot_formatting_reward,
    get_medical_game_reward_general_sum,
    medical_cot_format_check_and_extract,
)

__all__ = [
    "convert_medical_game_history_to_messages",
    "get_medical_cot_formatting_reward",
    "get_medical_game_reward_general_sum",
    "medical_cot_format_check_and_extract",
]
