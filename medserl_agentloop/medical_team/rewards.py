"""The reward table of the OpenRLHF baseline; docs/rewards.md lists an attacker's gains in it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from medserl_agentloop.games.medical.records import MedicalRecord, Outcome, Rewards
from medserl_agentloop.games.medical.types import Label, Role

Pair = tuple[float, float]


@dataclass(frozen=True)
class GeneralSumTerms:
    """The baseline's constants; each pair is (lost, won)."""

    attacker_detection: Pair = (-1.0, 1.0)  # an error that is there: detected, undetected; without an error it is 0
    assessor_detection: Pair = (-1.0, 1.0)  # the verdict: wrong, right
    realism: Pair = (-0.5, 0.5)  # the attacker's error: not realistic, realistic
    format: Pair = (-1.0, 1.0)  # the output format: violated, kept
    chain_of_thought: bool = True  # whether the players reason before they answer; without, there is no format term


GENERAL_SUM = GeneralSumTerms()


def detection_reward(
    role: Role, *, error_present: bool, error_detected: bool, terms: GeneralSumTerms = GENERAL_SUM
) -> float:
    """Return the reward of ``role`` for the verdict on a note."""
    if role is Role.ASSESSOR:
        return terms.assessor_detection[error_present == error_detected]
    return terms.attacker_detection[not error_detected] if error_present else 0.0


def medical_general_sum(record: MedicalRecord, terms: GeneralSumTerms = GENERAL_SUM) -> Rewards:
    """Detection, realism (attacker) and format, added up.

    The attacker's total is in [-2.5, 2.5], the assessor's in [-2, 2]. As in the baseline, an attack that does not count
    presents no error and has the realism bonus, and an unreadable verdict does not say that there is an error.
    """
    present = record.label is Label.HARMFUL and record.outcome is not Outcome.INVALID_ATTACK
    detected = record.assessment is not None and record.assessment.verdict is Label.HARMFUL
    rewards: Rewards = {}
    for role, turn in ((Role.ATTACKER, record.attack), (Role.ASSESSOR, record.assessment)):
        if turn is None:
            continue
        parts = {"detection": detection_reward(role, error_present=present, error_detected=detected, terms=terms)}
        if role is Role.ATTACKER:
            # Realistic where the judge does not say.
            parts["realism"] = terms.realism[record.judgement is None or record.judgement.realistic is not False]
        if terms.chain_of_thought:
            parts["format"] = terms.format[not turn.violations]
        rewards[role] = parts
    return rewards


medical_general_sum_no_cot = partial(medical_general_sum, terms=GeneralSumTerms(chain_of_thought=False))
