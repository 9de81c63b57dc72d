"""The reward table of the OpenRLHF baseline; docs/rewards.md lists an attacker's gains in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from medserl_agentloop.games.medical.case import Label, Role
from medserl_agentloop.games.medical.records import MedicalRecord, Outcome, Rewards
from medserl_agentloop.games.medical.rewards import RewardScheme

Coefficients = Mapping[str, Mapping[str, tuple[float, float]]]
"""By role and name, as (lost, won)."""

GENERAL_SUM: Coefficients = {
    "attacker": {
        # an error that is there: detected, undetected; without an error it is 0
        "error_detected": (-1.0, 1.0),
        "error_realism": (-0.5, 0.5),
    },
    "assessor": {"error_detection": (-1.0, 1.0), "explanation_quality": (-0.5, 0.5)},
}
"""The baseline's. Nothing uses ``explanation_quality``."""
FORMAT = (-1.0, 1.0)  # the output format: violated, kept


def detection_reward(
    role: Role,
    *,
    error_present: bool,
    error_detected: bool,
    coefficients: Coefficients = GENERAL_SUM,
) -> float:
    """Return the reward of ``role`` for the verdict on a note."""
    if role is Role.ASSESSOR:
        return coefficients["assessor"]["error_detection"][error_present == error_detected]
    return coefficients["attacker"]["error_detected"][not error_detected] if error_present else 0.0


@dataclass(frozen=True)
class MedicalGeneralSum(RewardScheme):
    """Detection, realism (attacker) and format, added up; no format without ``chain_of_thought``
    before the answer.

    The attacker's total is in [-2.5, 2.5], the assessor's in [-2, 2]. As in the baseline, an attack
    that does not count presents no error and has the realism bonus, and an unreadable verdict does
    not say that there is an error.
    """

    chain_of_thought: bool = True

    def rewards(self, record: MedicalRecord) -> Rewards:
        present = record.label is Label.HARMFUL and record.outcome is not Outcome.INVALID_ATTACK
        detected = record.assessment is not None and record.assessment.verdict is Label.HARMFUL
        rewards: Rewards = {}
        for role, turn in ((Role.ATTACKER, record.attack), (Role.ASSESSOR, record.assessment)):
            if turn is None:
                continue
            detection = detection_reward(role, error_present=present, error_detected=detected)
            parts = {"detection": detection}
            if role is Role.ATTACKER:
                # Realistic where the judge does not say.
                realistic = record.judgement is None or record.judgement.realistic is not False
                parts["realism"] = GENERAL_SUM["attacker"]["error_realism"][realistic]
            if self.chain_of_thought:
                parts["format"] = FORMAT[not turn.violations]
            rewards[role] = parts
        return rewards


@dataclass(frozen=True)
class MedicalGeneralSumNoCot(MedicalGeneralSum):
    """The same without the reward for the format."""

    chain_of_thought: bool = False
