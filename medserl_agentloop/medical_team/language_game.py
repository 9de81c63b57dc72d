"""The game manager under the module name that OpenRLHF's trainer imports it from."""

from medserl_agentloop.medical_team.medical_game_manager import (
    MedicalDialogueGameManager as MedicalDialogueGameManager,
)
