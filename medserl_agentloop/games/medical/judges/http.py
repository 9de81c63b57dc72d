"""The judge behind a ``/judge`` server: the games of a moment in one request."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from medserl_agentloop.core.client import BadAnswer, NoAnswer
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.judges.cache import JudgementCache, recall
from medserl_agentloop.games.medical.judges.options import JudgeServer
from medserl_agentloop.games.medical.judges.protocol import JudgeAnswer, JudgeQuery, ask
from medserl_agentloop.games.medical.records import GameRecord, Judgement


@dataclass
class _Batch:
    """Games of one event loop that are asked about together."""

    queries: dict[int, JudgeQuery] = field(default_factory=dict)
    full: asyncio.Event = field(default_factory=asyncio.Event)


class HttpJudge:
    """Asks a server that speaks the ``/judge`` protocol.

    Every answer is checked on its own: a missing, refused or unusable one costs its game, not its batch.

    Args:
        server: The options of the run's ``selfplay.judge_server``.

    Raises:
        ValueError: The server has no address, or its API key is not in the environment.
    """

    name = "http"

    def __init__(self, server: JudgeServer) -> None:
        self._server = server
        self._client = server.client("/judge")
        self._cache = JudgementCache(server.cache) if server.cache else None
        self._numbers = itertools.count()  # never used twice, so that no answer can pass for another's
        self._open: dict[asyncio.AbstractEventLoop, tuple[_Batch, asyncio.Task[dict[str, Any]]]] = {}

    @classmethod
    def from_config(cls, config: MedicalConfig) -> HttpJudge:
        """The judge of a run."""
        return cls(config.judge_server)

    async def judge(self, record: GameRecord) -> Judgement:
        """Judge ``record.presented_note``.

        Raises:
            NoAnswer: There is no usable answer.
        """
        started = time.monotonic()
        told = JudgeQuery.of(0, record)
        about = (told.game_category, told.error_type, told.original_note, told.medical_note)
        # The verdict is left out: it changes no note.
        content = (self.name, self._client.url, *(part or "" for part in about))
        answer = await recall(self._cache, content, partial(self._ask, record))
        return answer.model_copy(update={"seconds": time.monotonic() - started})

    async def _ask(self, record: GameRecord) -> Judgement:
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        if loop not in self._open:
            self._open[loop] = (new := _Batch()), loop.create_task(self._answers(new))
        batch, answers = self._open[loop]
        batch.queries[number] = JudgeQuery.of(number, record)
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
        """Let no more games join."""
        if not batch.full.is_set():
            batch.full.set()
            del self._open[asyncio.get_running_loop()]
