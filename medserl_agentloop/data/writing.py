"""The files of a data set: parquet with declared columns, and all files of a folder put in place as one.

Called by the ``medserl data`` commands; whoever reads a data set asks ``differs_from_manifest`` whether its files
are whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]
import pyarrow.parquet as pq  # type: ignore[import-untyped, unused-ignore]

_ROW_GROUP = 2000


# Declared, not inferred: inference gives a column that is empty in one file the null type, and files
# whose types differ cannot be concatenated.
def columns(**types: Any) -> list[tuple[str, Any]]:
    """Columns by name; the type ``str`` stands for text and ``int`` for a whole number."""
    return [(name, {str: pa.string(), int: pa.int64()}.get(kind, kind)) for name, kind in types.items()]


MESSAGES = pa.list_(pa.struct(columns(role=str, content=str)))
SCHEMA: Any = pa.schema(
    columns(
        data_source=str,
        agent_name=str,
        prompt=MESSAGES,
        ability=str,
        reward_model=pa.struct(columns(style=str, ground_truth=str)),
        extra_info=pa.struct(
            columns(
                index=int,
                split=str,
                subset=str,
                text_id=str,
                vignette_id=str,
                category=str,
                target_label=str,
                seed_note=str,
                error_note=str,
                clean_note=str,
                error_type=str,
                error_sentence=str,
                corrected_sentence=str,
                error_sentence_id=int,
                sentences=pa.list_(pa.struct(columns(id=int, text=str))),
                pair_source=str,
                edit_tag=str,
                source_sha256=str,
            )
        ),
    )
)


def write_parquet(rows: list[dict[str, Any]], path: Path, schema: Any = SCHEMA) -> None:
    """Write rows; no rows give a file with the columns alone."""
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, row_group_size=_ROW_GROUP)


@contextmanager
def all_or_none(folder: Path) -> Iterator[Path]:
    """An empty folder to write into; what is in it goes to ``folder`` when the block ends well.

    A new folder comes into being at once; in one that exists the files are exchanged one by one, and other files in it
    stay. What stops between two exchanges leaves whole files, some of them old: ``differs_from_manifest`` tells. A
    process that is killed also leaves the hidden folder it wrote into, which nothing reads.

    Raises:
        ValueError: A file cannot be written.
    """
    exists = folder.exists()
    # Inside an existing folder, so that the exchange stays on one file system.
    temporary = (folder if exists else folder.absolute().parent) / f".{folder.name}.{os.getpid()}.tmp"
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if exists:
            for path in sorted(temporary.iterdir()):
                os.replace(path, folder / path.name)
        else:
            os.rename(temporary, folder)
    except OSError as error:
        raise ValueError(
            f"{folder}: cannot be written ({error.strerror or error}); give a folder that you may write to."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
