"""Answers of judges that are kept on disk, so that no question is asked twice."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import diskcache
from pydantic import BaseModel, ValidationError

from medserl_agentloop.core.identity import of_values

Answer = TypeVar("Answer", bound=BaseModel)
logger = logging.getLogger(__name__)


class AnswerCache(Generic[Answer]):
    """Answers of one ``kind`` in a folder, or nowhere (None).

    A failing cache is reported once and not used again.
    """

    def __init__(self, folder: str | None, kind: type[Answer]) -> None:
        self._folder, self._kind = folder, kind
        self._cache: Any = None  # opened by the process that asks

    async def recall(
        self, content: tuple[str, ...], ask: Callable[[], Awaitable[Answer]]
    ) -> tuple[Answer, bool]:
        """Return the cached answer for this ``content``, or the answer of ``ask``; and whether it
        was cached.

        ``content`` is all that an answer depends on: the identity of who is asked, the wording, the
        notes.
        """
        key = of_values(self._kind.__name__, *content)
        kept = self._call("get", key)
        with suppress(ValidationError):  # another version's answer
            if kept is not None:
                return self._kind.model_validate_json(kept), True
        answer = await ask()
        self._call("set", key, answer.model_dump_json())
        return answer, False

    def _call(self, method: str, *values: str) -> Any:
        if self._folder is None:
            return None
        try:
            if self._cache is None:
                self._cache = diskcache.Cache(self._folder, eviction_policy="none")
            return getattr(self._cache, method)(*values)
        except (diskcache.Timeout, sqlite3.Error, OSError) as error:
            logger.warning("the cache %s is not used any more: %s", self._folder, error)
            self._folder = None
            return None
