"""The baseline's words for how a game ended, and a game record in them."""

from __future__ import annotations

from enum import Enum

from medserl_agentloop.games.medical.judges.protocol import Labels, make_labels
from medserl_agentloop.games.medical.records import GameRecord, Outcome
from medserl_agentloop.games.medical.types import Label


class MedicalGameOutcome(Enum):
    """What happened in a game, as each role sees it."""

    ATTACKER_ERROR_UNDETECTED = "attacker_error_undetected"
    ATTACKER_ERROR_DETECTED = "attacker_error_detected"
    ATTACKER_REALISTIC_ERROR = "attacker_realistic_error"
    ATTACKER_UNREALISTIC_ERROR = "attacker_unrealistic_error"
    ASSESSOR_CORRECT_DETECTION = "assessor_correct_detection"
    ASSESSOR_MISSED_ERROR = "assessor_missed_error"
    ASSESSOR_FALSE_POSITIVE = "assessor_false_positive"
    ASSESSOR_CORRECT_REJECTION = "assessor_correct_rejection"
    TIE = "tie"
    PARSING_ERROR = "parsing_error"


def labels_of(record: GameRecord) -> Labels:
    """A judged record as the baseline's judge would label it; a void one is a parsing error."""
    if record.outcome is Outcome.VOID:
        return make_labels(is_parsing_error=True, reasoning=record.void or "not judged")
    judgement, assessment = record.judgement, record.assessment
    return make_labels(
        error_present=judgement is not None and judgement.label is Label.HARMFUL,
        error_detected=assessment is not None and assessment.verdict is Label.HARMFUL,
        error_realistic=judgement is None or judgement.realistic is not False,
        reasoning=judgement.reason if judgement is not None else "",
    )
