"""Any file that has a table of notes -> its rows, each with its place for messages.

CSV, JSON lines, Excel, parquet and a saved Hugging Face data set. ``reader.py`` gives the columns
their meaning.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import sys
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from medserl_agentloop.data.cases import MedecFormatError
from medserl_agentloop.games.medical.case import ERROR_TYPES, known_type
from medserl_agentloop.games.medical.edit import one_line
from medserl_agentloop.paths import (
    LONGEST_NOTE,
    each_key_once,
    read_parquet,
    regular_file,
    sha256_of,
)
from medserl_agentloop.terminal import shown, visible

LARGEST_CELL = 4 * LONGEST_NOTE  # the list of a note's sentences is longer than the note
_DELIMITERS = ",;\t|"
# Excel writes such a first line to name the delimiter.
_SEPARATOR_LINE = re.compile(r'"?sep=([,;|\t])"?\r?\n', re.IGNORECASE)


NO_TYPE = "unknown"
NOTE = "the text of the note"  # what to write where there is none
_ABSENT = ("", "na", "n/a", "nan", "none", "null")  # how MEDEC, pandas and JSON spell no value
_LONGEST_TYPE = 40
_UNUSABLE = re.compile("[\0\ud800-\udfff]")
_EXCEL_ERROR = re.compile(r"#(NAME\?|REF!|VALUE!|N/A|DIV/0!|NUM!|NULL!|SPILL!|CALC!)")
_EXCEL_CELL = 32_767  # characters, at which Excel cuts a longer text

T = TypeVar("T")


@dataclass
class Table:
    """The rows of a file, in its order: place and values by column. Rows may lack columns.

    ``faults`` are sentences on rows that could not be read.
    """

    file: str
    sha256: str
    header: list[str] = field(default_factory=list)
    rows: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def read_table(path: Path) -> Table:
    """The table of a file or of a saved data set's folder; a MedecFormatError names what cannot be
    read.
    """
    if path.is_dir():
        return _saved_dataset(path)
    kind = path.suffix.lower()
    if kind not in _READERS:
        raise MedecFormatError(
            f"{path}: files that end in {kind or 'nothing'!r} are not known; give a file that ends "
            f"in {', '.join(_READERS)}, or the folder of a saved Hugging Face data set."
        )
    try:
        if not regular_file(path).stat().st_size:
            raise MedecFormatError(f"{path}: the file is empty; give one with at least one note.")
        table = Table(path.name, sha256_of(path))
        _READERS[kind](path, table)
    except OSError as error:
        raise MedecFormatError(
            f"{path}: cannot be read ({error.strerror or error}); give the path of a file of notes."
        ) from error
    return table


def _text_of(path: Path) -> str:
    """A file's text, without byte order marks.

    A byte that is not UTF-8 becomes a surrogate, which the reader refuses with its row.
    """
    content = path.read_bytes()
    if content.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):  # there are no rows to name
        raise MedecFormatError(
            f"{path}: byte 0 (0x{content[0]:02x}) is not UTF-8; save the file as UTF-8."
        )
    # Excel adds a second mark to a file that had one.
    return content.decode("utf-8", errors="surrogateescape").lstrip("\ufeff")


def _read_csv(path: Path, table: Table) -> None:
    text = _text_of(path)
    named = _SEPARATOR_LINE.match(text)
    text = text[named.end() :] if named else text
    delimiter = named[1] if named else max(_DELIMITERS, key=text.partition("\n")[0].count)
    csv.field_size_limit(LARGEST_CELL)
    # newline="" leaves the line ends inside quoted cells to the CSV parser; strict finds open
    # quotes.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    line = 1 + bool(named)
    try:
        table.header = [name.strip() for name in next(reader, [])]
        twice = [name for name, times in Counter(table.header).items() if name and times > 1]
        if twice:
            raise MedecFormatError(
                f"{table.file}, header: column {shown(twice[0])} occurs twice; rename one of them."
            )
        while True:
            line = 1 + bool(named) + reader.line_num
            cells = next(reader, None)
            if cells is None:
                return
            place = f"{table.file}, line {line}"
            if any(cell.strip() for cell in cells) and len(cells) != len(table.header):
                table.faults.append(
                    f"{place}: found {len(cells)} cells under a header of {len(table.header)} "
                    f"columns; put cells that contain {delimiter!r}, quotes or line breaks in "
                    "double quotes."
                )
            else:
                table.rows.append((place, dict(zip(table.header, cells, strict=False))))
    except csv.Error as error:
        table.faults.append(
            f"{table.file}, line {line}: not valid CSV ({error}); close every quoted cell and "
            'write a quote inside it as "".'
        )


def _read_json_lines(path: Path, table: Table) -> None:
    # Split at LF only: U+2028 and U+0085, where str.splitlines splits, are valid inside JSON
    # strings.
    for number, line in enumerate(io.StringIO(_text_of(path), newline="\n"), start=1):
        place = f"{table.file}, line {number}"
        if not line.strip():
            table.rows.append((place, {}))
            continue
        try:
            values = json.loads(line, object_pairs_hook=each_key_once)
            if not isinstance(values, dict):
                raise ValueError(f"found a JSON {type(values).__name__}")
        except (ValueError, RecursionError) as error:
            table.faults.append(f"{place}: not a JSON object ({error}); write one on every line.")
            continue
        table.rows.append((place, values))
    table.header = list(dict.fromkeys(key for _, values in table.rows for key in values))


def _read_excel(path: Path, table: Table) -> None:
    try:
        from openpyxl import load_workbook
    except ImportError:
        raise MedecFormatError(
            f"{path}: reading Excel files needs openpyxl; run: pip install openpyxl. Or save the "
            "sheet as CSV UTF-8."
        ) from None
    try:
        book = load_workbook(path, read_only=True, data_only=True)
        sheet = book.worksheets[0]
        lines = list(sheet.iter_rows(values_only=True))
    except Exception as error:  # openpyxl raises anything on a damaged file
        reason = " ".join(str(error).split())
        raise MedecFormatError(
            f"{path}: cannot be read as an Excel file ({reason}); save it again as .xlsx."
        ) from error
    if len(book.worksheets) > 1:
        print(
            visible(f"{table.file}: only its first sheet, {sheet.title}, is read"), file=sys.stderr
        )
    header = [str(name or "").strip() for name in (lines or [()])[0]]
    _fill(
        table,
        header,
        (dict(zip(header, line, strict=False)) for line in lines[1:]),
        first=2,
    )


def _read_parquet(path: Path, table: Table) -> None:
    found = read_parquet(path)
    _fill(table, found.column_names, found.to_pylist())


def _saved_dataset(path: Path) -> Table:
    """The table of a folder that ``Dataset.save_to_disk`` wrote."""
    import datasets

    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise MedecFormatError(
            f"{path}: is no regular file and no folder of a saved Hugging Face data set; give a "
            "file of notes, or a folder that save_to_disk wrote."
        ) from error
    if isinstance(found, datasets.DatasetDict):
        raise MedecFormatError(
            f"{path}: has the splits {', '.join(found)}; give the folder of one of them, such as "
            f"{path / next(iter(found), 'train')}."
        )
    hashes = [sha256_of(file) for file in sorted(path.glob("*.arrow"))]
    table = Table(path.name, hashlib.sha256("".join(hashes).encode()).hexdigest())
    _fill(table, found.column_names, found)
    return table


def _fill(
    table: Table, header: Sequence[str], rows: Iterable[dict[str, Any]], first: int = 1
) -> None:
    """Put in the rows of a file that has no lines, numbered from ``first``."""
    table.header = list(header)
    table.rows = [
        (f"{table.file}, row {number}", dict(row)) for number, row in enumerate(rows, start=first)
    ]


_READERS: dict[str, Callable[[Path, Table], None]] = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".jsonl": _read_json_lines,
    ".xlsx": _read_excel,
    ".parquet": _read_parquet,
}


# -- the values of a row ---------------------------------------------------------------------------


@dataclass
class NoteRow:
    """One row of a table, and the problems found in it, in sentences."""

    place: str
    values: Mapping[str, Any]
    as_published: bool = False
    problems: list[str] = field(default_factory=list)

    def refuse(self, column: str, instead: str) -> None:
        found = shown(str(self.values.get(column, "")))
        self.problems.append(f"{self.place}, column {column!r}: found {found}; {instead}.")

    def read(self, column: str | None, parse: Callable[[str], T]) -> T | None:
        """Return what ``parse`` makes of a cell's text; the text is empty without such a column.

        Its ValueError says what to write.
        """
        try:
            return parse(_plain_text(self.values.get(column) if column else None))
        except ValueError as why:
            self.refuse(str(column), str(why))
            return None

    def text(self, column: str | None, needed: str = "", longest: int = LONGEST_NOTE) -> str | None:
        """A text with LF line ends and without outer white space; None where there is none, which
        ``needed`` refuses.

        Both notes of a pair go through here: trailing blanks are more frequent on MEDEC's error
        notes and would give the label away.
        """

        def checked(value: str) -> str | None:
            text = value.replace("\r\n", "\n").replace("\r", "\n").strip()
            if why := _why_unusable(value, longest):
                raise ValueError(why)
            if text.casefold() in _ABSENT:
                if needed:
                    raise ValueError(f"write {needed}")
                return None
            return value if self.as_published else text

        return self.read(column, checked)


def _plain_text(value: Any) -> str:
    """A value of any kind of file as the text that a CSV would have."""
    if value is None or value != value:
        return ""
    if isinstance(value, dict | list | tuple | bytes):
        raise ValueError(f"write a text, not a {type(value).__name__}")
    return str(value)


def _why_unusable(value: str, longest: int) -> str:
    """Return what to write in place of a text that is damaged; empty if it is not."""
    if bad := _UNUSABLE.search(value):
        byte = ord(bad[0]) - 0xDC00
        if 0x80 <= byte <= 0xFF:  # how the table's reader marks it
            return (
                f"character {bad.start()} is the byte 0x{byte:02x}, which is not UTF-8: save the "
                "file as UTF-8"
            )
        what = "a NUL character" if bad[0] == "\0" else "a lone surrogate"
        return (
            f"character {bad.start()} is {what} (U+{ord(bad[0]):04X}), which no tokenizer can "
            "read: write the intended character"
        )
    if _EXCEL_ERROR.fullmatch(value.strip()):
        return "this is Excel's word for a formula that failed: write the text that was meant"
    if len(value) == _EXCEL_CELL:
        return f"Excel cuts a text at {_EXCEL_CELL:,} characters: give the note from its source"
    return "" if len(value) <= longest else f"a note has at most {LONGEST_NOTE:,} characters"


def flag(text: str) -> bool:
    """Return whether the row's note has an error: 0 or 1 in any spelling, or True or False."""
    text = text.strip().lower()
    number = {"true": 1, "false": 0}.get(text, _whole_number(text))
    if number not in (0, 1):
        raise ValueError("write 1 for a note with an error and 0 for a correct one")
    return number == 1


def sentence_number(text: str) -> int:
    """The number of a sentence; -1 where there is none."""
    number = -1 if text.strip().casefold() in _ABSENT else _whole_number(text.strip())
    if number is None or number < -1:
        raise ValueError("write the number of a sentence (0, 1, ...), or -1 for none")
    return number


def _whole_number(text: str) -> int | None:
    """The number that ``1``, ``01``, ``1.0`` or ``-1`` spells; None for anything else."""
    return int(float(text)) if re.fullmatch(r"[+-]?[0-9]{1,6}(\.0*)?", text) else None


def error_type(text: str) -> str | None:
    """MEDEC's name of a type, in any spelling, or the source's own word; None where there is
    none.
    """
    word = one_line(text)
    if len(word) > _LONGEST_TYPE:
        raise ValueError(f"write {', '.join(ERROR_TYPES)}, a type of your own in few words, or NA")
    return known_type(word) or (None if word.casefold() in (*_ABSENT, NO_TYPE) else word)
