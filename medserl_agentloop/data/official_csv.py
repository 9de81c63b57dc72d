"""MEDEC's own CSV: nine columns, one row per note, error rows and their clean twins.

Called by ``reader.py``, and by ``hf_dataset.py`` for rows that have the same columns.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from medserl_agentloop.data import intake as cell
from medserl_agentloop.data.intake import Intake, MedecFormatError, RowPlace, SourceFile
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
TEXT_COLUMNS = ("Text", "Sentences", "Error Sentence", "Corrected Sentence", "Corrected Text")
_LARGEST_CELL = 1 << 24


def read_official_csv(source: SourceFile, intake: Intake) -> Iterator[Vignette]:
    """Read the rows and join every error row with its clean twin."""
    return read_official_records(csv_records(source), source.sha256, intake)


def read_official_records(
    records: Iterable[tuple[RowPlace, dict[str, str]]], sha256: str, intake: Intake
) -> Iterator[Vignette]:
    """The vignettes of rows that have MEDEC's columns, wherever they come from; no cells is an empty record."""
    rows: dict[str, Vignette] = {}
    for place, cells in records:
        if any(cell.strip() for cell in cells.values()):
            vignette = vignette_of_row(place, intake.text_of(cells, TEXT_COLUMNS), sha256)
            intake.claim(RowPlace(place.file, place.row, vignette.vignette_id))
            rows[vignette.vignette_id] = vignette
        else:
            intake.dropped_empty += 1
    # A clean row may stand before its error row, so the twins are known only after one pass over all.
    twins: dict[str, Vignette] = {}
    used: set[str] = set()
    for text_id, row in rows.items():
        twin = None if row.error_note is None else _twin(row, rows)
        if twin is not None and twin.vignette_id not in used:
            twins[text_id] = twin
            used.add(twin.vignette_id)
    for text_id, row in rows.items():
        if text_id in twins:
            twin = twins[text_id]
            row = replace(row, twin_text_id=twin.vignette_id, twin_note=twin.clean_note)
            if row.clean_note is None:
                row = replace(row, clean_note=twin.clean_note, clean_text_id=twin.vignette_id)
            yield row
        elif text_id not in used:
            yield row


def csv_records(source: SourceFile) -> Iterator[tuple[RowPlace, dict[str, str]]]:
    """Every record after the header, its cells by column name as the CSV parser gives them; no cells if it is empty."""
    csv.field_size_limit(max(csv.field_size_limit(), _LARGEST_CELL))
    # newline="" leaves the line ends inside quoted cells to the CSV parser; strict finds open quotes.
    reader = csv.reader(source.lines(newline=""), strict=True)
    row = 0
    try:
        header = [name.strip() for name in next(reader)]
        check_header(source.name, header)
        for row, cells in enumerate(reader, start=1):
            place = RowPlace(source.name, row)
            if not any(cell.strip() for cell in cells):
                yield place, {}
            elif len(cells) != len(header):
                raise MedecFormatError(
                    f"{place}: found {len(cells)} cells under a header of {len(header)} columns; "
                    "put cells that contain commas, quotes or line breaks in double quotes."
                )
            else:
                yield place, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise MedecFormatError(
            f"{source.name}, row {row + 1}: not valid CSV ({error}); "
            'close every quoted cell and write a quote inside it as "".'
        ) from error


def check_header(file: str, header: list[str]) -> None:
    """Raise MedecFormatError where one of MEDEC's columns is missing or occurs twice."""
    missing = [name for name in COLUMNS if name not in header]
    repeated = sorted({name for name in header if name and header.count(name) > 1})
    if missing or repeated:
        problem = f"column {missing[0]!r} is missing" if missing else f"column {repeated[0]!r} occurs twice"
        raise MedecFormatError(
            f"{file}, header: {problem}; the first row must name MEDEC's nine columns: {', '.join(COLUMNS)}."
        )


def vignette_of_row(place: RowPlace, cells: Mapping[str, str], sha256: str) -> Vignette:
    """One row as a case of its own, its twin aside."""
    text_id = cell.required_text(place, "Text ID", cells["Text ID"], "the row's id, such as ms-train-0")
    place = RowPlace(place.file, place.row, text_id)
    note = cell.required_text(place, "Text", cells["Text"], "the text of the note")
    sentences = cell.numbered_sentences(cell.optional_text(place, "Sentences", cells["Sentences"]))
    has_error = cell.error_flag(place, "Error Flag", cells["Error Flag"])
    error_type = cell.error_type(place, "Error Type", cells["Error Type"])
    error_sentence_id = cell.sentence_number(place, "Error Sentence ID", cells["Error Sentence ID"])
    error_sentence, corrected_sentence, corrected_note = (
        cell.optional_text(place, column, cells[column])
        for column in ("Error Sentence", "Corrected Sentence", "Corrected Text")
    )
    if has_error and error_sentence_id < 0:
        instead = "the row's flag says that it has an error: write the number of the wrong sentence, or flag 0"
        raise place.error("Error Sentence ID", cells["Error Sentence ID"], instead)
    if not has_error and error_sentence_id >= 0:
        instead = "the row's flag says that it has no error: write -1, or flag 1"
        raise place.error("Error Sentence ID", cells["Error Sentence ID"], instead)
    for column in ("Error Type", "Error Sentence", "Corrected Sentence", "Corrected Text"):
        if not has_error and cell.optional_text(place, column, cells[column]) is not None:
            instead = "the row's flag says that it has no error: write NA, or flag 1"
            raise place.error(column, cells[column], instead)
    # The corrected text goes before the twin's: it differs from the error note in the error only,
    # while a twin often has its sentences in another order, which would tell the two labels apart.
    error_note, clean_note = (note, corrected_note) if has_error else (None, note)
    return Vignette(
        vignette_id=text_id,
        error_note=error_note,
        clean_note=clean_note,
        source_sha256=sha256,
        error_text_id=text_id if has_error else None,
        clean_text_id=None if clean_note is None else text_id,
        error_type=error_type,
        error_sentence=error_sentence,
        corrected_sentence=corrected_sentence,
        error_sentence_id=error_sentence_id,
        sentences=sentences,
    )


def _twin(row: Vignette, rows: Mapping[str, Vignette]) -> Vignette | None:
    """The clean row of the same case: the next id of the same series, if the text agrees."""
    numbered = re.fullmatch(r"(.*?)([0-9]{1,18})", row.vignette_id, re.DOTALL)
    if not numbered:
        return None
    prefix, digits = numbered.groups()
    twin = rows.get(f"{prefix}{int(digits) + 1:0{len(digits)}d}")
    if twin is None or twin.error_note is not None or twin.clean_note is None:
        return None
    return twin if same_case(twin.clean_note, row.clean_note or row.error_note or "") else None
