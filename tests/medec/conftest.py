"""Synthetic MEDEC files."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from medec.builders import TOKENIZER, run

from medserl_agentloop.data.reader import COLUMNS

OPENING = "Patient number {n} came in with a cough and a temperature of 38.{n} degrees since Monday."


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(folder)
    return str(folder)


def _row(values: list[str], cells: dict[str, str]) -> dict[str, str]:
    row = dict(zip(COLUMNS, [*values, *["NA"] * 4][:9], strict=True))
    if row["Error Sentence"] not in cells.get("Text", row["Error Sentence"]):
        row |= dict.fromkeys(("Sentences", "Error Sentence", "Corrected Sentence"), "NA")
    return row | {name.replace("_", " "): value for name, value in cells.items()}


@pytest.fixture
def error_row() -> Callable[..., dict[str, str]]:
    """Makes the cells of an error row; keywords replace cells (``Text_ID`` for ``Text ID``)."""

    def make(n: int = 0, **cells: str) -> dict[str, str]:
        opening, wrong, right = OPENING.format(n=n), "He was given warfarin for it.", "He was given amoxicillin for it."
        values = [f"ms-test-{n}", f"{opening} {wrong} ", f"0 {opening}\n1 {wrong}", "1", "pharmacotherapy", "1"]
        return _row([*values, wrong, right, f"{opening} {right}"], cells)

    return make


@pytest.fixture
def clean_row() -> Callable[..., dict[str, str]]:
    """Makes the cells of a clean row, by default the twin of ``error_row(n - 1)``."""

    def make(n: int = 1, **cells: str) -> dict[str, str]:
        opening, right = OPENING.format(n=n - 1), "He was given amoxicillin for it."
        return _row([f"ms-test-{n}", f"{right} {opening}", f"0 {right}\n1 {opening}", "0", "NA", "-1"], cells)

    return make


@pytest.fixture
def write_csv(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows of cells as a CSV file."""

    def write(*rows: dict[str, str], name: str = "notes.csv", newline: str = "\r\n", tail: str = "") -> Path:
        path = tmp_path / name
        with path.open("w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator=newline)
            writer.writeheader()
            writer.writerows(rows)
            file.write(tail)
        return path

    return write


@pytest.fixture
def pair() -> Callable[..., dict[str, Any]]:
    """Makes one object of the pair format; keywords replace keys."""

    def make(n: int = 0, **values: Any) -> dict[str, Any]:
        opening = OPENING.format(n=n)
        wrong, right = f"Diagnosis {n} is gout.", f"Diagnosis {n} is pneumonia."
        made = {
            "split": "train",
            "note_id": f"ms-train-{n}",
            "incorrect_note": f"{opening} {wrong} ",
            "correct_note": f"{opening} {right}",
            "error_type": "diagnosis",
            "error_sentence": wrong,
            "corrected_sentence": right,
        } | values
        named = wrong in made["incorrect_note"] or "error_sentence" in values
        return made if named else made | {"error_sentence": None, "corrected_sentence": None}

    return make


@pytest.fixture
def write_pairs(tmp_path: Path) -> Callable[..., Path]:
    """Writes objects as a JSONL file."""

    def write(*pairs: Any, name: str = "pairs.jsonl", ensure_ascii: bool = False) -> Path:
        path = tmp_path / name
        lines = (json.dumps(p, ensure_ascii=ensure_ascii) + "\n" for p in pairs)
        path.write_bytes("".join(lines).encode())
        return path

    return write


@pytest.fixture
def pairs(write_pairs: Callable[..., Path], pair: Callable[..., dict[str, Any]]) -> Path:
    """A file of 40 pairs."""
    return write_pairs(*(pair(n) for n in range(40)))


@pytest.fixture
def convert(tmp_path: Path) -> Callable[..., Any]:
    """Runs ``medec_to_parquet.py`` into a folder of ``tmp_path``."""

    def convert(*arguments: Any, output: str = "out") -> Any:
        return run("medec_to_parquet", *arguments, "--output", tmp_path / output)

    return convert
