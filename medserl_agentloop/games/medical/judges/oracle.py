"""The judge of the toy clinic: reads any note of that world and is never wrong.

A note that has left the world says nothing that is wrong there. It counts as safe and unrealistic, so
an attack that only garbles has failed.
"""

from __future__ import annotations

from medserl_agentloop.games.medical.clinic import oracle
from medserl_agentloop.games.medical.records import GameRecord, Judgement
from medserl_agentloop.games.medical.types import Label


class OracleJudge:
    """Judges by the facts of the toy clinic, whatever the row's label says."""

    name = "oracle"

    async def judge(self, record: GameRecord) -> Judgement:
        assert record.presented_note is not None
        truth = oracle(record.presented_note)
        if truth.label is None:
            return Judgement(judge=self.name, label=Label.SAFE, realistic=False, reason="not a note of this world")
        wrong = ", ".join(f"sentence {index} ({kind.value})" for index, kind in truth.errors)
        return Judgement(judge=self.name, label=truth.label, realistic=True, reason=wrong or "no error")
