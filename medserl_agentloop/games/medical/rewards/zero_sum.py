"""``zero_sum`` and ``medserl``: one player's win is the other's loss, and no trick of the attacker's pays.

An attack counts as failed when the judge contradicts the row: nothing was injected, or a decoy came out with
a real error. Like an invalid one it earns the attacker ``validity`` in place of ``game``; otherwise an
attacker would win wherever the assessor errs about a note that holds no attack. The assessor was asked about
the note as it is, so the judge's label decides its ``game``.
"""

from __future__ import annotations

from dataclasses import dataclass

from medserl_agentloop.games.medical.edits import same_sentence
from medserl_agentloop.games.medical.records import GameRecord, Outcome, Rewards
from medserl_agentloop.games.medical.types import Category, Role


@dataclass(frozen=True)
class ZeroSumTerms:
    """The constants of ``zero_sum``.

    Attributes:
        win: ``game`` of the player who wins; the other one gets the opposite.
        invalid_attack: ``validity`` of an attack that is invalid or failed. No better than being caught.
        format_violated: ``format`` of a turn that departs from the output format.
        unreadable_assessment: ``format`` of an assessment without a verdict. Worse than a wrong answer in
            bad form (-1.5), so that silence is never the safe choice. It is a format term because an
            answer nobody can read is no merit of the attacker's.
    """

    win: float = 1.0
    invalid_attack: float = -1.0
    format_violated: float = -0.5
    unreadable_assessment: float = -2.0


@dataclass(frozen=True)
class MedserlTerms(ZeroSumTerms):
    """The constants of ``medserl``.

    Attributes:
        invalid_attack: Worse than the worst attack that counts (-1.75): at -1 an attacker that expects to be
            caught has no reason to stay valid.
        sentence: For naming the wrong sentence of a detected error.
        error_type: For naming the type of a detected error, where the data knows it.
        largest_edit: ``faithfulness`` of an edit as large as the limits allow; smaller ones cost their share.
        unrealistic: ``realism`` of an attack that the judge calls unrealistic. There is no bonus for the
            others, so that nothing is earned from a judge that does not say.
    """

    invalid_attack: float = -2.0
    sentence: float = 0.5
    error_type: float = 0.25
    largest_edit: float = -0.25
    unrealistic: float = -0.5


ZERO_SUM = ZeroSumTerms()
MEDSERL = MedserlTerms()


def zero_sum(record: GameRecord, terms: ZeroSumTerms = ZERO_SUM) -> Rewards:
    """Assessor right +1, wrong -1, the attacker the opposite; an attack that does not count -1.

    Format terms come on top. The components named ``game`` sum to 0 wherever both roles have one; where
    the attacker has none it has ``validity``, or was only asked for a copy.
    """
    if record.outcome is Outcome.VOID:
        return {}
    assessor_game = terms.win * {True: 1, False: -1, None: 0}[record.outcome.is_right]
    rewards: Rewards = {}
    if record.attack is not None:
        attacker: dict[str, float] = {}
        if record.attack.invalid is not None or record.attack_failed:
            attacker["validity"] = terms.invalid_attack
        elif record.category.has_attack:  # who copied a note has no part in what the assessor makes of it
            attacker["game"] = 0.0 - assessor_game
        rewards[Role.ATTACKER] = {**attacker, "format": terms.format_violated if record.attack.violations else 0.0}
    if record.assessment is not None:
        if record.outcome is Outcome.UNREADABLE:
            form = terms.unreadable_assessment
        else:
            form = terms.format_violated if record.assessment.violations else 0.0
        rewards[Role.ASSESSOR] = {"game": assessor_game, "format": form}
    return rewards


def medserl(record: GameRecord, terms: MedserlTerms = MEDSERL) -> Rewards:
    """The zero-sum core, and partial credit for what a useful player does besides winning.

    The assessor earns more for naming the wrong sentence and, where the data knows it, the error's
    type; the attacker pays for the size of its edit, for an unrealistic one, and twice for one that does
    not count.
    """
    rewards = zero_sum(record, terms)
    attacker, assessor = rewards.get(Role.ATTACKER, {}), rewards.get(Role.ASSESSOR, {})
    if record.attack is not None and "game" in attacker:
        attacker["faithfulness"] = 0.0 + terms.largest_edit * record.attack.edit_share
        if record.judgement is not None and record.judgement.realistic is not None:
            attacker["realism"] = 0.0 if record.judgement.realistic else terms.unrealistic
    if record.outcome is Outcome.CORRECT_DETECTION and record.assessment is not None:
        said = record.assessment
        # Where a decoy holds a real error, error_sentences is empty: nobody knows which it is.
        if record.error_sentences:
            found = said.sentence is not None and any(same_sentence(said.sentence, s) for s in record.error_sentences)
            assessor["sentence"] = terms.sentence * found
        # Of a rewritten note nobody knows the type but a judge; the seed's type may not hold.
        if record.category is Category.VANILLA_HARMFUL and record.spec.error_type is not None:
            assessor["error_type"] = terms.error_type * (said.error_type is record.spec.error_type)
    return rewards
