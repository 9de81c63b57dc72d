"""Reward schemes: pure functions from a judged game to named reward components of each role.

Called by the reward manager, and by anyone who wants to score old records again. To add a scheme,
write a function ``GameRecord -> Rewards`` and put it into ``SCHEMES``.
"""

from __future__ import annotations

from collections.abc import Callable

from medserl_agentloop.game.edits import same_sentence
from medserl_agentloop.game.records import GameRecord, Outcome, Rewards
from medserl_agentloop.game.types import Category, Role

RewardScheme = Callable[[GameRecord], Rewards]

ASSESSOR_GAME = {
    Outcome.CORRECT_DETECTION: 1.0,
    Outcome.CORRECT_REJECTION: 1.0,
    Outcome.MISSED_ERROR: -1.0,
    Outcome.FALSE_POSITIVE: -1.0,
    Outcome.UNREADABLE: 0.0,
}
"""The game itself, seen by the assessor; the attacker gets the opposite."""

FORMAT_VIOLATED = -0.5
UNREADABLE_ASSESSMENT = -2.0
"""Worse than a wrong answer in bad form (-1.5), so that silence is never the safe choice. It is a
format term because an answer nobody can read is no merit of the attacker's."""

ZERO_SUM_INVALID_ATTACK = -1.0

MEDSERL_INVALID_ATTACK = -2.0
"""Twice a lost game: at -1 an attacker that expects to be caught has no reason to stay valid."""
MEDSERL_SENTENCE = 0.5
MEDSERL_ERROR_TYPE = 0.25
MEDSERL_FAITHFULNESS = -0.25
"""Cost of an edit as large as the limits allow; smaller ones cost their share of it."""


def zero_sum(record: GameRecord) -> Rewards:
    """Assessor right +1, wrong -1, the attacker the opposite; an invalid attack -1.

    Format terms come on top, so the components named ``game`` sum to 0 wherever both roles are
    rewarded.
    """
    return _core(record, invalid_attack=ZERO_SUM_INVALID_ATTACK)


def medserl(record: GameRecord) -> Rewards:
    """The zero-sum core, and partial credit for what a useful player does besides winning.

    The assessor earns more for naming the wrong sentence and, where the data knows it, the error's
    type; the attacker pays for the size of its edit and twice for an invalid one.
    """
    rewards = _core(record, invalid_attack=MEDSERL_INVALID_ATTACK)
    if record.attack is not None and record.attack.invalid is None and Role.ATTACKER in rewards:
        rewards[Role.ATTACKER]["faithfulness"] = 0.0 + MEDSERL_FAITHFULNESS * record.attack.edit_share
    if record.outcome is Outcome.CORRECT_DETECTION and record.assessment is not None:
        said = record.assessment
        assessor = rewards[Role.ASSESSOR]
        if record.error_sentences:
            found = said.sentence is not None and any(same_sentence(said.sentence, s) for s in record.error_sentences)
            assessor["sentence"] = MEDSERL_SENTENCE * found
        # Of a rewritten note nobody knows the type but a judge; the seed's type may not hold.
        if record.category is Category.VANILLA_HARMFUL and record.spec.error_type is not None:
            assessor["error_type"] = MEDSERL_ERROR_TYPE * (said.error_type is record.spec.error_type)
    return rewards


SCHEMES: dict[str, RewardScheme] = {"medserl": medserl, "zero_sum": zero_sum}


def _core(record: GameRecord, *, invalid_attack: float) -> Rewards:
    outcome = record.outcome
    if outcome is Outcome.VOID:
        return {}
    rewards: Rewards = {}
    if record.attack is not None:
        attacker = rewards[Role.ATTACKER] = {}
        if outcome is Outcome.INVALID_ATTACK:
            attacker["validity"] = invalid_attack
        else:
            attacker["game"] = 0.0 - ASSESSOR_GAME[outcome]
        attacker["format"] = FORMAT_VIOLATED if record.attack.violations else 0.0
    if record.assessment is not None:
        unreadable = outcome is Outcome.UNREADABLE
        rewards[Role.ASSESSOR] = {
            "game": ASSESSOR_GAME[outcome],
            "format": UNREADABLE_ASSESSMENT
            if unreadable
            else (FORMAT_VIOLATED if record.assessment.violations else 0.0),
        }
    return rewards
