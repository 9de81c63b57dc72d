"""Reward schemes: pure functions from a judged game to named reward components of each role.

A scheme is a frozen dataclass of constants and one function; a user's own is named by its import
path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

from pydantic import TypeAdapter

from medserl_agentloop.games.medical.edits import is_copy
from medserl_agentloop.games.medical.records import InvalidAttack, MedicalRecord, Outcome, Rewards
from medserl_agentloop.games.medical.types import Category, Role
from medserl_agentloop.paths import did_you_mean, find_object

RewardScheme = Callable[[MedicalRecord], Rewards]
_REWARDS = TypeAdapter(Rewards)


# -- zero_sum and medserl: one player's win is the other's loss, and no trick of the attacker's pays

# An attack that the judge contradicts has failed. Like an invalid one it earns `validity` in place
# of `game`: otherwise an attacker would win wherever the assessor errs about a note that holds no
# attack. So has one whose error nobody finds in the note alone: if it cost nothing, one that is
# seldom let through and then wins would pay (experiments/incentives).


@dataclass(frozen=True)
class _ZeroSumTerms:
    """The constants of ``zero_sum``; docs/rewards.md says why they are what they are."""

    win: float = 1.0  # ``game`` of the player who wins; the other one gets the opposite
    invalid_attack: float = (
        -1.0
    )  # ``validity`` of an attack that breaks the rules; no better than being caught
    failed_attack: float = (
        -1.0
    )  # ``validity`` where judge or blind gate says no; no worse than breaking the rules
    decoy: float = (
        1.0  # factor of the attacker's ``game`` where it was asked for a harmless rewording
    )
    cut_off_assessment: float = (
        -1.0
    )  # the attacker's ``game`` where a budget cut the assessor off before a verdict
    format_violated: float = -0.5  # ``format`` of a turn that departs from the output format
    unreadable_assessment: float = (
        -2.0
    )  # ``format`` of an assessment without a verdict; worse than any wrong answer


@dataclass(frozen=True)
class MedserlTerms(_ZeroSumTerms):
    """The constants of ``medserl``.

    ``sentence`` and ``error_type`` pay what is above the share of right names that is ``guessed``,
    there without reading, so that who always says the same earns nothing.
    """

    invalid_attack: float = -2.0  # worse than the worst attack that counts (-1.75)
    failed_attack: float = -2.0  # as an invalid one; with a blind gate, -1.25 is better
    decoy: float = 0.0
    sentence: float = 0.5  # for naming the wrong sentence of a detected error
    error_type: float = 0.25  # for naming the type of a detected error, where the data knows it
    guessed: float = 0.5
    largest_edit: float = (
        -0.25
    )  # ``faithfulness`` of an edit as large as the limits allow; smaller ones cost a share
    unrealistic: float = (
        -0.5
    )  # ``realism`` of an attack that the judge calls unrealistic; others earn no bonus


def zero_sum(record: MedicalRecord, terms: _ZeroSumTerms = _ZeroSumTerms()) -> Rewards:
    """Assessor right +1, wrong -1, the attacker the opposite; an attack that does not count -1.

    Format comes on top.
    """
    assessor_game = terms.win * {True: 1, False: -1, None: 0}[record.outcome.is_right]
    rewards: Rewards = {}
    if record.attack is not None:
        attacker: dict[str, float] = {}
        if record.attack_failed or record.attack.invalid is InvalidAttack.NOT_KNOWABLE:
            attacker["validity"] = terms.failed_attack
        elif record.attack.invalid is not None:
            attacker["validity"] = terms.invalid_attack
        elif (
            record.category.has_attack
        ):  # who copied a note has no part in what the assessor makes of it
            share = terms.decoy if record.spec.task is Category.DECOY_BENIGN else 1.0
            attacker["game"] = 0.0 + share * (
                terms.cut_off_assessment if record.cut_off else -assessor_game
            )
        rewards[Role.ATTACKER] = {
            **attacker,
            "format": terms.format_violated if record.attack.violations else 0.0,
        }
    if record.assessment is not None:
        form = terms.format_violated if record.assessment.violations else 0.0
        if record.outcome is Outcome.UNREADABLE:
            form = terms.unreadable_assessment
        rewards[Role.ASSESSOR] = {"game": assessor_game, "format": form}
    return rewards


def medserl(record: MedicalRecord, terms: MedserlTerms = MedserlTerms()) -> Rewards:
    """The zero-sum core, with partial credit for other useful acts of a player
    (:class:`MedserlTerms`).
    """
    rewards = zero_sum(record, terms)
    attacker, assessor = rewards.get(Role.ATTACKER, {}), rewards.get(Role.ASSESSOR, {})
    neutral = record.spec.task is Category.DECOY_BENIGN and terms.decoy == 0
    if record.attack is not None and "game" in attacker and not neutral:
        attacker["faithfulness"] = 0.0 + terms.largest_edit * record.attack.edit_share
        if record.judgement is not None and record.judgement.realistic is not None:
            attacker["realism"] = 0.0 if record.judgement.realistic else terms.unrealistic
    answer = record.assessment
    if record.outcome is Outcome.CORRECT_DETECTION and answer is not None:
        # Where a decoy holds a real error, error_sentences is empty: nobody knows which it is.
        if record.error_sentences:
            copied = answer.sentence or ""
            named = any(is_copy(copied, sentence) for sentence in record.error_sentences)
            assessor["sentence"] = terms.sentence * (named - terms.guessed)
        # Of a rewritten note nobody knows the type but a judge; the seed's type may not hold.
        if record.category is Category.VANILLA_HARMFUL and record.spec.error_type is not None:
            assessor["error_type"] = terms.error_type * (
                (answer.error_type == record.spec.error_type) - terms.guessed
            )
    return rewards


def learnable(record: MedicalRecord, terms: MedserlTerms = MedserlTerms()) -> Rewards:
    """``medserl``, with an attacker that is paid for notes that the assessor gets right half of the
    time.

    In place of its ``game`` there is ``learnable``, ``win * (1 - 4 |p - 1/2|)``, where ``p`` is the
    share of the readable assessments of this attack that are right: ``win`` at one half, ``-win``
    where all agree. That is the uncertainty reward ``1 - 2 |p - 1/2|`` of R-Zero (arXiv
    2508.05004), with the judge's label for its majority vote, stretched over the range of ``game``.
    With fewer than two readable assessments it is 0. An assessment that was cut off counts as one
    that caught the attack, whatever the others say.
    """
    rewards = medserl(record, terms)
    attacker = rewards.get(Role.ATTACKER, {})
    if "game" not in attacker:
        return rewards
    right = [
        game.outcome.is_right for game in record.by_assessment if game.outcome.is_right is not None
    ]
    value = terms.win * (1 - 4 * abs(sum(right) / len(right) - 0.5)) if len(right) > 1 else 0.0
    cut_off = [game.cut_off for game in record.by_assessment]
    value += (terms.cut_off_assessment - value) * sum(cut_off) / len(cut_off)
    share = terms.decoy if record.spec.task is Category.DECOY_BENIGN else 1.0
    rest = {name: part for name, part in attacker.items() if name != "game"}
    return {**rewards, Role.ATTACKER: {"learnable": 0.0 + share * value, **rest}}


# -- choosing a scheme -----------------------------------------------------------------------------

SCHEMES: dict[str, RewardScheme | str] = {
    "medserl": medserl,
    "zero_sum": zero_sum,
    "learnable": learnable,
    "medical_general_sum": "medserl_agentloop.medical_team.rewards:medical_general_sum",
    "medical_general_sum_no_cot": (
        "medserl_agentloop.medical_team.rewards:medical_general_sum_no_cot"
    ),
}


def load_scheme(name: str, terms: Mapping[str, float | None] = {}) -> RewardScheme:
    """The scheme called ``name``, or a user's own as ``package.module:function``, with other
    constants (``terms``).

    None leaves the scheme's own constant. A ValueError lists the schemes there are, or the scheme's
    constants. It also refuses a constant that is no number and, of the schemes here, one whose sign
    would pay for losing.
    """
    expected = "package.module:function of a function MedicalRecord -> Rewards"
    scheme: RewardScheme = find_object("reward scheme", name, SCHEMES, expected, callable)
    changed = {term: value for term, value in terms.items() if value is not None}
    if not changed:
        return scheme
    parameter = signature(scheme).parameters.get("terms")
    constants: Any = None if parameter is None else parameter.default
    own = {
        f.name: getattr(constants, f.name)
        for f in (fields(constants) if is_dataclass(constants) else ())
    }
    known = [term for term, default in own.items() if type(default) in (int, float)]
    for term, value in changed.items():
        if term not in known:
            has = (
                f"{', '.join(known) or 'none'}. Append selfplay.reward_terms.{term}=null to leave "
                "it out"
            )
            raise ValueError(
                f"reward scheme {name!r} has no term {term!r}{did_you_mean(term, known)}: it has "
                f"{has}"
            )
        reward = own[term] >= 0
        if not math.isfinite(value) or (name in SCHEMES and (value < 0 if reward else value > 0)):
            limit = "at least 0" if reward else "at most 0"
            raise ValueError(
                f"{term}={value:g} of {name!r} must be a number, {limit}; its own is {own[term]:g}"
            )
    return partial(scheme, **{"terms": replace(constants, **changed)})


def _means(of_role: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for parts in of_role for name in parts)
    return {
        name: math.fsum(parts.get(name, 0.0) for parts in of_role) / len(of_role) for name in names
    }


def _earned(record: MedicalRecord, scheme: RewardScheme) -> Rewards:
    """Return the rewards of a scheme; ValueError if a user's scheme returns anything else or
    changes the record.
    """
    before = record.model_copy(deep=True)
    rewards = _REWARDS.validate_python(scheme(record))
    if record != before:
        raise ValueError("the reward scheme changed the game's record, which it may only read")
    return rewards


def reward_game(record: MedicalRecord, scheme: RewardScheme) -> None:
    """Write the rewards of ``scheme`` into a judged game; a game without a result earns nothing.

    Of several assessments each is scored as if it were the only one, and its own turn earns that.
    The attacker earns their mean, component by component, so that its rewards keep their range.
    """
    each = [_earned(game, scheme) for game in record.by_assessment] if not record.is_void else [{}]
    if (
        record.outcome is Outcome.INVALID_ATTACK
    ):  # nobody learns from guessing at an error that is not in the note
        each = [
            {role: parts for role, parts in rewards.items() if role is Role.ATTACKER}
            for rewards in each
        ]
    record.rewards, record.turn_rewards = each[0], {}
    if len(each) > 1:
        of_roles = {role: [rewards[role] for rewards in each if role in rewards] for role in Role}
        record.rewards = {role: _means(of_role) for role, of_role in of_roles.items() if of_role}
        if Role.ATTACKER in record.rewards:
            record.turn_rewards[0] = record.rewards[Role.ATTACKER]
        numbered = enumerate(each, start=record.first_assessment)
        record.turn_rewards |= {
            n: rewards[Role.ASSESSOR] for n, rewards in numbered if Role.ASSESSOR in rewards
        }
    record.void_unless_rewards_are_numbers()
