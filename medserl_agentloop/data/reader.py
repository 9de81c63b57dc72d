"""MEDEC data in any known format -> cases, with an account of every row.

- MEDEC's nine columns as CSV, one row per note, error rows and their clean twins. MedErrBench has
  them too. Own notes may leave out where the error stands.
- MedRECT's JSON: a list of notes with the same facts under names of its own, sentences numbered
  from 1.
- One JSON object per line: a pair of an error note and its corrected note.
- One OpenRLHF row per line, which ``medical_team.openrlhf_rows`` reads.

A new format is a function from text and ``Intake`` to cases, called in ``_open``.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

from ftfy import TextFixerConfig, fix_encoding

from medserl_agentloop.data.cases import MEDEC_UW, Case, EditTag, MedecFormatError, contradictions
from medserl_agentloop.data.cells import LARGEST_CELL, NO_TYPE, NOTE, Cells
from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.paths import each_key_once, regular_file
from medserl_agentloop.terminal import shown, visible

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
_SHORT_NAMES = {
    "Text ID": "id",
    "Text": "note",
    "Error Flag": "haserror",
    "Corrected Text": "corrected",
}
_PLACE_OF_ERROR = {"Sentences", "Error Sentence ID", "Error Sentence", "Corrected Sentence"}
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_PAIR_KEYS = (
    "note_id",
    "incorrect_note",
    "correct_note",
    "error_type",
    "error_sentence",
    "corrected_sentence",
)
_SHOWN_PROBLEMS = 10
# Word overlap of a clean row with the corrected text of the error row before it. On the official
# validation set the lowest twin has 0.86, and the highest of two unrelated notes 0.45.
_TWIN_OVERLAP = 0.7
# No guess at bytes that were lost: what stands in their place is text.
_MISREAD_ONLY = TextFixerConfig(
    restore_byte_a0=False, replace_lossy_sequences=False, fix_c1_controls=False
)
_READ_OPENRLHF = "medserl_agentloop.medical_team.openrlhf_rows:read_rows"

NoteJoin = Mapping[str, Case]  # text of a note, white space aside -> the first case that has it


def _count(label: str) -> int:
    return field(default=0, metadata={"label": label})


@dataclass
class ReadReport:
    """Counts of one input's records, by the reader's labels.

    ``records == dropped_empty + pairs + twins + clean_only + error_only + contradicting``: nothing
    else is lost. OpenRLHF files are the exception: up to four of their rows are about one case.
    """

    file: str = ""
    sha256: str = ""
    records: int = _count("records read")
    dropped_empty: int = _count("= empty records, dropped")
    pairs: int = _count("+ pairs (error note and clean note)")
    twins: int = _count("+ clean rows that are a pair's twin")
    clean_only: int = _count("+ clean notes without an error note")
    error_only: int = _count("+ error notes without a clean note")
    contradicting: int = _count("+ rows that contradict themselves, left out")
    non_local_edits: int = _count("pairs edited in more than one place")
    no_op_edits: int = _count("pairs without a real edit (no-op)")
    joined: int = _count("OpenRLHF rows joined with their case")
    repaired: int = _count("rows in which misread characters were put right")
    uw_rows: int = _count("rows of MEDEC-UW")
    error_types: dict[str, int] = field(
        default_factory=dict
    )  # of error notes; ``unknown`` where none is given
    contradictions: list[tuple[str, str]] = field(
        default_factory=list
    )  # id of each of these rows, and why
    not_joined: list[tuple[str, str]] = field(
        default_factory=list
    )  # id of each other OpenRLHF row, and why


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
    join: Sequence[Path] = (),
    repair_encoding: bool = False,
    as_published: bool = False,
) -> ReadResult:
    """Read every input and check that no row occurs in two of them; MedecFormatError for an invalid
    input.

    The cases of OpenRLHF rows are looked up in the files of ``join``. With ``repair_encoding``,
    UTF-8 that was read as cp1252 is put right in every field alike. With ``as_published``, every
    row is a case of its own, its texts exactly as they stand in the file, and the id of a clean
    twin's case is that of its error row.
    """
    joined = None
    if join:  # of a note in several cases the first one counts
        others = reversed(read_files(join, repair_encoding=repair_encoding).cases)
        joined = {one_line(note): case for case in others for note in case.notes}
    claims: dict[str, str] = {}
    cases: list[Case] = []
    file_of: dict[str, str] = {}
    reports: list[ReadReport] = []
    for path in paths:
        intake = Intake(claims, repair_encoding, as_published)
        members = list(_open(path, intake, joined))
        file = intake.report.file
        if problems := intake.problems:
            count = f" There are {len(problems)} such problems." if len(problems) > 1 else ""
            error = MedecFormatError(problems[0] + count)
            for problem in problems[1:_SHOWN_PROBLEMS]:
                error.add_note(problem)
            raise error
        if again := [case.case_id for case in members if case.case_id in file_of]:
            raise MedecFormatError(
                f"{file}: {len(again)} of its {len(members)} cases are also in {file_of[again[0]]} "
                "(the first is "
                f"{again[0]!r}); give every case once, for training or for validation, and leave "
                "one of the files out."
            )
        cases += members
        file_of |= {case.case_id: file for case in members}
        _count_cases(intake.report, members)
        reports.append(intake.report)
    if not cases:
        raise MedecFormatError("the input has no notes: give a MEDEC file with at least one row.")
    return ReadResult(cases, reports)


@dataclass
class Intake:
    """An input while it is read: the row of every text id in all inputs so far, its report and its
    problems.
    """

    claims: dict[str, str]
    repair: bool
    as_published: bool
    report: ReadReport = field(default_factory=ReadReport)
    problems: list[str] = field(default_factory=list)

    def cells(self, place: str, values: dict[str, str]) -> Cells:
        """A row's values, with misread UTF-8 put right where that was asked for."""
        if self.repair:
            before, values = (
                values,
                {name: repair_encoding(value) for name, value in values.items()},
            )
            self.report.repaired += values != before
        return Cells(place, values, self.as_published)

    def accepts(self, cells: Cells, text_id: str) -> bool:
        """Count a row; return whether it has no fault."""
        self.report.records += 1
        if first := text_id and self.claims.get(text_id):
            cells.problems.append(
                f"{cells.place}: this text id is already that of {first}; "
                "give every row its own id, and do not pass the same notes twice."
            )
        self.claims.setdefault(text_id, cells.place)
        self.problems += cells.problems
        return not cells.problems

    def cases(self, rows: Iterable[Cells], case_of: Callable[[Cells, str], Case]) -> list[Case]:
        """The cases of the rows without a fault that do not contradict themselves; a
        MedecFormatError if most do.
        """
        read = ((cells, case_of(cells, self.report.sha256)) for cells in rows)
        cases = [case for cells, case in read if self.accepts(cells, case.case_id)]
        wrong, refusal = contradictions(cases)
        if refusal:
            raise MedecFormatError(f"{self.report.file}: {refusal}; put the columns right.")
        self.report.contradictions += wrong.items()
        # Published figures are about every row of a set.
        return cases if self.as_published else [case for case in cases if case.case_id not in wrong]


