"""Reward schemes that the studies compare with ``medserl``; a run names one by its import path:
``selfplay.reward=experiments.rewards:Learnable``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from medserl_agentloop.games.medical.case import Category, Role
from medserl_agentloop.games.medical.records import MedicalRecord, Rewards
from medserl_agentloop.games.medical.rewards import Counts, Medserl


@dataclass(frozen=True)
class Learnable(Medserl):
    """``medserl``, but the attacker is paid for notes that the assessor gets right half of the
    time.

    In place of its ``game`` there is ``learnable``, ``win * (1 - 4 |p - 1/2|)``, where ``p`` is the
    share of the readable assessments of this attack that are right: ``win`` at one half, ``-win``
    if all agree. That is the uncertainty reward ``1 - 2 |p - 1/2|`` of R-Zero (arXiv 2508.05004),
    with the judge's label for its majority vote, stretched over the range of ``game``. With fewer
    than two readable assessments it is 0. A truncated assessment counts as one that caught the
    attack.
    """

    def rewards(self, record: MedicalRecord) -> Rewards:
        rewards = super().rewards(record)
        if "game" not in rewards.get(Role.ATTACKER, {}):
            return rewards
        if len(record.by_assessment) < 2:
            raise ValueError(
                "Learnable compares assessments: set selfplay.assessments to 2 or more"
            )
        right = right_assessments(record)
        value = self.win * (1 - 4 * abs(sum(right) / len(right) - 0.5)) if len(right) > 1 else 0.0
        cut_off = [game.cut_off for game in record.by_assessment]
        value += (self.cut_off_assessment - value) * sum(cut_off) / len(cut_off)
        return _in_place_of_game(rewards, learnable=0.0 + self._share(record) * value)


SHOWN, FOUND = "shown", "found"


@dataclass(frozen=True)
class Optimism(Medserl):
    """``medserl``, but the attacker is paid for each kind of error until it proves unlearnable.

    If the share ``p`` of the readable assessments is right, a valid attack of kind ``k`` earns
    ``win (1 - 2 p) L + dead (1 - L)`` in place of its ``game``, with ``L = min(1, (F + a) / (p0 N +
    a))``: ``N`` attacks of the kind were shown in earlier steps and ``F`` of them found. A new kind
    has ``L = 1`` and pays as a zero-sum game does. While none of its kind is found, a missed attack
    earns less and less: at ``L = 1/3``, after ``2 a / p0`` attacks, no more than a caught one of a
    live kind, and finally ``dead``, like an invalid one. The answers to one attack cannot
    distinguish a kind that is found once in twenty times from one never found; all attacks of the
    kind can. Learnability (arXiv 2408.15099) and R-Zero's uncertainty (arXiv 2508.05004) use only
    the answers to one task.

    The kind is the judge's, else the row's error type.
    """

    dead: float = -2.0  # an attack of a kind that is never found; less than one that is caught
    alive_rate: float = 0.05  # p0: a kind that is found as often as this is alive
    patience: float = 10.0  # a: attacks that count as found before the first one is shown

    def life(self, kind: str, counts: Counts) -> float:
        """Return ``L`` of a kind, 0 to 1."""
        shown, found = (counts.get(group, {}).get(kind, 0.0) for group in (SHOWN, FOUND))
        return min(1.0, (found + self.patience) / (self.alive_rate * shown + self.patience))

    def settle(self, games: Sequence[MedicalRecord], counts: Counts) -> None:
        """Pay the attackers of a step by the counts before it, then count its attacks."""
        met: list[tuple[str, float]] = []
        for game in games:
            attacker, right = game.rewards.get(Role.ATTACKER, {}), right_assessments(game)
            harmless = game.spec.task is Category.DECOY_BENIGN
            if "game" not in attacker or harmless or not right:
                continue
            kind, found = kind_of(game), sum(right) / len(right)
            life = self.life(kind, counts)
            value = self.win * (1 - 2 * found) * life + self.dead * (1 - life)
            game.rewards = _in_place_of_game(game.rewards, optimism=value)
            if game.turn_rewards:
                game.turn_rewards = {**game.turn_rewards, 0: game.rewards[Role.ATTACKER]}
            met.append((kind, found))
        for kind, found in met:
            for group, number in ((SHOWN, 1.0), (FOUND, found)):
                own = counts.setdefault(group, {})
                own[kind] = own.get(kind, 0.0) + number


def _in_place_of_game(rewards: Rewards, **paid: float) -> Rewards:
    """``rewards`` with the attacker's ``game`` replaced."""
    rest = {name: part for name, part in rewards[Role.ATTACKER].items() if name != "game"}
    return {**rewards, Role.ATTACKER: {**paid, **rest}}


def right_assessments(record: MedicalRecord) -> list[bool]:
    """Return, for each readable assessment of a game, whether it was right."""
    outcomes = [game.outcome.is_right for game in record.by_assessment]
    return [right for right in outcomes if right is not None]


def kind_of(record: MedicalRecord) -> str:
    """The kind of the presented note's error: the judge's, else the row's."""
    named = record.judgement.error_type if record.judgement is not None else None
    return named or record.spec.error_type or "unknown"
