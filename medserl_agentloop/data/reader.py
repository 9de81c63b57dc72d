"""Reads CSV, JSON lines, Excel, parquet and saved Hugging Face data sets into cases, with a report
on every row.

A row has MEDEC's nine columns, an incorrect and a correct note, or a user's columns, named as in
``FIELDS`` or with ``--column``. Rows of the OpenRLHF system are read by
``medical_team.openrlhf_files``.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from medserl_agentloop.data.cases import (
    MEDEC_UW,
    NO_TYPE,
    Case,
    MedecFormatError,
    cell,
    conflicts,
    with_twins,
)
from medserl_agentloop.games.medical.edit import one_line
from medserl_agentloop.paths import did_you_mean, read_parquet, regular_file, sha256_of
from medserl_agentloop.terminal import shown, visible

_NAMES = {
    "id": ("id", "Text ID", "note_id"),
    "note": ("note", "Text", "incorrect_note"),
    "sentences": ("sentences", "Sentences"),
    "has_error": ("has_error", "Error Flag"),
    "error_type": ("error_type", "Error Type"),
    "error_sentence_id": ("error_sentence_id", "Error Sentence ID"),
    "error_sentence": ("error_sentence", "Error Sentence"),
    "corrected_sentence": ("corrected_sentence", "Corrected Sentence"),
    "corrected": ("corrected", "Corrected Text", "correct_note"),
}
FIELDS = tuple(_NAMES)
"""Allowed values of columns, as fields of a ``Case``. The second name of each is MEDEC's."""
COLUMNS = tuple(names[1] for names in _NAMES.values())
_WRITE = {
    "id": "the row's id, such as own-17",
    "note": "the text of the note",
    "has_error": "1 for a note with an error, 0 for a correct one",
    "error_sentence_id": "the number of the wrong sentence (0, 1, ...), or -1 for none",
}
Layout = Mapping[str, str]  # field -> the file's column
_OPENRLHF = ("data_type", "game_category")
_READ_OPENRLHF = "medserl_agentloop.medical_team.openrlhf_files:read_rows"
_CASE = TypeAdapter(Case)

NoteJoin = Mapping[str, Case]  # text of a note, ignoring white space -> the first case that has it
Table = tuple[list[str], Sequence[tuple[str, Mapping[str, Any]]]]
"""A file's columns, and its rows: the place of each, and its values by column."""


@dataclass
class ReadReport:
    """The report on one input, which counts everything that is left out.

    ``records == dropped_empty + pairs + twins + clean_only + error_only + len(contradictions)``,
    except that up to four rows of an OpenRLHF file are about one case.
    """

    file: str
    sha256: str
    records: int = 0
    dropped_empty: int = 0
    pairs: int = 0  # of an error note and a clean note
    twins: int = 0  # clean rows of a case that has an error row
    clean_only: int = 0
    error_only: int = 0
    joined: int = 0  # OpenRLHF rows whose case was found
    uw_rows: int = 0
    error_types: dict[str, int] = field(default_factory=dict)  # of error notes
    # Id of each of these rows, and why.
    contradictions: list[tuple[str, str]] = field(default_factory=list)
    not_joined: list[tuple[str, str]] = field(default_factory=list)

    def count(self, cases: Sequence[Case]) -> None:
        """Fill in what the file's cases say."""
        wrong = [case for case in cases if case.has_error]
        self.pairs = sum(case.clean_note is not None for case in wrong)
        self.twins = sum(case.twin is not None for case in cases)
        self.clean_only = len(cases) - len(wrong)
        self.error_only = len(wrong) - self.pairs
        self.error_types = dict(sorted(Counter(c.error_type or NO_TYPE for c in wrong).items()))
        self.uw_rows = sum(len(case.text_ids) for case in cases if case.subset == MEDEC_UW)


class ReadResult(NamedTuple):
    """The cases of all files in file order, and one report per file."""

    cases: list[Case]
    reports: list[ReadReport]

    @property
    def dropped_empty(self) -> int:
        return sum(report.dropped_empty for report in self.reports)

    @property
    def uw_rows(self) -> int:
        return sum(report.uw_rows for report in self.reports)