def _open(path: Path, intake: Intake, joined: NoteJoin | None) -> Iterator[Case]:
    """The cases of an input; its name and its hash go to the report."""
    if path.suffix.lower() not in (".csv", ".json", ".jsonl"):
        raise MedecFormatError(
            f"{path}: files that end in {path.suffix or 'nothing'!r} are not known; give a .csv "
            "file in MEDEC's "
            "nine columns, a .json file of MedRECT's, or a .jsonl file of pairs or of OpenRLHF "
            "rows."
        )
    text, intake.report.sha256 = _read_text(path)
    intake.report.file = path.name
    if path.suffix.lower() == ".csv":
        return _read_rows(_csv_records(text, intake), intake)
    if path.suffix.lower() == ".json":
        return _read_rows(_medrect_records(text, intake), intake)
    first = next((line for line in text.split("\n") if line.strip()), "")
    if '"data_type"' in first or '"game_category"' in first:
        read: Callable[..., Iterator[Case]] = resolve_name(_READ_OPENRLHF)
        return read(path, text, intake, joined)
    return iter(
        intake.cases((cells for _, cells, _ in objects(text, intake, _PAIR_KEYS)), _case_of_pair)
    )


def _read_text(path: Path) -> tuple[str, str]:
    """A file's text and the hash of its bytes.

    A byte that is not UTF-8 becomes a surrogate, which Cells refuses.
    """
    try:
        content = regular_file(path).read_bytes()
    except OSError as error:
        reason = f"cannot be read ({error.strerror or error}); give the path of a MEDEC file"
        raise MedecFormatError(f"{path}: {reason}.") from error
    if content.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):  # there are no rows to name
        raise MedecFormatError(
            f"{path}: byte 0 (0x{content[0]:02x}) is not UTF-8; save the file as UTF-8."
        )
    if not content.strip():
        raise MedecFormatError(
            f"{path}: the file is empty; give a MEDEC file with at least one row."
        )
    return content.decode("utf-8-sig", errors="surrogateescape"), hashlib.sha256(
        content
    ).hexdigest()


