"""Judges decide whether the presented note contains an error; a user's is named by import path."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from copy import deepcopy
from inspect import iscoroutinefunction
from typing import Any, Protocol

from medserl_agentloop.core.chat import BASE, BaseModelChat
from medserl_agentloop.core.client import BadAnswer, NoAnswer
from medserl_agentloop.core.liveness import limited
from medserl_agentloop.games.medical.case import GameSpec, Label
from medserl_agentloop.games.medical.config import JudgeServer, MedicalConfig
from medserl_agentloop.games.medical.edit import one_line
from medserl_agentloop.games.medical.judges.llm import BlindReader, LlmJudge
from medserl_agentloop.games.medical.metrics import UNREAD_RATE
from medserl_agentloop.games.medical.records import (
    JUDGE_ABSTAINED,
    JUDGE_FAILED,
    LABELS_JUDGE,
    InvalidAttack,
    Judgement,
    MedicalRecord,
    Reading,
)
from medserl_agentloop.paths import find_object

logger = logging.getLogger(__name__)

JUDGES = {
    "labels": "medserl_agentloop.games.medical.judges:LabelJudge",
    "http": "medserl_agentloop.medical_team.remote_judge:HttpJudge",
    "llm": "medserl_agentloop.games.medical.judges.llm:LlmJudge",
}
UNREAD_WARNING = (  # printed once by a run or command that plays games with ``labels``
    "judge labels: no judge reads the rewritten notes, so a harmless edit is paid as an error, and "
    f"the assessor that sees through it is punished ({UNREAD_RATE} is the share of such notes). "
    "docs/judges.md has judges that read."
)


class Judge(Protocol):
    """Says whether a presented note is harmful; ``from_config(config)`` may build it."""

    name: str

    async def judge(self, presented: str, original: str, spec: GameSpec) -> Judgement:
        """Judge a note that an attacker made from the ``original``; an exception voids the game."""
        ...


class LabelJudge:
    """Trusts the row: a presented note gets its target label, so a harmless edit is an error."""

    name = LABELS_JUDGE
    never_errs = True  # by its own account: it is not measured

    async def judge(self, presented: str, original: str, spec: GameSpec) -> Judgement:
        return Judgement(judge=self.name, label=spec.target_label)


class GatedJudge:
    """Asks a judge, possibly a user's, only about rewritten notes, and checks its answer.

    ``reader`` reads the notes in which the judge finds an injected error. ``limit_s`` is the time
    that a user's judge may take; those of this package have a limit for each request.
    """

    def __init__(
        self, judge: Judge, reader: BlindReader | None = None, limit_s: float | None = None
    ) -> None:
        self.name, self.reader, self.limit_s = judge.name, reader, limit_s
        self._judge = judge

    async def judge(self, presented: str, original: str, spec: GameSpec) -> Judgement:
        if not spec.category.has_attack:
            return await LabelJudge().judge(presented, original, spec)
        started = time.monotonic()
        own = deepcopy(spec)  # which a user's judge may change

        async def ask() -> Any:
            return await self._judge.judge(presented, original, own)

        try:
            answer = await (ask() if self.limit_s is None else limited(ask, self.limit_s))
        except TimeoutError:
            raise BadAnswer(
                f"no answer in {self.limit_s} s: raise {JudgeServer.node}.timeout_s"
            ) from None
        judgement = Judgement.model_validate(answer)
        return judgement.model_copy(update={"seconds": time.monotonic() - started})


def judge_class(name: str) -> Any:
    """The class of the judge called ``name``; a ValueError says why there is none."""
    expected = "package.module:Class with 'async def judge(self, presented, original, spec)'"
    return find_object(
        "judge", name, JUDGES, expected, lambda one: iscoroutinefunction(getattr(one, "judge", 0))
    )


def build_judge(
    config: MedicalConfig,
    reward_router_address: str | None = None,
    reward_model: str | None = None,
    base: BaseModelChat | None = None,
) -> GatedJudge:
    """The judge of a ``selfplay`` node behind its gate; without a url verl's reward model."""
    if config.asks_base and base is None:
        raise ValueError(f"{JudgeServer.node}.url={BASE} answers in a run only: name a server")
    server, weights = config.judge_server, None
    if server.url is None and reward_router_address is not None and config.judge != "http":
        weights, url = reward_model, f"http://{reward_router_address}/v1"
        server = server.model_copy(update={"url": url, "model": server.model or reward_model})
        config = config.model_copy(update={"judge_server": server})
    judge: Judge
    if config.judge == "llm":
        judge = LlmJudge(config, base, weights)
    else:
        chosen = judge_class(config.judge)
        judge = chosen.from_config(config) if hasattr(chosen, "from_config") else chosen()
    reader = BlindReader(config, base, weights) if config.blind.readings else None
    limit_s = None if config.judge in JUDGES else server.timeout_s * (server.retries + 1)
    return GatedJudge(judge, reader, limit_s)


def why_failed(error: Exception) -> str:
    """Why a judge gave no answer, in one line of at most 300 characters after its beginning."""
    return f"{JUDGE_FAILED}: {one_line(f'{type(error).__name__}: {error}')[:300]}"


async def ask_judge(judge: GatedJudge, record: MedicalRecord) -> Judgement | str:
    """Return the judge's answer on the presented note, or a text that says why there is none."""
    spec, note = record.spec, record.presented_note or ""
    try:
        judgement = await judge.judge(note, spec.seed_note, spec)
        injected = spec.category.has_attack and spec.target_label is Label.HARMFUL
        if judge.reader is not None and injected and judgement.label is Label.HARMFUL:
            readings = await judge.reader.read(note, record.error_sentences)
            return with_readings(judgement, readings, judge.reader.needed)
        return judgement
    except Exception as error:
        # An outage of the judge must cost its games, not the run, and must not invent a result.
        reason = why_failed(error)
        own = not isinstance(error, NoAnswer)  # from a user's code: its line helps
        logger.warning("judge %s: %s; the game is void", judge.name, reason, exc_info=own)
        return reason


def with_readings(judgement: Judgement, readings: Sequence[Reading], needed: int) -> Judgement:
    """Add whether ``needed`` readings found the error; BadAnswer if too many failed to say."""
    hits = sum(reading.found is True for reading in readings)
    lost = [reading.failed for reading in readings if reading.failed is not None]
    if hits < needed <= hits + len(lost):
        raise BadAnswer(f"{len(lost)} of {len(readings)} readings were lost: {lost[0]}")
    return judgement.model_copy(update={"readings": list(readings), "knowable": hits >= needed})


def take_judgement(record: MedicalRecord, answer: Judgement | str) -> None:
    """Put the answer of :func:`ask_judge` into ``record``; without a label it voids the game."""
    if isinstance(answer, str):
        record.void = answer
        return
    record.judgement = answer
    if answer.label is None:
        record.void = JUDGE_ABSTAINED
    elif answer.knowable is False and record.attack is not None:
        record.attack.invalid = InvalidAttack.NOT_KNOWABLE
