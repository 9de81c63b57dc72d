"""Opening a parquet file of games: its footer and schema, and its rows as verl's own dataset.

Called by ``verify.py``.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]
import pyarrow.parquet as pq  # type: ignore[import-untyped, unused-ignore]

from medserl_agentloop.medec.schema import SCHEMA
from medserl_agentloop.medec.verify_rows import REMAKE, Check, Finding


class UnreadableFile(ValueError):
    """A file cannot be opened as verl would; the message is a sentence."""


def parquet_file(path: Path) -> Any:
    """The file as ``pyarrow.parquet.ParquetFile``; raises UnreadableFile."""
    if path.suffix != ".parquet":
        raise UnreadableFile(f"{path}: verl reads files that end in .parquet; give such a file.")
    if not path.is_file():
        raise UnreadableFile(f"{path}: there is no such file; give one written by data_prep/medec_to_parquet.py.")
    try:
        return pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        reason = (getattr(error, "strerror", None) or str(error)).rstrip(".")
        raise UnreadableFile(
            f"{path}: cannot be read as parquet ({reason}); give a file written by data_prep/medec_to_parquet.py."
        ) from error


def parquet_schema(path: Path) -> Any:
    """The Arrow schema of a file with rows; raises UnreadableFile."""
    file = parquet_file(path)
    if file.metadata.num_rows == 0:
        raise UnreadableFile(
            f"{path}: the file has no rows, and verl cannot run on it; leave it out or write it again."
        )
    return file.schema_arrow


def schema_findings(schema: Any) -> Iterator[Finding]:
    """Every column that is not as ``schema.py`` declares it."""
    for column in SCHEMA:
        if column.name not in schema.names:
            yield Check.SCHEMA, f"column {column.name!r} is missing; {REMAKE}"
        elif (found := schema.field(column.name).type) != column.type:
            yield (
                Check.SCHEMA,
                f"column {column.name!r} is of type {found}, expected {column.type}; {REMAKE}, because files of "
                "different types cannot be trained on together",
            )
    for name in schema.names:
        if name not in SCHEMA.names:
            yield (
                Check.SCHEMA,
                f"column {name!r} is not part of the format, and verl hands every column to the agent loop; "
                "take it out of the file",
            )


@contextlib.contextmanager
def open_as_verl(path: Path, tokenizer: Any) -> Iterator[Any]:
    """verl's own dataset of one file, nothing filtered, its cache thrown away afterwards."""
    import datasets
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    config = OmegaConf.create({"filter_overlong_prompts": False, "max_prompt_length": None})
    with tempfile.TemporaryDirectory(prefix="medserl-verify-") as cache:
        # A cache of its own: files that are written again under one name are never read from an old one.
        usual, bars = datasets.config.HF_DATASETS_CACHE, datasets.is_progress_bar_enabled()
        datasets.config.HF_DATASETS_CACHE = Path(cache)
        datasets.disable_progress_bars()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                dataset = RLHFDataset(os.fspath(path), tokenizer, config)
        except Exception as error:  # datasets raises many kinds; all mean that training could not start
            raise UnreadableFile(f"{path}: verl's RLHFDataset cannot open it ({error}); {REMAKE}.") from error
        finally:
            datasets.config.HF_DATASETS_CACHE = usual
            if bars:
                datasets.enable_progress_bars()
        yield dataset
