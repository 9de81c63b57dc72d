"""Synthetic MEDEC files."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from medec.builders import pair, run

from medserl_agentloop.data.reader import COLUMNS


@pytest.fixture
def write_csv(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows of cells as a CSV file."""

    def write(*rows: dict[str, str], name: str = "notes.csv", tail: str = "") -> Path:
        path = tmp_path / name
        with path.open("w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
            file.write(tail)
        return path

    return write


@pytest.fixture
def write_pairs(tmp_path: Path) -> Callable[..., Path]:
    """Writes objects as a JSONL file."""

    def write(*pairs: Any, name: str = "pairs.jsonl") -> Path:
        path = tmp_path / name
        path.write_text(
            "".join(json.dumps(p, ensure_ascii=False) + "\n" for p in pairs), encoding="utf-8"
        )
        return path

    return write


@pytest.fixture
def pairs(write_pairs: Callable[..., Path]) -> Path:
    """A file of 40 pairs."""
    return write_pairs(*(pair(n) for n in range(40)))


@pytest.fixture
def convert(tmp_path: Path) -> Callable[..., Any]:
    """Runs ``medec_to_parquet.py`` into a folder of ``tmp_path``."""

    def convert(*arguments: Any, output: str = "out") -> Any:
        return run("medec_to_parquet", *arguments, "--output", tmp_path / output)

    return convert
