"""The judge that trusts the row: a valid attack has done what its category asked for.

Right for untouched notes. For rewritten ones it knows only what the edit checks know: a harmless
edit passes as an error. DESIGN section 3.5 says what a run with it does and does not show.
"""

from __future__ import annotations

from medserl_agentloop.game.records import GameRecord, Judgement


class LabelJudge:
    """Gives every presented note its row's target label."""

    name = "labels"

    async def judge(self, record: GameRecord) -> Judgement:
        return Judgement(judge=self.name, label=record.spec.target_label)
