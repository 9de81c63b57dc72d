"""What judges that ask a server have in common: the cache, and the time an answer took."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

from medserl_agentloop.game.records import GameRecord, Judgement
from medserl_agentloop.judges.cache import JudgementCache, cache_key
from medserl_agentloop.judges.options import JudgeServer


class RemoteJudge(ABC):
    """Answers from the cache where it can, and asks its server where it must.

    Args:
        server: The options of the run's ``selfplay.judge_server``.
    """

    name: str

    def __init__(self, server: JudgeServer) -> None:
        self._cache = JudgementCache(server.cache) if server.cache else None

    async def judge(self, record: GameRecord) -> Judgement:
        """Judge ``record.presented_note``.

        Raises:
            JudgeError: There is no usable answer.
        """
        started = time.monotonic()
        key = cache_key(self.name, *self.content(record))
        answer = self._cache.get(key) if self._cache else None
        cached = answer is not None
        if answer is None:
            answer = await self.ask(record)
            if self._cache:
                self._cache.put(key, answer)
        return answer.model_copy(update={"cached": cached, "seconds": time.monotonic() - started})

    @abstractmethod
    def content(self, record: GameRecord) -> tuple[str, ...]:
        """All that the answer depends on; the same content gets the same answer from the cache."""

    @abstractmethod
    async def ask(self, record: GameRecord) -> Judgement:
        """Ask the server.

        Raises:
            JudgeError: There is no usable answer.
        """
