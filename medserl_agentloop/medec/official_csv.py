"""MEDEC's own CSV: nine columns, one row per note, error rows and their clean twins.

Called by ``reader.py``.
"""

from __future__ import annotations

import csv
import pickle
import re
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from medserl_agentloop.game.types import ErrorType
from medserl_agentloop.medec import fields
from medserl_agentloop.medec.fields import MedecFormatError, RowPlace
from medserl_agentloop.medec.intake import Intake
from medserl_agentloop.medec.sources import SourceFile
from medserl_agentloop.medec.store import private_database
from medserl_agentloop.medec.vignettes import PairSource, Sentence, Vignette, same_case, subset_of, tag_edit

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
_TABLES = """
CREATE TABLE rows (number INTEGER PRIMARY KEY, text_id TEXT UNIQUE, data BLOB);
CREATE TABLE twins (twin TEXT PRIMARY KEY, error TEXT UNIQUE) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class _Row:
    place: RowPlace
    note: str
    sentences: tuple[Sentence, ...]
    has_error: bool
    error_type: ErrorType | None
    error_sentence_id: int
    error_sentence: str | None
    corrected_sentence: str | None
    corrected_note: str | None

    @property
    def text_id(self) -> str:
        return self.place.text_id


def read_official_csv(source: SourceFile, intake: Intake) -> Iterator[Vignette]:
    """Read the rows and join every error row with its clean twin.

    Raises:
        MedecFormatError: The file is not a CSV with MEDEC's columns, or a row cannot be right.
    """
    return read_official_records(_records(source), source.sha256, intake)


def read_official_records(
    records: Iterable[tuple[RowPlace, dict[str, str]]], sha256: str, intake: Intake
) -> Iterator[Vignette]:
    """The vignettes of rows that have MEDEC's columns, wherever they come from; no cells is an empty record.

    Raises:
        MedecFormatError: A row cannot be right.
    """
    rows = private_database(_TABLES)
    for place, cells in records:
        if any(cell.strip() for cell in cells.values()):
            row = _row(place, intake.text_of(cells, TEXT_COLUMNS))
            intake.claim(row.place)
            rows.execute("INSERT INTO rows VALUES (?, ?, ?)", (place.row, row.text_id, pickle.dumps(row, protocol=5)))
        else:
            intake.drop_empty()
    yield from _vignettes(rows, sha256)


def _records(source: SourceFile) -> Iterator[tuple[RowPlace, dict[str, str]]]:
    """Every record after the header, empty ones too, with its cells by column name."""
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


def _row(place: RowPlace, cells: dict[str, str]) -> _Row:
    text_id = fields.required_text(place, "Text ID", cells["Text ID"], "the row's id, such as ms-train-0")
    place = RowPlace(place.file, place.row, text_id)
    row = _Row(
        place=place,
        note=fields.required_text(place, "Text", cells["Text"], "the text of the note"),
        sentences=fields.numbered_sentences(fields.optional_text(place, "Sentences", cells["Sentences"])),
        has_error=fields.error_flag(place, "Error Flag", cells["Error Flag"]),
        error_type=fields.error_type(place, "Error Type", cells["Error Type"]),
        error_sentence_id=fields.sentence_number(place, "Error Sentence ID", cells["Error Sentence ID"]),
        error_sentence=fields.optional_text(place, "Error Sentence", cells["Error Sentence"]),
        corrected_sentence=fields.optional_text(place, "Corrected Sentence", cells["Corrected Sentence"]),
        corrected_note=fields.optional_text(place, "Corrected Text", cells["Corrected Text"]),
    )
    if row.has_error and row.error_sentence_id < 0:
        raise place.error(
            "Error Sentence ID",
            cells["Error Sentence ID"],
            "the row's flag says that it has an error: write the number of the wrong sentence, or flag 0",
        )
    if not row.has_error:
        _check_clean(row, cells)
    return row


def _check_clean(row: _Row, cells: dict[str, str]) -> None:
    if row.error_sentence_id >= 0:
        raise row.place.error(
            "Error Sentence ID",
            cells["Error Sentence ID"],
            "the row's flag says that it has no error: write -1, or flag 1",
        )
    error_cells = {
        "Error Type": row.error_type,
        "Error Sentence": row.error_sentence,
        "Corrected Sentence": row.corrected_sentence,
        "Corrected Text": row.corrected_note,
    }
    for column, value in error_cells.items():
        if value is not None:
            raise row.place.error(
                column, cells[column], "the row's flag says that it has no error: write NA, or flag 1"
            )


def _vignettes(rows: sqlite3.Connection, sha256: str) -> Iterator[Vignette]:
    # A clean row may stand before its error row, so the twins are known only after one pass over all.
    for row in _all(rows):
        if row.has_error and (twin := _twin(row, rows)):
            rows.execute("INSERT INTO twins VALUES (?, ?)", (twin.text_id, row.text_id))
    for row in _all(rows):
        if row.has_error:
            query = "SELECT data FROM twins JOIN rows ON twin = text_id WHERE error = ?"
            found = rows.execute(query, (row.text_id,)).fetchone()
            yield _error_vignette(row, _unpacked(found[0]) if found else None, sha256)
        elif not rows.execute("SELECT 1 FROM twins WHERE twin = ?", (row.text_id,)).fetchone():
            yield Vignette(
                vignette_id=row.text_id,
                text_ids=(row.text_id,),
                subset=subset_of(row.text_id),
                error_note=None,
                clean_note=row.note,
                clean_text_id=row.text_id,
                sentences=row.sentences,
                pair_source=PairSource.UNPAIRED,
                edit_tag=tag_edit(None, row.note, None, None),
                source_sha256=sha256,
            )


def _all(rows: sqlite3.Connection) -> Iterator[_Row]:
    for (data,) in rows.execute("SELECT data FROM rows ORDER BY number"):
        yield _unpacked(data)


def _unpacked(data: bytes) -> _Row:
    row = pickle.loads(data)
    assert isinstance(row, _Row)
    return row


def _twin(row: _Row, rows: sqlite3.Connection) -> _Row | None:
    """The clean row of the same case: the next id of the same series, if the text agrees."""
    numbered = re.fullmatch(r"(.*?)([0-9]{1,18})", row.text_id, re.DOTALL)
    if not numbered:
        return None
    prefix, digits = numbered.groups()
    twin_id = f"{prefix}{int(digits) + 1:0{len(digits)}d}"
    found = rows.execute("SELECT data FROM rows WHERE text_id = ?", (twin_id,)).fetchone()
    candidate = _unpacked(found[0]) if found else None
    if candidate is None or candidate.has_error:
        return None
    return candidate if same_case(candidate.note, row.corrected_note or row.note) else None


def _error_vignette(row: _Row, twin: _Row | None, sha256: str) -> Vignette:
    # The corrected text goes before the twin's: it differs from the error note in the error only,
    # while a twin often has its sentences in another order, which would tell the two labels apart.
    if row.corrected_note is not None:
        clean_note, clean_text_id, pair_source = row.corrected_note, row.text_id, PairSource.IN_ROW
    elif twin is not None:
        clean_note, clean_text_id, pair_source = twin.note, twin.text_id, PairSource.TWIN
    else:
        clean_note, clean_text_id, pair_source = None, None, PairSource.UNPAIRED
    return Vignette(
        vignette_id=row.text_id,
        text_ids=(row.text_id, twin.text_id) if twin else (row.text_id,),
        subset=subset_of(row.text_id),
        error_note=row.note,
        clean_note=clean_note,
        error_text_id=row.text_id,
        clean_text_id=clean_text_id,
        twin_text_id=twin.text_id if twin else None,
        twin_note=twin.note if twin else None,
        error_type=row.error_type,
        error_sentence=row.error_sentence,
        corrected_sentence=row.corrected_sentence,
        error_sentence_id=row.error_sentence_id,
        sentences=row.sentences,
        pair_source=pair_source,
        edit_tag=tag_edit(row.note, clean_note, row.error_sentence, row.corrected_sentence),
        source_sha256=sha256,
    )
