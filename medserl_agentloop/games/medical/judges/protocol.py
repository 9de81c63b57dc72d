"""The ``/judge`` protocol of the OpenRLHF system: what is asked, what is answered, and the judge that asks.

Used by ``medical_team`` too, and by ``medserl judge serve``, which answers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from medserl_agentloop.core.client import BadAnswer, HttpClient, NoAnswer, Refused
from medserl_agentloop.games.medical.judges import JudgeServer
from medserl_agentloop.games.medical.records import REASON_CHARACTERS, GameRecord, Judgement
from medserl_agentloop.games.medical.types import Label

if TYPE_CHECKING:
    from medserl_agentloop.games.medical.config import MedicalConfig

logger = logging.getLogger(__name__)

SCORE_KEY = "labels"  # that some servers and clients put the answers under; requests name it
Labels = dict[str, Any]  # the answer about one game, in the protocol's keys
_ABOUT_CONTENT = (400, 413, 422)  # HTTP statuses that may be about one of several notes


class JudgeQuery(BaseModel):
    """One game of a request; its answer comes back under ``game_idx``.

    The assessment is ``Safe``, ``Harmful``, or empty where the assessor gave no verdict.
    """

    model_config = ConfigDict(strict=True)

    game_idx: int
    medical_note: str
    assessment: str = ""
    game_category: str | None = None
    error_type: str | None = None
    original_note: str | None = None

    @classmethod
    def of(cls, game_idx: int, record: GameRecord) -> JudgeQuery:
        """The query about a game."""
        # Of the assessment only the verdict is told: the assessor must not be able to talk to the one who decides
        # whether it was right.
        verdict = record.assessment.verdict if record.assessment else None
        return cls(
            game_idx=game_idx,
            medical_note=record.presented_note or "",
            assessment=verdict.value.capitalize() if verdict else "",
            game_category=record.category.value,
            error_type=record.spec.error_type.value if record.spec.error_type else None,
            original_note=record.spec.seed_note,
        )


class JudgeAnswer(BaseModel):
    """The answer about one game; None where the server does not say, as earlier releases of this one did not.

    Attributes:
        error_detected: Whether the assessor said that there is an error.
        error_present: Whether there is one; ``actual_harm`` says the same in other words.
        is_parsing_error: Whether the judge failed; nothing else counts then.
        abstained: Whether the judge cannot tell. Only this package's server says it; other clients see a
            parsing error.
        realism_judged: Whether ``error_realistic`` is the judge's word. Only this package's server says it:
            the protocol wants a truth value also where the judge did not give one.
    """

    model_config = ConfigDict(strict=True)

    error_detected: bool | None = None
    error_present: bool | None = None
    error_realistic: bool | None = None
    assessor_correct: bool | None = None
    is_parsing_error: bool = False
    judge_reasoning: str | None = None
    actual_harm: Literal["Safe", "Harmful"] | None = None
    abstained: bool = False
    realism_judged: bool = True

    @classmethod
    def read(cls, answer: Any) -> JudgeAnswer:
        """The answer about one game in a server's response; a ValueError says what is wrong with it."""
        try:
            return cls.model_validate(answer)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "answer"
            raise ValueError(f"{where}: {first['msg']}") from None

    def to_judgement(self, judge: str) -> Judgement:
        """What it says of the presented note; a ValueError if that is nothing, or contradicts itself."""
        reason = (self.judge_reasoning or "")[:REASON_CHARACTERS]
        if self.abstained:
            return Judgement(judge=judge, label=None, reason=reason)
        if self.is_parsing_error:
            raise ValueError(f"the server's judge failed (is_parsing_error): {reason or 'no reason'}")
        said = {harm == "Harmful" for harm in [self.actual_harm] if harm} | ({self.error_present} - {None})
        if not said:
            raise ValueError("error_present is missing")
        if len(said) == 2:
            raise ValueError(f"error_present is {self.error_present} but actual_harm is {self.actual_harm}")
        return Judgement(
            judge=judge,
            label=Label.HARMFUL if said == {True} else Label.SAFE,
            realistic=self.error_realistic if self.realism_judged else None,
            reason=reason,
        )


def make_labels(
    *,
    error_present: bool = False,
    error_detected: bool = False,
    error_realistic: bool = True,
    assessor_correct: bool | None = None,
    is_parsing_error: bool = False,
    reasoning: str = "",
) -> Labels:
    """The answer about one game as the original server writes it: every key, and no null.

    See :class:`JudgeAnswer`. Where ``assessor_correct`` is None, the first two tell it.
    """
    if assessor_correct is None:
        assessor_correct = error_detected == error_present and not is_parsing_error
    return {
        "error_detected": error_detected,
        "error_present": error_present,
        "error_realistic": error_realistic,
        "assessor_correct": assessor_correct,
        "is_parsing_error": is_parsing_error,
        "judge_reasoning": reasoning,
        "actual_harm": "Harmful" if error_present else "Safe",
    }


