"""The OpenRLHF system's ``medical_team`` on top of this package's game: the same names, calls and
rewards.

docs/migration.md says which code runs unchanged and what differs, on purpose or not. All names of
the modules are here.
"""

# ruff: noqa: F401, F403  imported for code that was written for the OpenRLHF system

from __future__ import annotations

from medserl_agentloop.medical_team.medical_game_manager import (
    MedicalDialogueGameManager,
    MedicalGameState,
)
from medserl_agentloop.medical_team.prompts import *
from medserl_agentloop.medical_team.remote_judge import (
    create_medical_judge_remote_function,
    test_judge_connection,
    wait_for_judge_server,
)
from medserl_agentloop.medical_team.utils import *

MedicalDialogueGameManagerRL = MedicalDialogueGameManager
