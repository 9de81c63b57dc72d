"""MEDEC's nine columns, one row per note, error rows and their clean twins: its own CSV, or a Hugging Face data set.

Called by ``reader.py``. A data set is a local folder, or ``hf:NAME`` from the hub; ``hf:NAME:SPLIT`` takes one
split, otherwise all of them are read.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from medserl_agentloop.data import intake as cell
from medserl_agentloop.data.intake import Intake, MedecFormatError, RowPlace, SourceFile, first_line
from medserl_agentloop.data.vignettes import Vignette, same_case

COLUMNS = (
    "Text ID",
    "Text",
    "Sentences",
    "Error Flag",
    "Error Type",
    "Error Sentence ID",
    "Error Sentence",
    "Corrected Sentence",
    "Corrected Text",
)
_COLUMNS_OF_AN_ERROR = ("Error Type", "Error Sentence", "Corrected Sentence", "Corrected Text")
_LARGEST_CELL = 1 << 24
HUB = "hf:"


def read_records(records: Iterable[tuple[RowPlace, dict[str, str]]], intake: Intake) -> Iterator[Vignette]:
    """The vignettes of rows that have MEDEC's columns, every error row joined with its clean twin."""
    rows: dict[str, Vignette] = {}
    for place, cells in records:
        if not any(cell.strip() for cell in cells.values()):
            intake.drop_empty()
            continue
        vignette = vignette_of_row(place, intake.text_of(cells), intake.report.sha256)
        intake.claim(place.of(vignette.vignette_id))
        rows[vignette.vignette_id] = vignette
    # A clean row may stand before its error row, so the twins are known only after one pass over all.
    error_row_of: dict[str, str] = {}
    for text_id, row in rows.items():
        if twin := _twin(row, rows):
            error_row_of.setdefault(twin.vignette_id, text_id)
    twin_of = {text_id: rows[twin_id] for twin_id, text_id in error_row_of.items()}
    for text_id, row in rows.items():
        if twin := twin_of.get(text_id):
            row = replace(row, twin_text_id=twin.vignette_id, twin_note=twin.clean_note)
            if row.clean_note is None:
                row = replace(row, clean_note=twin.clean_note, clean_from_twin=True)
        if text_id not in error_row_of:
            yield row


def csv_records(source: SourceFile) -> Iterator[tuple[RowPlace, dict[str, str]]]:
    """Every record after the header, its cells by column name as the CSV parser gives them; no cells if it is empty."""
    csv.field_size_limit(max(csv.field_size_limit(), _LARGEST_CELL))
    # newline="" leaves the line ends inside quoted cells to the CSV parser; strict finds open quotes.
    reader = csv.reader(source.lines(newline=""), strict=True)
    row = 0
    try:
        header = [name.strip() for name in next(reader, ())]
        check_header(source.name, header)
        for row, cells in enumerate(reader, start=1):
            place = RowPlace(source.name, row)
            empty = not any(cell.strip() for cell in cells)
            if not empty and len(cells) != len(header):
                raise MedecFormatError(
                    f"{place}: found {len(cells)} cells under a header of {len(header)} columns; "
                    "put cells that contain commas, quotes or line breaks in double quotes."
                )
            yield place, {} if empty else dict(zip(header, cells, strict=True))
    except csv.Error as error:
        instead = 'close every quoted cell and write a quote inside it as ""'
        raise MedecFormatError(f"{source.name}, row {row + 1}: not valid CSV ({error}); {instead}.") from error


def write_rows(path: Path, rows: Iterable[Sequence[str]]) -> None:
    """Write rows under MEDEC's header."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


def check_header(file: str, header: list[str]) -> None:
    """Raise MedecFormatError where one of MEDEC's columns is missing or occurs twice."""
    times = Counter(header)
    missing = [f"column {name!r} is missing" for name in COLUMNS if name not in times]
    repeated = [f"column {cell.shown(name)} occurs twice" for name in sorted(times) if name and times[name] > 1]
    if problems := missing + repeated:
        raise MedecFormatError(
            f"{file}, header: {problems[0]}; the first row must name MEDEC's nine columns: {', '.join(COLUMNS)}."
        )