def read_files(
    paths: Iterable[Path],
    *,
    columns: Layout | None = None,
    join: Sequence[Path] = (),
    as_published: bool = False,
) -> ReadResult:
    """Read every input; MedecFormatError for an invalid one, or for a row that is in two of them.

    ``columns`` gives the names of a user's columns by field. The cases of OpenRLHF rows are looked
    up in the files of ``join``. With ``as_published``, every row becomes its own case with its
    texts unchanged, and a clean twin's case has its error row's id; contradictory rows stay, and
    the report names them.
    """
    # If several cases share a note, the first one counts.
    others = read_files(join, columns=columns).cases[::-1] if join else []
    joined = {one_line(note): case for case in others for note in case.notes}
    places: dict[str, str] = {}
    read: list[tuple[ReadReport, list[Case]]] = []
    for path in paths:
        source = Source(path, places, as_published)
        members = list(_cases(source, columns or {}, joined if join else None))
        read.append((source.report, members))
    disagreeing = conflicts(case for _, members in read for case in members)
    cases: list[Case] = []
    for report, members in read:
        wrong = [case for case in members if case.case_id in disagreeing]
        report.contradictions += [(i, disagreeing[c.case_id]) for c in wrong for i in c.text_ids]
        kept = [case for case in members if as_published or case.case_id not in disagreeing]
        report.count(kept)
        cases += kept
    reports = [report for report, _ in read]
    if not cases:
        found = [": ".join(each) for report in reports for each in report.contradictions]
        raise MedecFormatError(
            "the input has no notes that can be used: give a file with at least one row that does "
            f"not contradict itself or another one ({(*found, 'there are no rows')[0]})."
        )
    return ReadResult(cases, reports)


# -- files -----------------------------------------------------------------------------------------


def read_table(path: Path) -> Table:
    """The table of a file or a saved data set's folder; ValueError names what cannot be read."""
    if path.is_dir():
        return _saved_dataset(path)
    if path.suffix.lower() not in _READERS:
        raise MedecFormatError(
            f"{path}: files that end in {path.suffix!r} are not known; give a file that ends in "
            f"{', '.join(_READERS)}, or the folder of a saved Hugging Face data set."
        )
    return _READERS[path.suffix.lower()](regular_file(path))


