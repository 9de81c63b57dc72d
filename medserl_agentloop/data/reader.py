"""Tables of notes -> cases, with an account of every row.

A table's columns have one of four layouts:

- MEDEC's nine columns, one row per note, error rows and their clean twins;
- pairs of an incorrect and a correct note, as MEDEC's training set is often passed on;
- rows of the OpenRLHF system, which ``medical_team.openrlhf_files`` reads;
- a user's own, whose columns have the names in ``FIELDS``, or are named with ``--column``.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

from rapidfuzz import fuzz, process, utils

from medserl_agentloop.data.cases import (
    MEDEC_UW,
    Case,
    EditTag,
    MedecFormatError,
    conflicts,
    contradictions,
    sentences_of,
)
from medserl_agentloop.data.tables import (
    LARGEST_CELL,
    NO_TYPE,
    NOTE,
    NoteRow,
    Table,
    error_type,
    flag,
    read_table,
    sentence_number,
)
from medserl_agentloop.games.medical.edit import one_line
from medserl_agentloop.paths import did_you_mean
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
FIELDS = (
    "id",
    "note",
    "sentences",
    "has_error",
    "error_type",
    "error_sentence_id",
    "error_sentence",
    "corrected_sentence",
    "corrected",
)
"""Values that a column may hold, in the order of MEDEC's ``COLUMNS``."""

Layout = Mapping[str, str]  # field -> the file's column
_MEDEC: Layout = dict(zip(FIELDS, COLUMNS, strict=True))
_PAIRS: Layout = {
    "id": "note_id",
    "note": "incorrect_note",
    "corrected": "correct_note",
    **{name: name for name in ("error_type", "error_sentence", "corrected_sentence")},
}
_OPENRLHF = ("data_type", "game_category")
_READ_OPENRLHF = "medserl_agentloop.medical_team.openrlhf_files:read_rows"
_ALIKE = 70  # rapidfuzz partial ratio of 0 to 100, from which on a column may be a field
_SHOWN_PROBLEMS = 10
# Word overlap of a clean row with the corrected text of the error row before it. On the official
# validation set the lowest twin has 0.86, and the highest of two unrelated notes 0.45.
_TWIN_OVERLAP = 0.7

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
    contradicting: int = _count("+ rows that contradict themselves or another row, left out")
    non_local_edits: int = _count("pairs edited in more than one place")
    no_op_edits: int = _count("pairs without a real edit (no-op)")
    joined: int = _count("OpenRLHF rows joined with their case")
    uw_rows: int = _count("rows of MEDEC-UW")
    # Of error notes; ``unknown`` where none is given.
    error_types: dict[str, int] = field(default_factory=dict)
    # Id of each of these rows, and why.
    contradictions: list[tuple[str, str]] = field(default_factory=list)
    not_joined: list[tuple[str, str]] = field(default_factory=list)


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
    """Read every input and check that no row occurs in two of them; MedecFormatError for an invalid
    input.

    ``columns`` names the columns of a user's own tables, by field. The cases of OpenRLHF rows are
    looked up in the files of ``join``. With ``as_published``, every row is a case of its own, its
    texts exactly as in the file, and the id of a clean twin's case is that of its error
    row; rows that contradict each other stay, and the report names them.
    """
    joined = None
    if join:  # of a note in several cases the first one counts
        others = reversed(read_files(join, columns=columns).cases)
        joined = {one_line(note): case for case in others for note in case.notes}
    claims: dict[str, str] = {}
    cases_of: list[list[Case]] = []
    file_of: dict[str, str] = {}
    reports: list[ReadReport] = []
    for path in paths:
        table = read_table(path)
        intake = Intake(claims, as_published, ReadReport(table.file, table.sha256))
        members = list(_cases(path, table, intake, columns or {}, joined))
        if problems := [*intake.problems, *table.faults]:
            raise _refusal(problems)
        if again := [case.case_id for case in members if case.case_id in file_of]:
            raise MedecFormatError(
                f"{table.file}: {len(again)} of its {len(members)} cases are also in "
                f"{file_of[again[0]]} (the first is {again[0]!r}); give every case once, for "
                "training or for validation, and leave one of the files out."
            )
        cases_of.append(members)
        file_of |= {case.case_id: table.file for case in members}
        reports.append(intake.report)
    disagreeing = conflicts(case for members in cases_of for case in members)
    for report, members in zip(reports, cases_of, strict=True):
        for case in members:
            if why := disagreeing.get(case.case_id):
                ids = case.text_ids if not as_published else (case.twin_text_id or case.case_id,)
                report.contradictions += [(text_id, why) for text_id in ids]
        if not as_published:  # published figures are about every row of a set
            members[:] = [case for case in members if case.case_id not in disagreeing]
        _count_cases(report, members)
    cases = [case for members in cases_of for case in members]
    if not cases:
        left_out = sum(report.contradicting for report in reports)
        raise MedecFormatError(
            f"every row of the input contradicts another one ({left_out} rows)."
            if left_out
            else "the input has no notes: give a file with at least one row."
        )
    return ReadResult(cases, reports)


