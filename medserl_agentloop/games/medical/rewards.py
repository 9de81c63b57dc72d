"""Reward schemes: from a judged game to named reward components of each role.

A scheme is a frozen dataclass of constants with a method. Users name their own scheme by its import
path.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace

from pydantic import TypeAdapter

from medserl_agentloop.games.medical.case import Category, Role
from medserl_agentloop.games.medical.records import InvalidAttack, MedicalRecord, Outcome, Rewards
from medserl_agentloop.paths import did_you_mean, find_object

Counts = dict[str, dict[str, float]]
"""Numbers that a scheme keeps between steps, by group and name; they go into checkpoints."""
_REWARDS = TypeAdapter(Rewards)


class RewardScheme(ABC):
    """A frozen dataclass of constants, with a method that computes rewards."""

    @abstractmethod
    def rewards(self, record: MedicalRecord) -> Rewards:
        """Return the components of each role for a judged game with one assessment."""

    def settle(self, games: Sequence[MedicalRecord], counts: Counts) -> None:  # noqa: B027
        """Complete rewards that depend on earlier training steps.

        Called once a step by the trainer with the step's games, for any number of workers;
        validation never calls it. ``counts`` has the numbers of earlier steps, and is updated.
        """


# -- zero_sum and medserl: one player's win is the other's loss, and no trick of the attacker's pays

# An attack that the judge contradicts has failed. Like an invalid one it earns `validity` in place
# of `game`: otherwise an attacker would win wherever the assessor errs about a note that holds no
# attack. So has one whose error no reader finds in the note alone: if it cost nothing, one that is
# seldom let through and then wins would pay (experiments/incentives).


@dataclass(frozen=True)
class ZeroSum(RewardScheme):
    """The assessor gets +1 if right, -1 if wrong, the attacker the opposite; an invalid attack -1.

    Format is added on top. docs/rewards.md gives the reason of each constant.
    """

    win: float = 1.0  # ``game`` of the player who wins; the other one gets the opposite
    # ``validity`` of an attack that breaks the rules; no better than being caught
    invalid_attack: float = -1.0
    # ``validity`` where judge or blind gate says no; no worse than breaking the rules
    failed_attack: float = -1.0
    # factor of the attacker's ``game`` where it was asked for a harmless rewording
    decoy: float = 1.0
    # the attacker's ``game`` where a budget cut the assessor off before a verdict
    cut_off_assessment: float = -1.0
    format_violated: float = -0.5  # ``format`` of a turn that departs from the output format
    # ``format`` of an assessment without a verdict; worse than any wrong answer
    unreadable_assessment: float = -2.0

    def rewards(self, record: MedicalRecord) -> Rewards:
        assessor_game = self.win * {True: 1, False: -1, None: 0}[record.outcome.is_right]
        rewards: Rewards = {}
        if record.attack is not None:
            attacker: dict[str, float] = {}
            # An attacker that copied a note has no part in the assessor's verdict.
            if record.attack_failed or record.attack.invalid is InvalidAttack.NOT_KNOWABLE:
                attacker["validity"] = self.failed_attack
            elif record.attack.invalid is not None:
                attacker["validity"] = self.invalid_attack
            elif record.category.has_attack:
                won = self.cut_off_assessment if record.cut_off else -assessor_game
                attacker["game"] = 0.0 + self._share(record) * won
            attacker["format"] = self.format_violated if record.attack.violations else 0.0
            rewards[Role.ATTACKER] = attacker
        if record.assessment is not None:
            form = self.format_violated if record.assessment.violations else 0.0
            if record.outcome is Outcome.UNREADABLE:
                form = self.unreadable_assessment
            rewards[Role.ASSESSOR] = {"game": assessor_game, "format": form}
        return rewards

    def _share(self, record: MedicalRecord) -> float:
        return self.decoy if record.spec.task is Category.DECOY_BENIGN else 1.0


@dataclass(frozen=True)
class Medserl(ZeroSum):
    """Zero-sum rewards, with partial credit for other useful behavior.

    ``sentence`` and ``error_type`` pay only above ``guessed``, the share of right names without
    reading.
    """

    invalid_attack: float = -2.0  # worse than the worst attack that counts (-1.75)
    failed_attack: float = -2.0  # as an invalid one; with a blind gate, -1.25 is better
    decoy: float = 0.0
    sentence: float = 0.5  # for naming the wrong sentence of a detected error
    error_type: float = 0.25  # for naming the type of a detected error, where the data knows it
    guessed: float = 0.5
    # ``faithfulness`` of an edit as large as the limits allow; smaller ones cost a share
    largest_edit: float = -0.25
    # ``realism`` of an attack that the judge calls unrealistic; others earn no bonus
    unrealistic: float = -0.5

    def rewards(self, record: MedicalRecord) -> Rewards:
        rewards = super().rewards(record)
        attacker, assessor = rewards.get(Role.ATTACKER, {}), rewards.get(Role.ASSESSOR, {})
        if record.attack is not None and "game" in attacker and self._share(record):
            attacker["faithfulness"] = 0.0 + self.largest_edit * record.attack.edit_share
            if record.judgement is not None and record.judgement.realistic is not None:
                attacker["realism"] = 0.0 if record.judgement.realistic else self.unrealistic
        answer = record.assessment
        if record.outcome is Outcome.CORRECT_DETECTION and answer is not None:
            # Where a decoy holds a real error, error_sentences is empty: it is not known which.
            if record.error_sentences:
                named = record.names_error(answer.sentence or "")
                assessor["sentence"] = self.sentence * (named - self.guessed)
            # For a rewritten note, only a judge knows the type; the seed's type may not hold.
            known = record.spec.error_type
            if record.category is Category.VANILLA_HARMFUL and known is not None:
                right = answer.error_type == known
                assessor["error_type"] = self.error_type * (right - self.guessed)
        return rewards


# -- choosing a scheme -----------------------------------------------------------------------------

_OLD = "medserl_agentloop.medical_team.utils"
SCHEMES: dict[str, type[RewardScheme] | str] = {
    "medserl": Medserl,
    "zero_sum": ZeroSum,
    "medical_general_sum": f"{_OLD}:MedicalGeneralSum",
    "medical_general_sum_no_cot": f"{_OLD}:MedicalGeneralSumNoCot",
}


def load_scheme(name: str, terms: Mapping[str, float | None] = {}) -> RewardScheme:
    """The scheme called ``name``, or a user's as ``package.module:Class``, with ``terms``; None
    keeps the scheme's own value.

    Raises ValueError for an unknown scheme or term, a value that is not a number and, for built-in
    schemes, one whose sign would reward losing.
    """
    expected = "package.module:Class of a subclass of RewardScheme, a frozen dataclass"
    chosen = find_object("reward scheme", name, SCHEMES, expected, _is_scheme)
    scheme: RewardScheme = chosen()
    numbers = {field.name: getattr(scheme, field.name) for field in fields(chosen)}
    numbers = {term: own for term, own in numbers.items() if type(own) in (int, float)}
    changed = {term: value for term, value in terms.items() if value is not None}
    for term, value in changed.items():
        if term not in numbers:
            raise ValueError(
                f"reward scheme {name!r} has no term {term!r}{did_you_mean(term, numbers)}: it has "
                f"{', '.join(numbers) or 'none'}. Append selfplay.reward_terms.{term}=null to "
                "leave it out"
            )
        own = numbers[term]
        losing = name in SCHEMES and (value < 0 if own >= 0 else value > 0)
        if losing or not math.isfinite(value):
            limit = "at least 0" if own >= 0 else "at most 0"
            raise ValueError(
                f"{term}={value:g} of {name!r} must be a number, {limit}; its own is {own:g}"
            )
    return replace(scheme, **changed) if changed else scheme  # type: ignore[type-var]


def _is_scheme(one: object) -> bool:
    return isinstance(one, type) and issubclass(one, RewardScheme) and is_dataclass(one)


def reward_game(record: MedicalRecord, scheme: RewardScheme) -> None:
    """Write the rewards of ``scheme`` into a judged game; a void game earns nothing.

    Each of several assessments is scored as if it were the only one; its own turn earns that. The
    attacker earns the mean of each component, so its rewards keep their range.
    """
    each: list[Rewards] = [{}]
    if not record.is_void:
        each = [_REWARDS.validate_python(scheme.rewards(game)) for game in record.by_assessment]
    if record.outcome is Outcome.INVALID_ATTACK:
        # Guessing at an error that is not in the note teaches nothing.
        for rewards in each:
            rewards.pop(Role.ASSESSOR, None)
    record.rewards, record.turn_rewards = each[0], {}
    if len(each) > 1:
        of_roles = {role: [rewards[role] for rewards in each if role in rewards] for role in Role}
        record.rewards = {role: _means(of_role) for role, of_role in of_roles.items() if of_role}
        if Role.ATTACKER in record.rewards:
            record.turn_rewards[0] = record.rewards[Role.ATTACKER]
        for number, rewards in enumerate(each, start=record.first_assessment):
            if Role.ASSESSOR in rewards:
                record.turn_rewards[number] = rewards[Role.ASSESSOR]
    record.void_unless_rewards_are_numbers()


def _means(of_role: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for parts in of_role for name in parts)
    return {
        name: math.fsum(parts.get(name, 0.0) for parts in of_role) / len(of_role) for name in names
    }
