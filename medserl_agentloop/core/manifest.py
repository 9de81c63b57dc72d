"""Whether a data file is the one that the manifest beside it speaks of."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

MANIFEST = "manifest.json"
DIFFERS = (
    f"the file is not the one that {MANIFEST} beside it describes: a run was killed while it put its files in place, "
    f"or the file was changed since; write the folder again with data_prep/medec_to_parquet.py, or remove {MANIFEST} "
    "if the change was meant"
)


def hash_in_manifest(path: Path) -> str | None:
    """The hash that the manifest beside an output file has for it; None where it has none."""
    return _value(path, "outputs", path.name, "sha256")


def option_in_manifest(path: Path, option: str) -> str | None:
    """The value of an option that an output file was written with, e.g. ``--profile``; None where it is not known."""
    return None if hash_in_manifest(path) is None else _value(path, "options", option)


def _value(path: Path, *keys: str) -> str | None:
    try:
        value = json.loads((path.parent / MANIFEST).read_bytes())
        for key in keys:
            value = value[key]
        return None if value is None else str(value)
    except (OSError, ValueError, LookupError, TypeError):  # no such file, or one that is about something else
        return None


def differs_from_manifest(path: Path) -> bool:
    """Whether the manifest beside an output file has another hash for it; False where it has none, or no file is."""
    expected = hash_in_manifest(path)
    return expected is not None and path.is_file() and expected != sha256_of(path)


def sha256_of(path: Path) -> str:
    """Hash of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