def _refusal(problems: Sequence[str]) -> MedecFormatError:
    count = f" There are {len(problems)} such problems." if len(problems) > 1 else ""
    error = MedecFormatError(problems[0] + count)
    for problem in problems[1:_SHOWN_PROBLEMS]:
        error.add_note(problem)
    return error


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


# -- rows ------------------------------------------------------------------------------------------


@dataclass
class Intake:
    """An input while it is read: the place of every text id in all inputs so far, its report and
    its problems.
    """

    claims: dict[str, str]
    as_published: bool
    report: ReadReport
    problems: list[str] = field(default_factory=list)

    def rows(self, table: Table) -> Iterator[NoteRow]:
        """The table's rows that are not empty."""
        for place, values in table.rows:
            if any(value is not None and str(value).strip() for value in values.values()):
                yield NoteRow(place, values, self.as_published)
            else:
                self.report.dropped_empty += 1

    def accepts(self, row: NoteRow, text_id: str) -> bool:
        """Count a row; return whether it has no fault."""
        self.report.records += 1
        if first := text_id and self.claims.get(text_id):
            row.problems.append(
                f"{row.place}: its text id {shown(text_id)} is already that of {first}; "
                "give every row its own id, and do not pass the same notes twice."
            )
        self.claims.setdefault(text_id, row.place)
        self.problems += row.problems
        return not row.problems

    def cases(self, read: Iterable[tuple[NoteRow, Case]]) -> list[Case]:
        """The cases of the rows without a fault that do not contradict themselves; a
        MedecFormatError if most do.
        """
        cases = [case for row, case in read if self.accepts(row, case.case_id)]
        wrong, refusal = contradictions(cases)
        if refusal:
            raise MedecFormatError(f"{self.report.file}: {refusal}; put the columns right.")
        self.report.contradictions += wrong.items()
        # Published figures are about every row of a set.
        return cases if self.as_published else [case for case in cases if case.case_id not in wrong]


# -- columns ---------------------------------------------------------------------------------------


def _cases(
    path: Path, table: Table, intake: Intake, columns: Layout, joined: NoteJoin | None
) -> Iterator[Case]:
    """The cases of an input, by the layout of its columns."""
    has = set(table.header)
    chosen = bool(columns) and has.issuperset(columns.values())
    if not chosen and has.intersection(_OPENRLHF):
        read: Callable[..., Iterator[Case]] = resolve_name(_READ_OPENRLHF)
        return read(path, table, intake, joined)
    if not table.header:  # such as a file of blank lines
        layout: Layout = _PAIRS
    elif not chosen and has.issuperset(COLUMNS[:2]):
        if absent := [name for name in COLUMNS if name not in has]:
            raise MedecFormatError(
                f"{table.file}, header: column {absent[0]!r} is missing; besides Text ID and Text, "
                f"a file of MEDEC's has {', '.join(COLUMNS[2:])}. For notes of your own, rename "
                "the columns, or name them with --column note=Text."
            )
        layout = _MEDEC
    elif not chosen and has.issuperset((_PAIRS["note"], _PAIRS["corrected"])):
        layout = {name: column for name, column in _PAIRS.items() if column in has}
    else:
        layout = _own_layout(table, columns)
    stem = re.sub(r"[^0-9A-Za-z]+", "_", path.stem).strip("_") or "note"
    rows = enumerate(intake.rows(table), start=1)
    made = ((row, _case_of(row, layout, f"{stem}-{n}", intake.report.sha256)) for n, row in rows)
    cases = intake.cases(made)
    return _with_twins(cases, intake.as_published) if "id" in layout else iter(cases)


