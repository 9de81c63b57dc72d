"""Writing several parquet files as one: all new, or all as they were.

Called by the scripts in ``data_prep``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped, unused-ignore]


def write_together(tables: Mapping[Path, Any]) -> None:
    """Write every ``pyarrow.Table`` beside its final place, then move them there.

    Raises:
        ValueError: A file cannot be written; the old ones are left alone.
    """
    temporary = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in tables}
    path = Path()
    try:
        for path, table in tables.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(table, temporary[path])
        for path, temp in temporary.items():
            os.replace(temp, path)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be written ({error.strerror or error}); give a place that you may write to."
        ) from error
    finally:
        for temp in temporary.values():
            with suppress(OSError):
                temp.unlink()
