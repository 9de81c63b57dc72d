"""Judges: they decide whether the presented note contains an error. A user's own is named by its import path."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from inspect import iscoroutinefunction
from typing import Any, Protocol

from medserl_agentloop.core.chat import BASE, BaseModelChat
from medserl_agentloop.core.client import BadAnswer, NoAnswer
from medserl_agentloop.games.medical.config import JudgeServer, MedicalConfig
from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.games.medical.judges.llm import BlindReader
from medserl_agentloop.games.medical.metrics import UNREAD_RATE
from medserl_agentloop.games.medical.records import (
    BELIEVES_THE_ROW,
    JUDGE_ABSTAINED,
    JUDGE_FAILED,
    InvalidAttack,
    Judgement,
    MedicalRecord,
    Reading,
)
from medserl_agentloop.games.medical.types import Label
from medserl_agentloop.paths import find_object

logger = logging.getLogger(__name__)

JUDGES = {
    "labels": "medserl_agentloop.games.medical.judges:LabelJudge",
    "http": "medserl_agentloop.medical_team.protocol:HttpJudge",
    "llm": "medserl_agentloop.games.medical.judges.llm:LlmJudge",
}
UNREAD_WARNING = (  # printed once by a run or command that plays games with ``labels``
    "judge labels: nobody reads the rewritten notes. A valid attack counts as having done what its row asks for, so "
    f"a harmless edit is paid as an error, and the assessor that sees through it is punished ({UNREAD_RATE} in "
    "metrics.jsonl is the share of such notes). docs/judges.md has judges that read."
)


class Judge(Protocol):
    """Says whether a presented note is harmful; a class method ``from_config(config: MedicalConfig)`` may build it."""

    name: str

    async def judge(self, record: MedicalRecord) -> Judgement:
        """Judge ``record.presented_note``. An exception voids the game, it never ends the run."""
        ...


class LabelJudge:
    """Trusts the row: every presented note has its target label, so a harmless edit passes as an error."""

    name = BELIEVES_THE_ROW

    async def judge(self, record: MedicalRecord) -> Judgement:
        return Judgement(judge=self.name, label=record.spec.target_label)


Reads = Callable[[MedicalRecord], Awaitable[list[Reading]]]
"""Reads the presented note of a game alone, several times, and says each time whether it finds the error."""


class GatedJudge:
    """Asks a judge about rewritten notes only; with ``reads``, an error counts if ``needed`` readings find it."""

    def __init__(self, judge: Judge, reads: Reads | None = None, needed: int = 1, limit_s: float | None = None) -> None:
        self.name = judge.name
        self._judge, self._reads, self._needed, self._limit_s = judge, reads, needed, limit_s

    async def judge(self, record: MedicalRecord) -> Judgement:
        if not record.category.has_attack:
            return await LabelJudge().judge(record)
        answer = self._judge.judge(record.model_copy(deep=True))  # it may be a user's
        try:
            judgement = Judgement.model_validate(await asyncio.wait_for(answer, self._limit_s))
        except TimeoutError:
            raise BadAnswer(f"no answer in {self._limit_s} s: raise {JudgeServer.node}.timeout_s") from None
        injected = record.spec.target_label is judgement.label is Label.HARMFUL
        if self._reads is None or not injected:
            return judgement
        readings = await self._reads(record)
        hits = sum(reading.found is True for reading in readings)
        lost = [reading.failed for reading in readings if reading.failed is not None]
        if hits < self._needed <= hits + len(lost):
            raise BadAnswer(f"{len(lost)} of {len(readings)} readings were lost: {lost[0]}")
        return judgement.model_copy(update={"readings": readings, "knowable": hits >= self._needed})


def judge_class(name: str) -> Any:
    """The class of the judge called ``name``; a ValueError says why there is none."""
    expected = "package.module:Class of a class with a method 'async def judge(self, record) -> Judgement'"
    return find_object("judge", name, JUDGES, expected, lambda one: iscoroutinefunction(getattr(one, "judge", None)))


def build_judge(
    config: MedicalConfig,
    reward_router_address: str | None = None,
    reward_model: str | None = None,
    base: BaseModelChat | None = None,
) -> Judge:
    """The judge of a ``selfplay`` node, behind its gate; without a url verl's reward model. ValueError if it cannot."""
    if config.asks_base and base is None:
        raise ValueError(f"selfplay.judge_server.url={BASE}: the base model answers in a run only; name a server.")
    server = config.judge_server
    if server.url is None and reward_router_address is not None:
        at_router = {"url": f"http://{reward_router_address}/v1", "model": server.model or reward_model}
        config = config.model_copy(update={"judge_server": server.model_copy(update=at_router)})
    chosen = judge_class(config.judge)
    asked = {"base": base} if config.asks_base and config.judge == "llm" else {}
    judge = chosen.from_config(config, **asked) if hasattr(chosen, "from_config") else chosen()
    reads = BlindReader(config, base).read if config.blind.readings else None
    # Those of this package have a limit for each request, and wait for others behind it.
    limit_s = None if config.judge in JUDGES else server.timeout_s * (server.retries + 1)
    return GatedJudge(judge, reads, config.blind.needed, limit_s)


async def judge_game(judge: Judge, record: MedicalRecord) -> None:
    """Put the judge's word into ``record``, if there is something to judge. A failure or an abstention voids it."""
    if record.void is not None or record.assessment is None:
        return
    try:
        record.judgement = await judge.judge(record)
    except Exception as error:
        # An outage of the judge must cost its games, not the run, and must not invent a result.
        reason = one_line(f"{type(error).__name__}: {error}")[:300]
        record.void = f"{JUDGE_FAILED}: {reason}"
        own = not isinstance(error, NoAnswer)  # of a user's code: its line helps
        logger.warning("judge %s gave no answer, the game is void: %s", judge.name, reason, exc_info=own)
        return
    if record.judgement.label is None:
        record.void = JUDGE_ABSTAINED
    elif record.judgement.knowable is False and record.attack is not None:
        record.attack.invalid = InvalidAttack.NOT_KNOWABLE
