"""``manifest.json``: what a data set was made of, how, and what was left out and why.

Called by ``conversion.py``; whoever reads a data set asks ``core.manifest`` whether its files are whole.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FORMAT = 1
_PACKAGES = ("medserl-agentloop", "pyarrow", "numpy", "jinja2")


def write_manifest(
    path: Path,
    command: str,
    options: Mapping[str, Any],
    account: Mapping[str, Any],
    exclusions: Mapping[str, list[tuple[str, str | None]]],
) -> None:
    """Write the file; the same data set gives the same bytes.

    Args:
        path: The file.
        command: The command line; paths stand as the user typed them.
        options: Every option with its value.
        account: Of inputs, outputs and splits.
        exclusions: Reason -> id and detail of what was left out.
    """
    versions = {"python": platform.python_version(), **{p: _version(p) for p in _PACKAGES}}
    head = {"format": FORMAT, "command": command, "options": options, "versions": versions, **account}
    # One line for each excluded id, so that a long list can be read and searched.
    reasons = [
        f'{{"reason": {_json(reason)}, "count": {len(rows)}, "rows": [\n   '
        + ",\n   ".join(_json({"id": i} if detail is None else {"id": i, "detail": detail}) for i, detail in rows)
        + "]}"
        for reason, rows in exclusions.items()
    ]
    listed = "".join(f"\n  {reason}," for reason in reasons).rstrip(",")
    text = json.dumps(head, indent=1, ensure_ascii=False)[:-2] + f',\n "exclusions": [{listed}\n ]\n}}\n'
    path.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "not installed"
