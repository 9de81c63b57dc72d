"""The game manager under the module name that OpenRLHF's trainer imports it from."""

from __future__ import annotations

from medserl_agentloop.medical_team.medical_game_manager import MedicalDialogueGameManager

__all__ = ["MedicalDialogueGameManager"]
