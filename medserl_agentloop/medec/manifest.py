"""``manifest.json``: what a data set was made of, how, and what was left out and why.

Called by ``conversion.py``; whoever reads a data set asks ``differs_from_manifest`` whether its files are whole.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from medserl_agentloop.medec.reader import ReadReport
from medserl_agentloop.medec.rows import Exclusions, SplitReport
from medserl_agentloop.medec.writing import sha256_of

MANIFEST = "manifest.json"
DIFFERS = (
    f"the file is not the one that {MANIFEST} beside it describes: a run was killed while it put its files in place, "
    f"or the file was changed since; write the folder again with data_prep/medec_to_parquet.py, or remove {MANIFEST} "
    "if the change was meant"
)
FORMAT = 1
_PACKAGES = ("medserl-agentloop", "pyarrow", "numpy", "jinja2")


@dataclass(frozen=True)
class CrossSplitPair:
    """A training case and a validation case with a note of theirs nearly the same."""

    train: str
    val: str
    similarity: float


@dataclass(frozen=True)
class Manifest:
    """What goes into the file.

    Attributes:
        command: The command line; paths stand as the user typed them.
        options: Every option with its value.
        sources: Account of every input.
        outputs: Name of each parquet file -> its rows and its hash.
        splits: Account of every split.
        near_duplicates: Pairs across the splits.
        exclusions: What was left out.
    """

    command: str
    options: Mapping[str, Any]
    sources: Sequence[ReadReport]
    outputs: Mapping[str, Mapping[str, Any]]
    splits: Mapping[str, SplitReport]
    near_duplicates: Sequence[CrossSplitPair]
    exclusions: Exclusions


def write_manifest(manifest: Manifest, path: Path) -> None:
    """Write the file; the same data set gives the same bytes."""
    head = {
        "format": FORMAT,
        "command": manifest.command,
        "options": dict(manifest.options),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "sources": [asdict(source) for source in manifest.sources],
        "outputs": manifest.outputs,
        "splits": {name: _split(report) for name, report in manifest.splits.items()},
        "near_duplicates_across_splits": [asdict(pair) for pair in manifest.near_duplicates],
    }
    # One line per excluded id: the list is long, and is searched for an id.
    exclusions = []
    for reason, rows in manifest.exclusions.items():
        listed = (
            _json({"id": text_id} if detail is None else {"id": text_id, "detail": detail}) for text_id, detail in rows
        )
        exclusions.append(
            f'{{"reason": {_json(reason)}, "count": {len(rows)}, "rows": [\n   ' + ",\n   ".join(listed) + "]}"
        )
    text = json.dumps(head, indent=1, ensure_ascii=False)[:-2] + ',\n "exclusions": ['
    text += "\n  " * bool(exclusions) + ",\n  ".join(exclusions) + "\n ]\n}\n"
    path.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")


def differs_from_manifest(path: Path) -> bool:
    """Whether the manifest beside an output file has another hash for it; False where it has none."""
    try:
        expected = json.loads((path.parent / MANIFEST).read_bytes())["outputs"][path.name]["sha256"]
        return bool(expected != sha256_of(path))
    except (OSError, ValueError, LookupError, TypeError):  # no such file, or one that is about something else
        return False


def _split(report: SplitReport) -> dict[str, Any]:
    return {
        "vignettes": report.vignettes,
        "unused_vignettes": report.unused_vignettes,
        "eligible": {category.value: count for category, count in report.eligible.items()},
        "rows": {category.value: count for category, count in report.rows.items()},
    }


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "not installed"
