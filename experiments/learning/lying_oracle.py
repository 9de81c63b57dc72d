"""An oracle of the toy clinic that lies at a known rate: for measuring what a judge's errors do to a run.

``selfplay.judge=experiments.learning.lying_oracle:LyingOracle``; a subclass sets another rate.
"""

from __future__ import annotations

import hashlib

from experiments.clinic import OracleJudge
from medserl_agentloop.games.medical.records import Judgement
from medserl_agentloop.games.medical.types import GameSpec, Label


class LyingOracle:
    """Gives the opposite of the oracle's label about a share of all notes.

    Whether it lies depends on the two notes alone, so that a run can be repeated and the same edit is
    always called the same. Its sensitivity and specificity are both ``1 - rate``.
    """

    name = "lying_oracle"
    rate = 0.2

    def __init__(self) -> None:
        self._oracle = OracleJudge()

    async def judge(self, presented: str, original: str, spec: GameSpec) -> Judgement:
        truth = await self._oracle.judge(presented, original, spec)
        label = truth.label
        if self._lies_about(presented, original):
            label = Label.SAFE if label is Label.HARMFUL else Label.HARMFUL
        return truth.model_copy(update={"judge": self.name, "label": label, "reason": ""})

    def _lies_about(self, presented: str, original: str) -> bool:
        digest = hashlib.sha256(f"{original}\0{presented}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < self.rate * 2**64
