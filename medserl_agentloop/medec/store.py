"""Vignettes on disk: a list of any length that takes no memory.

``reader.py`` fills it and ``rows.py`` reads it as it would read a list.
"""

from __future__ import annotations

import pickle
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from medserl_agentloop.medec.fields import MedecFormatError, RowPlace
from medserl_agentloop.medec.vignettes import Vignette

_TABLES = """
CREATE TABLE vignettes (number INTEGER PRIMARY KEY, id TEXT UNIQUE, data BLOB);
CREATE TABLE rows (text_id TEXT PRIMARY KEY, file TEXT, number INTEGER) WITHOUT ROWID;
"""
_CACHE_KIB = 32 * 1024


def private_database(tables: str) -> sqlite3.Connection:
    """A database with ``tables`` in a temporary file without a name.

    It is gone when the process ends, however it ends.
    The folder is that of ``SQLITE_TMPDIR`` or ``TMPDIR``, else ``/var/tmp``.
    """
    database = sqlite3.connect("", isolation_level=None)
    database.execute("PRAGMA journal_mode=OFF")
    database.execute("PRAGMA synchronous=OFF")
    database.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
    database.executescript(tables)
    database.execute("BEGIN")  # never committed: one transaction is four times as fast as one per row
    return database


class VignetteStore(Sequence[Vignette]):
    """The vignettes of all inputs in input order, and which row every text id was read from."""

    def __init__(self) -> None:
        self._database = private_database(_TABLES)
        self._length = 0

    def claim(self, place: RowPlace) -> None:
        """Note that the row at ``place`` exists.

        Raises:
            MedecFormatError: Another row has its text id.
        """
        file = place.file.encode("utf-8", "backslashreplace").decode()  # a file name may be no UTF-8
        try:
            self._database.execute("INSERT INTO rows VALUES (?, ?, ?)", (place.text_id, file, place.row))
        except sqlite3.IntegrityError:
            query = "SELECT file, number FROM rows WHERE text_id = ?"
            file, number = self._database.execute(query, (place.text_id,)).fetchone()
            raise MedecFormatError(
                f"{place}: this text id is already that of {file}, row {number}; "
                "give every row its own id, and do not pass the same notes twice."
            ) from None

    def append(self, vignette: Vignette) -> None:
        """Add a vignette.

        Raises:
            MedecFormatError: One with its id is there already.
        """
        # Pickle is safe here: nobody else can write to the nameless file.
        data = pickle.dumps(vignette, protocol=5)
        try:
            self._database.execute("INSERT INTO vignettes VALUES (?, ?, ?)", (self._length, vignette.vignette_id, data))
        except sqlite3.IntegrityError:
            raise MedecFormatError(
                f"vignette {vignette.vignette_id!r} occurs twice in the input; give it once."
            ) from None
        self._length += 1

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Vignette: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Vignette]: ...

    def __getitem__(self, index: int | slice) -> Vignette | Sequence[Vignette]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        number = index + self._length if index < 0 else index
        row = self._database.execute("SELECT data FROM vignettes WHERE number = ?", (int(number),)).fetchone()
        if row is None:
            raise IndexError(index)
        return _vignette(row[0])

    def __iter__(self) -> Iterator[Vignette]:
        for (data,) in self._database.execute("SELECT data FROM vignettes ORDER BY number"):
            yield _vignette(data)


class Exclusions:
    """What gives no row, or not every row it could: each case with its reason and ids, kept on disk."""

    def __init__(self) -> None:
        self._database = private_database("CREATE TABLE exclusions (reason TEXT, text_id TEXT, detail TEXT);")

    def add(self, reason: str, text_ids: Iterable[str], detail: str | None = None) -> None:
        """Note that the rows ``text_ids`` of one case are left out; ``detail`` says more about this one."""
        ids = list(text_ids)
        rows = ((reason, text_id, detail) for text_id in ids)
        self._database.executemany("INSERT INTO exclusions VALUES (?, ?, ?)", rows)

    def counts(self) -> dict[str, int]:
        """Rows by reason, in the order in which the reasons came up."""
        query = "SELECT reason, count(*) FROM exclusions GROUP BY reason ORDER BY min(rowid)"
        return dict(self._database.execute(query).fetchall())

    def rows(self, reason: str) -> Iterator[tuple[str, str | None]]:
        """Text id and detail of every row that ``reason`` left out."""
        query = "SELECT text_id, detail FROM exclusions WHERE reason = ? ORDER BY rowid"
        yield from self._database.execute(query, (reason,))


def _vignette(data: bytes) -> Vignette:
    vignette = pickle.loads(data)
    assert isinstance(vignette, Vignette)
    return vignette
