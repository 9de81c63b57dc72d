"""Answers of a judge on disk, by the content they are about. Used by the judges that ask a server."""

from __future__ import annotations

import hashlib
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path

from pydantic import ValidationError
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random

from medserl_agentloop.games.medical.records import Judgement

logger = logging.getLogger(__name__)

CACHE_FILE = "judgements.sqlite"
_TABLE = "CREATE TABLE IF NOT EXISTS judgements (key TEXT PRIMARY KEY, judgement TEXT NOT NULL) WITHOUT ROWID"
_LOCK_WAIT_S = 5.0

# sqlite does not wait for its lock where two processes turn a new file's log on at once.
_OPENING = Retrying(
    stop=stop_after_delay(_LOCK_WAIT_S),
    wait=wait_random(0.0, 0.1),
    retry=retry_if_exception_type(sqlite3.OperationalError),
    reraise=True,
)


def cache_key(*parts: str) -> str:
    """One key for a sequence of texts; no two sequences share one."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "backslashreplace")
        digest.update(f"{len(data)}:".encode() + data)
    return digest.hexdigest()


async def recall(
    cache: JudgementCache | None, content: tuple[str, ...], ask: Callable[[], Awaitable[Judgement]]
) -> Judgement:
    """The judgement that was given before about the same content, or else what ``ask`` answers.

    Args:
        cache: None keeps nothing.
        content: All that the answer depends on.
        ask: Asks the judge; what it raises is raised, and never kept.
    """
    if cache is None:
        return await ask()
    key = cache_key(*content)
    if found := cache.get(key):
        return found.model_copy(update={"cached": True})
    answer = await ask()
    cache.put(key, answer)
    return answer


class JudgementCache:
    """Judgements in ``<folder>/judgements.sqlite``, shared by the processes of one machine.

    A cache that cannot be read or written costs answers given before, nothing else: it says so once
    and is left alone. The folder must be on a local disk, since sqlite's log needs shared memory.

    Args:
        folder: Made if it is not there.
    """

    def __init__(self, folder: str | Path) -> None:
        self._file = Path(folder) / CACHE_FILE
        self._database: sqlite3.Connection | None = None
        self._broken = False

    def get(self, key: str) -> Judgement | None:
        """The judgement stored under ``key``, if there is one."""
        row = self._execute("SELECT judgement FROM judgements WHERE key = ?", key)
        try:
            return None if row is None else Judgement.model_validate_json(row)
        except ValidationError:  # written by another version
            return None

    def put(self, key: str, judgement: Judgement) -> None:
        """Store a judgement, in place of an older one."""
        self._execute("INSERT OR REPLACE INTO judgements VALUES (?, ?)", key, judgement.model_dump_json())

    def _execute(self, statement: str, *values: str) -> str | None:
        if self._broken:
            return None
        try:
            if self._database is None:
                self._database = _OPENING(self._open)
            row = self._database.execute(statement, values).fetchone()
        except (sqlite3.Error, OSError) as error:
            self._broken = True
            logger.warning("the judge's cache %s is not used any more: %s", self._file, error)
            return None
        return None if row is None else str(row[0])

    def _open(self) -> sqlite3.Connection:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        # One statement is one transaction, and sqlite's own lock orders those of several threads.
        database = sqlite3.connect(self._file, timeout=_LOCK_WAIT_S, isolation_level=None, check_same_thread=False)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")
        database.execute(_TABLE)
        return database
