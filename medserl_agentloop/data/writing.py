"""Rows -> parquet in row groups, and several files put in place as one.

Called by the scripts in ``data_prep``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped, unused-ignore]

from medserl_agentloop.data.schema import SCHEMA, to_table

ROW_GROUP = 2000  # rows held in memory at a time: about 20 MB of notes and prompts


def write_parquet(rows: Iterable[dict[str, Any]], path: Path, schema: Any = SCHEMA) -> None:
    """Write ``rows`` as they come; no rows give a file with the columns alone."""
    stream = iter(rows)
    with pq.ParquetWriter(path, schema) as writer:
        while group := list(islice(stream, ROW_GROUP)):
            writer.write_table(to_table(group, schema))


@contextmanager
def all_or_none(folder: Path) -> Iterator[Path]:
    """An empty folder to write into; what is in it goes to ``folder`` when the block ends well.

    A new folder comes into being at once. In one that exists the files are exchanged one by one, and
    exchanged back if one of them cannot be; other files in it stay. A process that is killed between two
    exchanges leaves whole files, some of them old: ``manifest.py`` tells. It also leaves the hidden
    folder it wrote into, which nothing reads.

    Raises:
        ValueError: A file cannot be written; the old files are in their place.
    """
    exists = folder.exists()
    # Inside an existing folder, so that the exchange stays on one file system.
    temporary = (folder if exists else folder.absolute().parent) / f".{folder.name}.{os.getpid()}.tmp"
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if exists:
            _exchange(temporary, folder)
        else:
            os.rename(temporary, folder)
    except OSError as error:
        raise ValueError(
            f"{folder}: cannot be written ({error.strerror or error}); give a folder that you may write to."
        ) from error
    finally:
        with suppress(OSError):
            shutil.rmtree(temporary)


def _exchange(temporary: Path, folder: Path) -> None:
    names = sorted(path.name for path in temporary.iterdir())
    kept = temporary / "before"
    kept.mkdir()
    replaced: list[str] = []
    try:
        for name in names:
            if (folder / name).exists():
                _keep(folder / name, kept / name)
            os.replace(temporary / name, folder / name)
            replaced.append(name)
    except OSError:
        for name in replaced:
            if (kept / name).exists():
                os.replace(kept / name, folder / name)
            else:
                (folder / name).unlink()
        raise


def _keep(path: Path, copy: Path) -> None:
    """A second name for the file, so that it is never out of its place."""
    try:
        os.link(path, copy)
    except OSError:  # not every file system has hard links
        shutil.copy2(path, copy)