def _text(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode().lstrip("\ufeff")  # Excel adds a second mark to a file that had one
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = error.start - content.rfind(b"\n", 0, error.start)
        raise MedecFormatError(
            f"{path.name}, line {line}, byte {byte}: 0x{content[error.start]:02x} is not UTF-8; "
            "save the file as UTF-8."
        ) from None


def _csv(path: Path) -> Table:
    text = _text(path)
    # Excel writes such a first line to name the delimiter.
    named = re.match(r'"?sep=([,;|\t])"?\r?\n', text, re.IGNORECASE)
    text = text[named.end() :] if named else text
    delimiter = named[1] if named else max(",;\t|", key=text.partition("\n")[0].count)
    # newline="" leaves the line ends inside quoted cells to the parser; strict finds open quotes.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header: list[str] = []
    rows: list[tuple[str, dict[str, str]]] = []
    place = f"{path.name}, header"
    try:
        for cells in reader:
            header = header or [name.strip() for name in cells]
            if any(map(str.strip, cells)) and len(cells) != len(header):
                raise csv.Error(f"{len(cells)} cells under a header of {len(header)} columns")
            rows.append((place, dict(zip(header, cells, strict=False))))
            place = f"{path.name}, line {1 + bool(named) + reader.line_num}"
    except csv.Error as error:
        raise MedecFormatError(
            f"{place}: not valid CSV ({error}); put cells that contain {delimiter!r}, quotes or "
            'line breaks in double quotes, and write a quote inside them as "".'
        ) from None
    if twice := [name for name in header if name and header.count(name) > 1]:
        raise MedecFormatError(
            f"{path.name}, header: column {shown(twice[0])} occurs twice; rename one of them."
        )
    return header, rows[1:]


def _json_lines(path: Path) -> Table:
    rows: list[tuple[str, dict[str, Any]]] = []
    # Split at LF only: U+2028 and U+0085, where str.splitlines splits, are valid inside JSON
    # strings.
    for number, line in enumerate(_text(path).removesuffix("\n").split("\n"), start=1):
        place = f"{path.name}, line {number}"
        try:
            values = json.loads(line) if line.strip() else {}
            if not isinstance(values, dict):
                raise ValueError(f"found a JSON {type(values).__name__}")
        except (ValueError, RecursionError) as error:
            raise MedecFormatError(
                f"{place}: not a JSON object ({error}); write one on every line."
            ) from None
        rows.append((place, values))
    return list(dict.fromkeys(key for _, values in rows for key in values)), rows


def _excel(path: Path) -> Table:
    import pandas as pd

    try:
        sheets = pd.read_excel(path, sheet_name=None, dtype=object, na_filter=False)
    except Exception as error:  # openpyxl may be missing, or raise anything on a damaged file
        reason = " ".join(str(error).split()).rstrip(".")
        raise MedecFormatError(f"{path}: cannot be read as an Excel file ({reason}).") from error
    name, frame = next(iter(sheets.items()))
    if len(sheets) > 1:
        print(visible(f"{path.name}: only its first sheet, {name}, is read"), file=sys.stderr)
    # An empty cell is "" here; a failed formula has no value, and must not be read as empty.
    frame = frame.where(frame.notna(), "#VALUE!")
    return _table(path, [str(column) for column in frame], frame.to_dict("records"), first=2)


def _parquet(path: Path) -> Table:
    found = read_parquet(path)
    return _table(path, found.column_names, found.to_pylist())


def _saved_dataset(path: Path) -> Table:
    from datasets import Dataset

    try:
        found = Dataset.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise MedecFormatError(
            f"{path}: is not the folder of a saved Hugging Face data set; give a file of notes, or "
            "the folder of one split that save_to_disk wrote."
        ) from error
    return _table(path, found.column_names, found)


def _table(path: Path, header: list[str], rows: Iterable[dict[str, Any]], first: int = 1) -> Table:
    return header, [(f"{path.name}, row {n}", row) for n, row in enumerate(rows, first)]


_READERS: dict[str, Callable[[Path], Table]] = {
    ".csv": _csv,
    ".tsv": _csv,
    ".jsonl": _json_lines,
    ".xlsx": _excel,
    ".parquet": _parquet,
}


# -- rows ------------------------------------------------------------------------------------------


class Source:
    """A file while its cases are made; ``places`` has the location of every text id so far."""

    def __init__(self, path: Path, places: dict[str, str], as_published: bool = False) -> None:
        self.path, (self.header, self.table) = path, read_table(path)
        files = sorted(path.glob("*.arrow")) if path.is_dir() else [path]
        self.report = ReadReport(path.name, "+".join(map(sha256_of, files)))
        self.as_published = as_published
        self.places = places

    def rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Place and values of the rows that are not empty."""
        for place, values in self.table:
            self.report.records += 1
            if any(value is not None and str(value).strip() for value in values.values()):
                yield place, values
            else:
                self.report.dropped_empty += 1

    def claim(self, text_id: str, place: str) -> None:
        """Claim a text id for the row at ``place``; MedecFormatError if another row has it."""
        if text_id in self.places:
            raise MedecFormatError(
                f"{place}: its text id {shown(text_id)} is already that of {self.places[text_id]}; "
                "give every row its own id, and every case once, for training or for validation."
            )
        self.places[text_id] = place

    def case(self, place: str, facts: Mapping[str, Any], columns: Layout) -> Case:
        """The case of a row; MedecFormatError names the wrong column."""
        known = {name: value for name, value in facts.items() if value is not None}
        try:
            case: Case = _CASE.validate_python({**known, "source_sha256": self.report.sha256})
        except ValidationError as found:
            error = found.errors()[0]
            name = str(error["loc"][0])
            why = str(error.get("ctx", {}).get("error") or error["msg"])
            if error["type"] not in ("value_error", "string_too_long") and name in _WRITE:
                why = f"write {_WRITE[name]}"
            raise refusal(place, columns.get(name, name), facts.get(name), why) from None
        return case


def refusal(place: str, column: str, found: Any, why: str) -> MedecFormatError:
    """The error for a wrong value in a row's column."""
    value = shown("" if found is None else str(found))
    return MedecFormatError(f"{place}, column {column!r}: found {value}; {why}.")


def _cases(source: Source, columns: Layout, joined: NoteJoin | None) -> Iterator[Case]:
    """The cases of an input, by the layout of its columns."""
    header = source.header
    if not {*columns.values()}.intersection(header) and {*_OPENRLHF}.intersection(header):
        read_rows: Callable[..., Iterator[Case]] = resolve_name(_READ_OPENRLHF)
        return read_rows(source, joined)
    layout = _layout(source.path.name, header, columns)
    stem = re.sub(r"[^0-9A-Za-z]+", "_", source.path.stem).strip("_") or "note"
    cases = []
    for number, (place, values) in enumerate(source.rows(), start=1):
        read = partial(cell, as_published=source.as_published)
        facts = {name: read(values.get(column)) for name, column in layout.items()}
        if "id" not in layout:
            facts["id"] = f"{stem}-{number}"
        elif isinstance(facts["id"], str):
            facts["id"] = facts["id"].strip()
            place += f" ({shown(facts['id'])})"
        if "has_error" not in layout:
            note, corrected = str(facts["note"]), str(facts.get("corrected") or facts["note"])
            paired = layout["note"] == "incorrect_note"
            facts["has_error"] = paired or one_line(corrected) != one_line(note)
        cases.append(source.case(place, facts, layout))
        source.claim(cases[-1].id, place)
    source.report.contradictions += [
        (case.id, why) for case in cases if (why := case.contradiction)
    ]
    if not source.as_published:  # published figures are about every row of a set
        cases = [case for case in cases if not case.contradiction]
    return with_twins(cases, source.as_published) if "id" in layout else iter(cases)


# -- columns ---------------------------------------------------------------------------------------


def _layout(file: str, header: Sequence[str], columns: Layout) -> Layout:
    """The file's columns by field.

    Without corrections and flags every note counts as correct. If the table has other columns, the
    user must confirm that, because one of them may say which notes are wrong.
    """
    if not header:
        raise MedecFormatError(f"{file}: the file is empty; give one with names of columns.")
    named = {name: column for name, column in columns.items() if column}
    known = {name: next((n for n in names if n in header), "") for name, names in _NAMES.items()}
    if known["note"] in _NAMES["note"][1:] and not {*header}.issuperset(named.values()):
        named = {}  # they belong to another input
    layout = {name: column for name, column in (known | named).items() if column}
    absent = [column for column in layout.values() if column not in header]
    unread = [name for name in header if name and name not in layout.values()]
    unflagged = not {"corrected", "has_error"} & layout.keys()
    missing = [name for name in COLUMNS if name not in header]
    wrong = ""
    if absent:
        wrong = f"no column {absent[0]!r}, which --column names{did_you_mean(absent[0], header)}"
    elif "note" not in layout:
        wrong = f"no column 'note'{did_you_mean('note', header)}"
    elif missing and not named and {*COLUMNS[:2]} <= {*header}:
        wrong = f"column {missing[0]!r} of MEDEC's {', '.join(COLUMNS)} is missing"
    elif unflagged and (unread or layout.keys() - {*FIELDS[:3]}) and "has_error" not in columns:
        near = get_close_matches("corrected", unread, n=1)
        wrong = (
            "no column 'corrected' or 'has_error' says which notes are wrong (write --column "
            f"corrected={(*near, 'COLUMN')[0]}, or --column has_error= if all notes are correct)"
        )
    if wrong:
        there = ", ".join(map(shown, filter(None, header))) or "none"
        raise MedecFormatError(
            f"{file}, header: {wrong}; its columns: {there}. Name yours, such as --column "
            f"note=TEXT --column corrected=FIXED (fields: {', '.join(FIELDS)})."
        )
    said = [f"{name} is {column}" for name, column in named.items()]
    said += ["no corrected and no has_error, so every note counts as correct"] * unflagged
    said += [f"not read: {', '.join(unread)}"] if unread else []
    if said and (named or layout["note"] == "note"):
        print(visible(f"{file}: {'; '.join(said)}"), file=sys.stderr)
    return layout