def _count_cases(report: ReadReport, cases: list[Case]) -> None:
    report.records += report.dropped_empty
    wrong = [case for case in cases if case.error_note is not None]
    pairs = [case for case in wrong if case.clean_note is not None]
    report.pairs = len(pairs)
    report.twins = sum(case.twin_text_id is not None for case in cases)
    report.clean_only = len(cases) - len(wrong)
    report.error_only = len(wrong) - len(pairs)
    report.contradicting = len(report.contradictions)
    report.no_op_edits = sum(case.edit_tag is EditTag.NO_OP for case in cases)
    report.non_local_edits = sum(case.edit_tag is EditTag.NON_LOCAL for case in cases)
    report.error_types = dict(sorted(Counter(case.error_type or NO_TYPE for case in wrong).items()))
    report.uw_rows = len(
        {text_id for case in cases if case.subset == MEDEC_UW for text_id in case.text_ids}
    )


# -- MEDEC's CSV -----------------------------------------------------------------------------------


def _read_rows(records: Iterable[Cells], intake: Intake) -> Iterator[Case]:
    """The cases of rows that have MEDEC's columns, every error row joined with its clean twin."""
    by_id = {row.case_id: row for row in intake.cases(records, _case_of_row)}
    # A clean row may stand before its error row, so the twins are known only after one pass over
    # all.
    error_row_of: dict[str, str] = {}
    for text_id, row in by_id.items():
        if twin := _twin(row, by_id):
            error_row_of.setdefault(twin.case_id, text_id)
    twin_of = {text_id: by_id[twin_id] for twin_id, text_id in error_row_of.items()}
    for text_id, row in by_id.items():
        if intake.as_published:
            case_id = error_row_of.get(text_id)
            yield (
                replace(row, case_id=case_id, twin_text_id=text_id, clean_from_twin=True)
                if case_id
                else row
            )
        elif text_id not in error_row_of:
            if twin := twin_of.get(text_id):
                row = replace(row, twin_text_id=twin.case_id, twin_note=twin.clean_note)
                if row.clean_note is None:
                    row = replace(row, clean_note=twin.clean_note, clean_from_twin=True)
            yield row


