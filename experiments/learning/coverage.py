"""Reward scheme that also pays the attacker for kinds of error that it seldom puts in.

``selfplay.reward=experiments.learning.coverage:Coverage``, for the experiment ``long_coverage``. An
attack that counts also earns ``WEIGHT * (-log p - H)``: p is the share of its kind, as the judge
names it, among the attacks before it, and H the entropy of these shares, so that the bonus is zero
on average. Where one kind always wins and the five others never do, all earn the same once that
kind is e^(2 / WEIGHT) times as frequent as another: at 2, in 35 % of the attacks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from medserl_agentloop.games.medical.case import Category, Role
from medserl_agentloop.games.medical.records import MedicalRecord, Rewards
from medserl_agentloop.games.medical.rewards import Medserl

WEIGHT = 2.0
# of an attack's count with each later one: some fifty count, as many as a step of 64 games has
DECAY = 0.98


class KindShares:
    """Shares of the kinds among the last attacks, each kind counted once more than it was seen."""

    def __init__(self) -> None:
        self.counts: defaultdict[str, float] = defaultdict(lambda: 1.0)

    def surprise(self, kind: str) -> float:
        """``-log p - H`` of ``kind``, in nats; counts it."""
        count = self.counts[kind]
        total = sum(self.counts.values())
        entropy = -sum(c / total * math.log(c / total) for c in self.counts.values())
        for other in self.counts:
            self.counts[other] = 1.0 + (self.counts[other] - 1.0) * DECAY
        self.counts[kind] += 1.0
        return -math.log(count / total) - entropy


# The quickstart has one process that plays games; a resumed run counts anew.
_OF_THIS_RUN = KindShares()


@dataclass(frozen=True)
class Coverage(Medserl):
    """``medserl``, with ``coverage`` for an attack that counts and was asked for an error."""

    def rewards(self, record: MedicalRecord) -> Rewards:
        rewards = super().rewards(record)
        attacker, judgement = rewards.get(Role.ATTACKER, {}), record.judgement
        asked_for_error = record.spec.task is Category.ADVERSARIAL_BENIGN
        kind = judgement.error_type if judgement is not None else None
        if "game" in attacker and asked_for_error and kind is not None:
            attacker["coverage"] = WEIGHT * _OF_THIS_RUN.surprise(kind)
        return rewards
