"""The judge that trusts the row: a valid attack has done what its category asked for.

Right for untouched notes. For rewritten ones it knows only what the edit checks know: a harmless
edit passes as an error. docs/judges.md says what a run with it does and does not show.
"""

from __future__ import annotations

from medserl_agentloop.games.medical.metrics import UNREAD_RATE
from medserl_agentloop.games.medical.records import BELIEVES_THE_ROW, GameRecord, Judgement

WHAT_IT_CANNOT_SEE = (
    "judge labels: nobody reads the rewritten notes. A valid attack counts as having done what its row asks for, so "
    f"a harmless edit is paid as an error, and the assessor that sees through it is punished ({UNREAD_RATE} in "
    "metrics.jsonl is the share of such notes). docs/judges.md has judges that read."
)
"""Said once by whoever plays such games."""


class LabelJudge:
    """Gives every presented note its row's target label."""

    name = BELIEVES_THE_ROW

    async def judge(self, record: GameRecord) -> Judgement:
        return Judgement(judge=self.name, label=record.spec.target_label)
