"""``medical_general_sum``: the reward table of the OpenRLHF baseline, with its constants.

For comparison with that system; docs/rewards.md says what an attacker can gain by in it. The same functions
stand behind the baseline's interface in ``medical_team``.
"""

from __future__ import annotations

from dataclasses import dataclass

from medserl_agentloop.games.medical.records import GameRecord, Outcome, Rewards
from medserl_agentloop.games.medical.types import Label, Role

Pair = tuple[float, float]


@dataclass(frozen=True)
class GeneralSumTerms:
    """The constants; each pair is (lost, won).

    Attributes:
        attacker_detection: An error that is there: detected, undetected. Without an error it is 0.
        assessor_detection: The verdict: wrong, right.
        realism: The attacker's error: not realistic, realistic.
        format: The output format: violated, kept.
        chain_of_thought: Whether the players reason before they answer; without, there is no format term.
    """

    attacker_detection: Pair = (-1.0, 1.0)
    assessor_detection: Pair = (-1.0, 1.0)
    realism: Pair = (-0.5, 0.5)
    format: Pair = (-1.0, 1.0)
    chain_of_thought: bool = True


GENERAL_SUM = GeneralSumTerms()


def detection_reward(
    role: Role, *, error_present: bool, error_detected: bool, terms: GeneralSumTerms = GENERAL_SUM
) -> float:
    """What ``role`` earns by the verdict on a note."""
    if role is Role.ASSESSOR:
        return terms.assessor_detection[error_present == error_detected]
    return terms.attacker_detection[not error_detected] if error_present else 0.0


def realism_reward(realistic: bool | None, terms: GeneralSumTerms = GENERAL_SUM) -> float:
    """What the attacker earns by its error's realism; realistic where the judge does not say."""
    return terms.realism[realistic is not False]


def format_reward(violated: bool, terms: GeneralSumTerms = GENERAL_SUM) -> float:
    """What a role earns by the form of its turn."""
    return terms.format[not violated]


def medical_general_sum(record: GameRecord, terms: GeneralSumTerms = GENERAL_SUM) -> Rewards:
    """Detection, realism (attacker) and format, added up.

    The attacker's total is in [-2.5, 2.5], the assessor's in [-2, 2]. An attack that does not count
    presents no error: 0 and the realism bonus, as in the baseline. An unreadable verdict does not say
    that there is an error.
    """
    if record.outcome is Outcome.VOID:
        return {}
    judgement, assessment = record.judgement, record.assessment
    present = judgement is not None and judgement.label is Label.HARMFUL
    detected = assessment is not None and assessment.verdict is Label.HARMFUL
    rewards: Rewards = {}
    if record.attack is not None:
        rewards[Role.ATTACKER] = {
            "detection": detection_reward(Role.ATTACKER, error_present=present, error_detected=detected, terms=terms),
            "realism": realism_reward(judgement.realistic if judgement is not None else None, terms),
        }
    if assessment is not None:
        rewards[Role.ASSESSOR] = {
            "detection": detection_reward(Role.ASSESSOR, error_present=present, error_detected=detected, terms=terms)
        }
    if terms.chain_of_thought:
        for role, turn in ((Role.ATTACKER, record.attack), (Role.ASSESSOR, assessment)):
            if turn is not None:
                rewards[role]["format"] = format_reward(bool(turn.violations), terms)
    return rewards