def vignette_of_row(place: RowPlace, cells: Mapping[str, str], sha256: str) -> Vignette:
    """One row as a case of its own, its twin aside."""
    text_id = cell.required_text(place, "Text ID", cells["Text ID"], "the row's id, such as ms-train-0")
    place = place.of(text_id)
    note = cell.required_text(place, "Text", cells["Text"], "the text of the note")
    sentences = cell.numbered_sentences(cell.optional_text(place, "Sentences", cells["Sentences"]))
    has_error = cell.error_flag(place, "Error Flag", cells["Error Flag"])
    error_type = cell.error_type(place, "Error Type", cells["Error Type"])
    number = cell.sentence_number(place, "Error Sentence ID", cells["Error Sentence ID"])
    texts = {column: cell.optional_text(place, column, cells[column]) for column in _COLUMNS_OF_AN_ERROR}
    if has_error != (number >= 0):
        what = "an error: write the number of the wrong sentence, or flag 0"
        instead = f"the row's flag says that it has {what if has_error else 'no error: write -1, or flag 1'}"
        raise place.error("Error Sentence ID", cells["Error Sentence ID"], instead)
    for column, text in texts.items():
        if not has_error and text is not None:
            raise place.error(column, cells[column], "the row's flag says that it has no error: write NA, or flag 1")
    # The corrected text goes before the twin's: it differs from the error note in the error only,
    # while a twin often has its sentences in another order, which would tell the two labels apart.
    return Vignette(
        vignette_id=text_id,
        error_note=note if has_error else None,
        clean_note=texts["Corrected Text"] if has_error else note,
        source_sha256=sha256,
        error_type=error_type,
        error_sentence=texts["Error Sentence"],
        corrected_sentence=texts["Corrected Sentence"],
        error_sentence_id=number,
        sentences=sentences,
    )


def _twin(row: Vignette, rows: Mapping[str, Vignette]) -> Vignette | None:
    """The clean row of the same case as an error row: the next id of the same series, if the text agrees."""
    numbered = re.fullmatch(r"(.*?)([0-9]{1,18})", row.vignette_id, re.DOTALL)
    if row.error_note is None or not numbered:
        return None
    prefix, digits = numbered.groups()
    twin = rows.get(f"{prefix}{int(digits) + 1:0{len(digits)}d}")
    if twin is None or twin.error_note is not None or twin.clean_note is None:
        return None
    return twin if same_case(twin.clean_note, row.clean_note or row.error_note) else None


def read_dataset(path: Path | str, intake: Intake) -> Iterator[Vignette]:
    """The vignettes of a data set, a folder or a name on the hub; its hash is that of its rows."""
    name = str(path) if str(path).startswith(HUB) else Path(path).name
    digest = hashlib.sha256()
    records: list[tuple[RowPlace, dict[str, str]]] = []
    for split, data in _load(str(path)).items():
        check_header(f"{name} ({split})", list(data.column_names))
        for row in data.select_columns(list(COLUMNS)):
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
            # As the CSV would spell it; an absent value is an empty cell, and NaN is what differs from itself.
            cells = {key: "" if value is None or value != value else str(value) for key, value in row.items()}
            records.append((RowPlace(name, len(records) + 1), cells))  # counted over all splits
    intake.report.file, intake.report.sha256 = name, digest.hexdigest()
    return read_records(records, intake)


def _load(path: str) -> dict[str, Any]:
    """The data set's splits by name."""
    # Imported here: it takes a second, and most inputs are files.
    import datasets
    import huggingface_hub

    repository, _, split = path.removeprefix(HUB).partition(":")
    saved = any((Path(path) / name).is_file() for name in ("dataset_dict.json", "state.json"))
    try:
        if path.startswith(HUB):
            if not huggingface_hub.constants.HF_HUB_OFFLINE:
                # Asked once before: load_dataset goes on trying for half a minute.
                huggingface_hub.HfApi().dataset_info(repository, timeout=10.0)
            found = datasets.load_dataset(repository, split=split or None)
        else:
            found = datasets.load_from_disk(path) if saved else datasets.load_dataset(path)
    except Exception as error:  # the library's errors have no common base
        raise MedecFormatError(
            f"{path}: cannot be loaded as a data set ({first_line(error)}); give a folder written by "
            "datasets.save_to_disk, one with .parquet, .csv or .jsonl files, or hf:NAME of a data set on the hub; "
            "HF_HUB_OFFLINE=1 takes one that was loaded before without asking the hub."
        ) from error
    return dict(found) if isinstance(found, dict) else {"all": found}
