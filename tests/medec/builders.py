"""Helpers of several modules: scripts to run, and parquet rows as a converter would write them."""

import importlib
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from medserl_agentloop.data.cases import Case, MedecFormatError
from medserl_agentloop.data.reader import COLUMNS, read_files
from medserl_agentloop.data.rows import SCHEMA, RowPlan, build_rows
from medserl_agentloop.data.verify import Check, Report

OPENING = (
    "Patient number {n} came in with a cough and a temperature of 38.{n} degrees since Monday."
)
CATEGORIES = ["vanilla_harmful", "adversarial_harmful", "adversarial_benign"]
CATEGORIES += ["vanilla_benign"] * 3


def run(script: str, *arguments: Any) -> Any:
    """Run a script of ``data_prep``; return its output and exit code."""
    return CliRunner().invoke(
        importlib.import_module(script).app, [str(argument) for argument in arguments]
    )


def assert_one_sentence(result: Any, *parts: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in result.stderr


def manifest_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return found


def _row(values: list[str], cells: dict[str, str]) -> dict[str, str]:
    row = dict(zip(COLUMNS, [*values, *["NA"] * 4][:9], strict=True))
    if row["Error Sentence"] not in cells.get("Text", row["Error Sentence"]):
        row |= dict.fromkeys(("Sentences", "Error Sentence", "Corrected Sentence"), "NA")
    return row | {name.replace("_", " "): value for name, value in cells.items()}


def error_row(n: int = 0, **cells: str) -> dict[str, str]:
    """The cells of an error row; keywords replace cells (``Text_ID`` for ``Text ID``)."""
    opening = OPENING.format(n=n)
    wrong, right = (f"He was given {drug} for it." for drug in ("warfarin", "amoxicillin"))
    notes = [f"{opening} {wrong} ", f"0 {opening}\n1 {wrong}"]
    facts = ["1", "pharmacotherapy", "1", wrong, right, f"{opening} {right}"]
    return _row([f"ms-test-{n}", *notes, *facts], cells)


def clean_row(n: int = 1, **cells: str) -> dict[str, str]:
    """The cells of a clean row, by default the twin of ``error_row(n - 1)``."""
    opening, right = OPENING.format(n=n - 1), "He was given amoxicillin for it."
    return _row(
        [f"ms-test-{n}", f"{right} {opening}", f"0 {right}\n1 {opening}", "0", "NA", "-1"], cells
    )


def pair(n: int = 0, **values: Any) -> dict[str, Any]:
    """One object of the pair format; keywords replace keys."""
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


def good_row(
    n: int, split: str = "train", category: str | None = None, **facts: Any
) -> dict[str, Any]:
    opening = f"Patient number {n} came in with a cough and a temperature of 38.{n} degrees."
    wrong, right = (f"He was given {drug} for it." for drug in ("warfarin", "amoxicillin"))
    texts: dict[str, Any] = {"error_sentence": wrong, "corrected_sentence": right}
    texts |= {"error_type": "pharmacotherapy", "corrected": f"{opening} {right}"}
    texts |= {"error_sentence_id": 1, "sentences": {0: opening, 1: wrong}}
    case = Case(id=f"ms-train-{n}", note=f"{opening} {wrong}", has_error=True, **texts)
    mix = f"{category or CATEGORIES[n % len(CATEGORIES)]}=1"
    (row,) = build_rows([case], RowPlan(mix=mix, val_fraction=0)).train
    row["extra_info"] |= {"index": n, "split": split, **facts}
    return row


def good_rows(count: int = 60, first: int = 0, split: str = "train") -> list[dict[str, Any]]:
    rows = [good_row(n, split) for n in range(first, first + count)]
    random.Random(0).shuffle(rows)
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)
    return path


def assert_found(report: Report, check: Check, *parts: str) -> None:
    assert not report.ok
    messages = [str(problem) for problem in report.problems if problem.check is check]
    assert any(all(part in message for part in parts) for message in messages), messages


def read_one(path: Path) -> Case:
    return read_files([path]).cases[0]


def message_of(path: Path) -> str:
    with pytest.raises(MedecFormatError) as caught:
        read_files([path])
    return str(caught.value)