def _own_layout(table: Table, columns: Layout) -> Layout:
    """The columns of a user's own table, by field; a MedecFormatError lists those that there are.

    Without a corrected note and a flag every note counts as correct, so a column that may be one
    of them is not passed over.
    """
    there = f"the file has {', '.join(map(shown, filter(None, table.header)))}"
    for name, column in columns.items():
        if column not in table.header:
            raise MedecFormatError(
                f"{table.file}, header: no column {column!r}, which --column {name}={column} "
                f"names{did_you_mean(column, table.header)}; {there}."
            )
    layout = {name: name for name in FIELDS if name in table.header} | dict(columns)
    unread = [name for name in table.header if name and name not in layout.values()]
    if "note" not in layout:
        raise MedecFormatError(
            f"{table.file}, header: no column 'note'{_nearest('note', unread)}; {there}. Name the "
            "columns that you have, such as --column note=TEXT --column corrected=FIXED (fields: "
            f"{', '.join(FIELDS)})."
        )
    if not {"corrected", "has_error"} & layout.keys():
        of_errors = [name for name in layout if name.startswith(("error_", "corrected_"))]
        for name in ("corrected", "has_error"):
            if near := _like(name, unread):
                raise MedecFormatError(
                    f"{table.file}, header: {shown(near)} is like {name!r}: write "
                    f"--column {name}={near}, or leave the column out of the file. Without "
                    f"'corrected' and 'has_error' every note counts as correct; {there}."
                )
        if of_errors:
            raise MedecFormatError(
                f"{table.file}, header: column {shown(layout[of_errors[0]])} is about errors, and "
                "no column has the corrected notes: name it with --column corrected=COLUMN, or "
                f"--column has_error=COLUMN; {there}."
            )
    said = [f"{name} is {column}" for name, column in layout.items() if name != column]
    if not {"corrected", "has_error"} & layout.keys():
        said.append("no corrected and no has_error, so every note counts as correct")
    said += [f"not read: {', '.join(unread)}"] if unread else []
    if said:
        print(visible(f"{table.file}: {'; '.join(said)}"), file=sys.stderr)
    return layout


def _like(name: str, columns: Sequence[str]) -> str | None:
    """The column whose name is most like ``name``, if one is."""
    found = process.extractOne(
        name,
        columns,
        scorer=fuzz.partial_ratio,
        processor=utils.default_process,
        score_cutoff=_ALIKE,
    )
    return str(found[0]) if found else None


def _nearest(name: str, columns: Sequence[str]) -> str:
    near = _like(name, columns)
    return f" (nearest: {near!r})" if near else ""


def _case_of(row: NoteRow, layout: Layout, default_id: str, sha256: str) -> Case:
    """One row as a case of its own, its twin aside."""
    column = layout.get
    text_id: str = default_id
    if "id" in layout:
        text_id = (row.text(layout["id"], "the row's id, such as own-17") or "").strip()
        row.place += f" ({shown(text_id)})" if text_id else ""
    note = row.text(column("note"), NOTE) or ""
    paired = layout.get("note") == _PAIRS["note"]
    corrected = row.text(column("corrected"), NOTE * paired)
    same = one_line(corrected or note) == one_line(note)
    if "has_error" in layout:
        has_error = bool(row.read(column("has_error"), flag))
    else:
        has_error = paired or not same
    listed = row.text(column("sentences"), longest=LARGEST_CELL) or ""
    sentences = row.read(column("sentences"), lambda _: sentences_of(listed, note)) or {}
    kind = row.read(column("error_type"), error_type)
    number = row.read(column("error_sentence_id"), sentence_number)
    error_sentence = row.text(column("error_sentence"))
    corrected_sentence = row.text(column("corrected_sentence"))
    if number is not None and has_error != (number >= 0) and not row.problems:
        placed = sentences or error_sentence or corrected_sentence
        if "error_sentence_id" in layout and (placed or not has_error):
            what = "an error: write the number of the wrong sentence, or flag 0"
            row.refuse(
                layout["error_sentence_id"],
                "the row says that its note has "
                f"{what if has_error else 'no error: write -1, or flag 1'}",
            )
    of_error = {
        "error_type": kind,
        "error_sentence": error_sentence,
        "corrected_sentence": corrected_sentence,
        "corrected": None if same else corrected,
    }
    for name, value in of_error.items():
        if not has_error and value is not None and not row.problems:
            row.refuse(
                layout[name], "the row says that its note has no error: write NA, or mark the error"
            )
    # The corrected text goes before the twin's: it differs from the error note in the error only,
    # while a twin often has its sentences in another order, which would tell the two labels apart.
    return Case(
        case_id=text_id,
        error_note=note if has_error else None,
        clean_note=corrected if has_error else note,
        source_sha256=sha256,
        error_type=kind,
        error_sentence=error_sentence,
        corrected_sentence=corrected_sentence,
        error_sentence_id=-1 if number is None else number,
        sentences=sentences,
    )


# -- twins -----------------------------------------------------------------------------------------


def _with_twins(cases: Iterable[Case], as_published: bool) -> Iterator[Case]:
    """Every error row joined with its clean twin, which may stand before it."""
    by_id = {row.case_id: row for row in cases}
    error_row_of: dict[str, str] = {}
    for text_id, row in by_id.items():
        if twin := _twin(row, by_id):
            error_row_of.setdefault(twin.case_id, text_id)
    twin_of = {text_id: by_id[twin_id] for twin_id, text_id in error_row_of.items()}
    for text_id, row in by_id.items():
        if as_published:
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
        Counter(re.findall(r"\w+", text.casefold()))
        for text in (twin.clean_note, row.clean_note or row.error_note)
    )
    total = one.total() + two.total()
    overlap = 2 * (one & two).total() / total if total else 1.0  # Dice coefficient, 0 to 1
    return twin if overlap >= _TWIN_OVERLAP else None
