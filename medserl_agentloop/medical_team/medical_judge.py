"""The judge under the module name that the baseline's users import it from; it loads no model."""

from __future__ import annotations

from medserl_agentloop.medical_team.remote_judge import create_medical_judge_remote_function

__all__ = ["create_medical_judge_remote_function"]