def _csv_records(text: str, intake: Intake) -> Iterator[Cells]:
    """Every record after the header that is not empty, by column."""
    file = intake.report.file
    csv.field_size_limit(LARGEST_CELL)
    delimiter = max(_DELIMITERS, key=text.partition("\n")[0].count)
    # newline="" leaves the line ends inside quoted cells to the CSV parser; strict finds open
    # quotes.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    row = 0
    try:
        written = [name.strip() for name in next(reader, ())]
        plain = {re.sub(r"[\s_]", "", name).lower(): name for name in reversed(written)}
        alike = {name: plain.get(name.replace(" ", "").lower()) for name in COLUMNS}
        alike |= {name: alike[name] or plain.get(short) for name, short in _SHORT_NAMES.items()}
        names = {found: name for name, found in alike.items() if name not in written}
        header = [names.get(name, name) for name in written]
        absent, times = [name for name in COLUMNS if name not in header], Counter(header)
        problems = [
            f"column {shown(name)} occurs twice"
            for name in sorted(times)
            if name and times[name] > 1
        ]
        if not _PLACE_OF_ERROR <= {*absent} <= _PLACE_OF_ERROR | {"Error Type"}:
            problems = [f"column {name!r} is missing" for name in absent] + problems
        if problems:
            raise MedecFormatError(
                f"{file}, header: {problems[0]}; the first row must name MEDEC's nine columns: "
                f"{', '.join(COLUMNS)}. "
                "For notes of your own, id, note, has_error and corrected are enough."
            )
        notes = [f"{old} is {new}" for old, new in zip(written, header, strict=True) if old != new]
        notes += [f"no {name}" for name in absent] + [f"{_DELIMITERS[delimiter]} between cells"] * (
            delimiter != ","
        )
        if notes:
            print(
                visible(f"{file}, header, as it is understood: {', '.join(notes)}"), file=sys.stderr
            )
        for row, cells in enumerate(reader, start=1):
            place = f"{file}, row {row}"
            if not any(cell.strip() for cell in cells):
                intake.report.dropped_empty += 1
            elif len(cells) == len(header):
                yield intake.cells(
                    place, dict.fromkeys(absent, "NA") | dict(zip(header, cells, strict=True))
                )
            else:
                intake.problems.append(
                    f"{place}: found {len(cells)} cells under a header of {len(header)} columns; "
                    f"put cells that contain {_DELIMITERS[delimiter]}, quotes or line breaks in "
                    "double quotes."
                )
    except csv.Error as error:
        instead = 'close every quoted cell and write a quote inside it as ""'
        intake.problems.append(f"{file}, row {row + 1}: not valid CSV ({error}); {instead}.")


def _medrect_records(text: str, intake: Intake) -> Iterator[Cells]:
    """Every note of a MedRECT file by MEDEC's columns."""
    file = intake.report.file
    try:
        notes = json.loads(text)
        if not isinstance(notes, list):
            raise ValueError(f"found a JSON {type(notes).__name__}")
    except (ValueError, RecursionError) as error:
        raise MedecFormatError(
            f"{file}: not a JSON list ({error}); give a file as MedRECT publishes it."
        ) from error
    for row, note in enumerate(notes, start=1):
        place = f"{file}, row {row}"
        try:
            values = [
                note["sample_id"],
                note["metadata"]["original_text"],
                note["sentences"],
                note["error_flag"],
            ]
        except (KeyError, TypeError) as error:
            intake.problems.append(
                f"{place}: not a note of MedRECT ({error!r}); write sample_id, sentences and so on."
            )
            continue
        values[2] = re.sub(r"(?m)^([0-9]+)\. ", r"\1 ", str(values[2]))
        values += [note.get("_".join(column.lower().split())) for column in COLUMNS[4:]]
        texts = ["" if value is None else str(value) for value in values]
        yield intake.cells(place, dict(zip(COLUMNS, texts, strict=True)))