async def ask(client: HttpClient, queries: Sequence[dict[str, Any]], score_key: str = SCORE_KEY) -> dict[str, Any]:
    """For each game index, as text, a server's answer about it, or the :class:`NoAnswer` that says why there is none.

    A server that refuses a request for what it holds is asked about each half of it, down to the game that it refuses.
    """
    indices = [str(query["game_idx"]) for query in queries]
    try:
        body = await client.post("/judge", {"queries": list(queries), "score_key": score_key})
        answers = by_index(body, indices, score_key)
    except NoAnswer as error:
        about_content = isinstance(error, Refused) and error.status in _ABOUT_CONTENT
        if len(queries) < 2 or not about_content:
            return dict.fromkeys(indices, error)
        middle = len(queries) // 2
        halves = await asyncio.gather(*(ask(client, half, score_key) for half in (queries[:middle], queries[middle:])))
        return {**halves[0], **halves[1]}
    if unexpected := sorted(set(answers) - set(indices)):
        logger.warning("the judge answered about games that were not in the request: %s", client.shown(str(unexpected)))
    return {index: answers.get(index, BadAnswer(f"no answer about game {index}")) for index in indices}


def by_index(body: Any, indices: Sequence[str], score_key: str = SCORE_KEY) -> dict[str, Any]:
    """The answers in a response, which come by index or in the order asked, bare or under ``score_key``."""
    answers = body.get(score_key, body) if isinstance(body, dict) else body
    if isinstance(answers, list) and len(answers) == len(indices):
        return dict(zip(indices, answers, strict=True))
    if not isinstance(answers, dict):
        raise BadAnswer(f"expected an object by game index, got {type(answers).__name__}")
    return answers


@dataclass
class _Batch:
    """Games of one event loop that are asked about together."""

    queries: dict[int, JudgeQuery] = field(default_factory=dict)
    full: asyncio.Event = field(default_factory=asyncio.Event)


class HttpJudge:
    """Asks a server that speaks the ``/judge`` protocol: the games of a moment in one request.

    Every answer is checked on its own: a missing, refused or unusable one costs its game, not its batch.
    """

    name = "http"

    def __init__(self, server: JudgeServer) -> None:
        self._server = server
        self._client = server.client("/judge")
        self._cache = server.answers("judgements", Judgement)
        self._numbers = itertools.count()  # never used twice, so that no answer can pass for another's
        self._open: dict[asyncio.AbstractEventLoop, tuple[_Batch, asyncio.Task[dict[str, Any]]]] = {}

    @classmethod
    def from_config(cls, config: MedicalConfig) -> HttpJudge:
        return cls(config.judge_server)

    async def judge(self, record: GameRecord) -> Judgement:
        started = time.monotonic()
        query = JudgeQuery.of(next(self._numbers), record)
        about = (query.game_category, query.error_type, query.original_note, query.medical_note)
        # The verdict is left out: it changes no note.
        content = (self.name, self._client.url, *(part or "" for part in about))
        answer, cached = await self._cache.recall(content, partial(self._ask, query))
        return answer.model_copy(update={"cached": cached, "seconds": time.monotonic() - started})

    async def _ask(self, query: JudgeQuery) -> Judgement:
        loop, number = asyncio.get_running_loop(), query.game_idx
        if loop not in self._open:
            self._open[loop] = (new := _Batch()), loop.create_task(self._answers(new))
        batch, answers = self._open[loop]
        batch.queries[number] = query
        if len(batch.queries) >= self._server.batch_size:
            self._close(batch)
        try:
            answer = (await asyncio.shield(answers))[str(number)]
        except asyncio.CancelledError:
            batch.queries.pop(number, None)
            raise
        if isinstance(answer, NoAnswer):
            raise answer
        try:
            return JudgeAnswer.read(answer).to_judgement(self.name)
        except ValueError as error:
            raise BadAnswer(str(error)) from None

    async def _answers(self, batch: _Batch) -> dict[str, Any]:
        """The server's answers by game number, once the batch is full or has waited."""
        try:
            await asyncio.wait_for(batch.full.wait(), self._server.batch_wait_ms / 1000)
        except asyncio.TimeoutError:
            pass
        finally:
            self._close(batch)
        queries = [query.model_dump(exclude_none=True) for query in batch.queries.values()]
        return await ask(self._client, queries) if queries else {}

    def _close(self, batch: _Batch) -> None:
        if not batch.full.is_set():
            batch.full.set()
            del self._open[asyncio.get_running_loop()]
