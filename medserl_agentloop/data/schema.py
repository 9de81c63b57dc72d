"""The columns of ``train.parquet`` and ``val.parquet``, declared so that no file can differ.

Called by ``rows.py`` and by whoever writes or concatenates such files.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]

# Declared, not inferred: inference gives a column that is empty in one file the null type, and files
# whose types differ cannot be concatenated.
_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])

_EXTRA_INFO = pa.struct(
    [
        ("index", pa.int64()),
        ("split", pa.string()),
        ("subset", pa.string()),
        ("text_id", pa.string()),
        ("vignette_id", pa.string()),
        ("category", pa.string()),
        ("target_label", pa.string()),
        ("seed_note", pa.string()),
        ("error_note", pa.string()),
        ("clean_note", pa.string()),
        ("error_type", pa.string()),
        ("error_sentence", pa.string()),
        ("corrected_sentence", pa.string()),
        ("error_sentence_id", pa.int64()),
        ("sentences", pa.list_(pa.struct([("id", pa.int64()), ("text", pa.string())]))),
        ("pair_source", pa.string()),
        ("edit_tag", pa.string()),
        ("source_sha256", pa.string()),
    ]
)

SCHEMA: Any = pa.schema(
    [
        ("data_source", pa.string()),
        ("agent_name", pa.string()),
        ("prompt", pa.list_(_MESSAGE)),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        ("extra_info", _EXTRA_INFO),
    ]
)


def to_table(rows: list[dict[str, Any]], schema: Any = SCHEMA) -> Any:
    """A ``pyarrow.Table`` of rows; an empty list gives a table with the same columns."""
    return pa.Table.from_pylist(rows, schema=schema)