def _case_of_row(cells: Cells, sha256: str) -> Case:
    """One row as a case of its own, its twin aside."""
    text_id = cells.row_id("Text ID", "the row's id, such as ms-train-0")
    note = cells.text("Text", NOTE) or ""
    sentences = cells.sentences("Sentences", note)
    has_error = cells.flag("Error Flag")
    error_type = cells.error_type("Error Type")
    number = cells.sentence_number("Error Sentence ID")
    error_sentence, corrected_sentence, corrected_text = texts = [
        cells.text(column) for column in ("Error Sentence", "Corrected Sentence", "Corrected Text")
    ]
    placed = sentences or error_sentence or corrected_sentence
    if has_error != (number >= 0) and not cells.problems and (placed or not has_error):
        what = "an error: write the number of the wrong sentence, or flag 0"
        instead = (
            "the row's flag says that it has "
            f"{what if has_error else 'no error: write -1, or flag 1'}"
        )
        cells.refuse("Error Sentence ID", instead)
    for column, text in zip(("Error Type", *COLUMNS[6:]), (error_type, *texts), strict=True):
        if not has_error and text is not None and not cells.problems:
            cells.refuse(column, "the row's flag says that it has no error: write NA, or flag 1")
    # The corrected text goes before the twin's: it differs from the error note in the error only,
    # while a twin often has its sentences in another order, which would tell the two labels apart.
    return Case(
        case_id=text_id,
        error_note=note if has_error else None,
        clean_note=corrected_text if has_error else note,
        source_sha256=sha256,
        error_type=error_type,
        error_sentence=error_sentence,
        corrected_sentence=corrected_sentence,
        error_sentence_id=number,
        sentences=sentences,
    )


def _twin(row: Case, rows: Mapping[str, Case]) -> Case | None:
    """The clean row of the same case as an error row: the next id of the same series, if the text
    agrees.
    """
    numbered = re.fullmatch(r"(.*?)([0-9]{1,18})", row.case_id, re.DOTALL)
    if row.error_note is None or not numbered:
        return None
    prefix, digits = numbered.groups()
    twin = rows.get(f"{prefix}{int(digits) + 1:0{len(digits)}d}")
    if twin is None or twin.error_note is not None or twin.clean_note is None:
        return None
    # The same words, with the sentences in any order.
    one, two = (
        Counter(re.findall(r"\w+", t.casefold()))
        for t in (twin.clean_note, row.clean_note or row.error_note)
    )
    total = one.total() + two.total()
    overlap = 2 * (one & two).total() / total if total else 1.0  # Dice coefficient, 0 to 1
    return twin if overlap >= _TWIN_OVERLAP else None


def repair_encoding(text: str) -> str:
    """``text`` with UTF-8 that was read as another encoding (``â€“`` for a dash) put right; genuine
    signs stay.
    """
    return fix_encoding(text, _MISREAD_ONLY)


# -- objects, one on each line ---------------------------------------------------------------------


def _case_of_pair(cells: Cells, sha256: str) -> Case:
    return Case(
        case_id=cells.row_id("note_id", "the pair's id, such as ms-train-0"),
        error_note=cells.text("incorrect_note", NOTE),
        clean_note=cells.text("correct_note", NOTE),
        error_sentence=cells.text("error_sentence"),
        corrected_sentence=cells.text("corrected_sentence"),
        error_type=cells.error_type("error_type"),
        source_sha256=sha256,
    )


def objects(
    text: str, intake: Intake, keys: tuple[str, ...]
) -> Iterator[tuple[int, Cells, list[str]]]:
    """Every line's number, the texts of its object, absent ones as ``""``, and those of other
    keys."""
    # Split at LF only: U+2028 and U+0085, where str.splitlines splits, are valid inside JSON
    # strings.
    for row, line in enumerate(io.StringIO(text, newline="\n"), start=1):
        place = f"{intake.report.file}, row {row}"
        if not line.strip():
            intake.report.dropped_empty += 1
            continue
        try:
            values = json.loads(line, object_pairs_hook=each_key_once)
            if not isinstance(values, dict):
                raise ValueError(f"found a JSON {type(values).__name__}")
        except (ValueError, RecursionError) as error:
            instead = f"write one with the keys {', '.join(keys)} on every line"
            intake.problems.append(f"{place}: not a JSON object ({error}); {instead}.")
            continue
        texts = {key: "" if values.get(key) is None else str(values[key]) for key in keys}
        cells = intake.cells(place, texts)
        for key in keys:
            if not isinstance(values.get(key), str | None):
                cells.refuse(key, "write a JSON string")
        yield (
            row,
            cells,
            [value for key, value in values.items() if key not in keys and isinstance(value, str)],
        )
