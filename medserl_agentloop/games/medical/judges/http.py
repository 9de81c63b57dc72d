"""The judge behind a ``/judge`` server: the games of a moment in one request."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from medserl_agentloop.core.client import BadAnswer, NoAnswer
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.judges.cache import JudgementCache, recall
from medserl_agentloop.games.medical.judges.options import JudgeServer
from medserl_agentloop.games.medical.judges.protocol import JudgeAnswer, JudgeQuery, ask
from medserl_agentloop.games.medical.records import GameRecord, Judgement


@dataclass
class _Asked:
    query: JudgeQuery
    answer: asyncio.Future[Judgement]


@dataclass
class _Batch:
    """Queries of one event loop that wait for others to join them, and requests under way."""

    waiting: list[_Asked] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None
    requests: set[asyncio.Task[None]] = field(default_factory=set)


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
        self._batches: WeakKeyDictionary[asyncio.AbstractEventLoop, _Batch] = WeakKeyDictionary()

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
        loop = asyncio.get_running_loop()
        batch = self._batches.setdefault(loop, _Batch())
        asked = _Asked(JudgeQuery.of(next(self._numbers), record), loop.create_future())
        batch.waiting.append(asked)
        if len(batch.waiting) >= self._server.batch_size:
            self._send(batch)
        elif batch.timer is None:
            batch.timer = loop.call_later(self._server.batch_wait_ms / 1000, self._send, batch)
        return await asked.answer

    def _send(self, batch: _Batch) -> None:
        if batch.timer is not None:
            batch.timer.cancel()
        asked, batch.waiting, batch.timer = batch.waiting, [], None
        request = asyncio.get_running_loop().create_task(self._request(asked))
        batch.requests.add(request)  # the loop itself holds tasks weakly
        request.add_done_callback(batch.requests.discard)

    async def _request(self, batch: list[_Asked]) -> None:
        batch = [asked for asked in batch if not asked.answer.done()]  # whose game was cancelled, is not asked about
        if not batch:
            return
        try:
            answers = await ask(self._client, [asked.query.model_dump(exclude_none=True) for asked in batch])
        except BaseException as error:
            for asked in batch:
                if not asked.answer.done():
                    asked.answer.set_exception(BadAnswer("cancelled") if not isinstance(error, Exception) else error)
            if not isinstance(error, Exception):
                raise
            return
        for asked in batch:
            if asked.answer.done():
                continue
            try:
                asked.answer.set_result(self._judgement(answers[str(asked.query.game_idx)]))
            except NoAnswer as error:
                asked.answer.set_exception(error)

    def _judgement(self, answer: Any) -> Judgement:
        if isinstance(answer, NoAnswer):
            raise answer
        try:
            return JudgeAnswer.read(answer).to_judgement(self.name)
        except ValueError as error:
            raise BadAnswer(str(error)) from None
