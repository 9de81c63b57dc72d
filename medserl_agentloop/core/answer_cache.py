"""Answers of a model or server on disk, so that none is asked for twice."""

from __future__ import annotations

import hashlib
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


def cache_key(*parts: str) -> str:
    """One key for a sequence of texts; no two sequences share one."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "backslashreplace")
        digest.update(f"{len(data)}:".encode() + data)
    return digest.hexdigest()


class AnswerCache(Generic[Answer]):
    """Answers in an SQLite file, shared by the processes of one machine.

    A cache that cannot be read or written costs answers given before, nothing else: it says so once and is left alone.
    The file must be on a local disk, since sqlite's log needs shared memory. It is made, with its folder, if it is not
    there; None keeps nothing. ``kind``, of the answers in ``table``, is a pydantic model or a dataclass.
    """

    def __init__(self, file: Path | None, kind: type[Answer], table: str) -> None:
        self._file, self._kind, self._table = file, TypeAdapter(kind), table
        self._database: sqlite3.Connection | None = None

    async def recall(self, content: tuple[str, ...], ask: Callable[[], Awaitable[Answer]]) -> tuple[Answer, bool]:
        """The answer given before about the same ``content``, all that it depends on, or else that of ``ask``.

        Also says whether it was given before. What ``ask`` raises is raised, and never kept.
        """
        key = cache_key(*content)
        if (found := self._execute(f"SELECT * FROM {self._table} WHERE key = ?", key)) is not None:
            with suppress(ValidationError):  # written by another version
                return self._kind.validate_json(found), True
        answer = await ask()
        self._execute(f"INSERT OR REPLACE INTO {self._table} VALUES (?, ?)", key, self._kind.dump_json(answer).decode())
        return answer, False

    def _execute(self, statement: str, *values: str) -> str | None:
        if self._file is None:
            return None
        try:
            if self._database is None:
                self._database = self._open(self._file)
            row = self._database.execute(statement, values).fetchone()
        except (sqlite3.Error, OSError) as error:
            logger.warning("the cache %s is not used any more: %s", self._file, error)
            self._file = None
            return None
        return None if row is None else str(row[1])

    def _open(self, file: Path) -> sqlite3.Connection:
        file.parent.mkdir(parents=True, exist_ok=True)
        # One statement is one transaction, and sqlite's own lock orders those of several threads.
        database = sqlite3.connect(file, timeout=5.0, isolation_level=None, check_same_thread=False)
        with suppress(sqlite3.OperationalError):  # another process turns the new file's log on just now
            database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")
        columns = "key TEXT PRIMARY KEY, answer TEXT NOT NULL"
        database.execute(f"CREATE TABLE IF NOT EXISTS {self._table} ({columns}) WITHOUT ROWID")
        return database
