"""MEDEC data in any known format -> cases, with an account of every row.

Called by the ``medserl data`` commands and evaluation. The formats:

- MEDEC's nine columns, one row per note, error rows and their clean twins: its own CSV, or a Hugging Face data set: a
  local folder, or ``hf:NAME`` from the hub; ``hf:NAME:SPLIT`` takes one split, otherwise all of them are read.
- One JSON object per line: a pair of an error note and its corrected note.
- One OpenRLHF row per line, ``{prompt, completion, data_type}`` or ``{vanilla, adversarial, completion, data_type}``: a
  note and a category, without an id and an error type; these are found by looking the note up in MEDEC's own files.
  What such rows are made from, ``{game_category, error_note, clean_note, error_type}``, lacks the id alone. Rows of one
  case become one case that serves exactly the categories of its rows, so that ``--mix`` chooses among the rows given
  and a case stays in one split.

A new file format is a function from text and ``Intake`` to cases, called in ``_open``.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from medserl_agentloop.data import cases as cell
from medserl_agentloop.data.cases import (
    EditTag,
    Intake,
    MedecFormatError,
    NearDuplicateIndex,
    ReadReport,
    RowPlace,
    Vignette,
    first_line,
    read_text,
    same_case,
)
from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.games.medical.types import Category, Label

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
REQUIRED_KEYS = ("note_id", "incorrect_note", "correct_note")
_PAIR_KEYS = (*REQUIRED_KEYS, "error_type", "error_sentence", "corrected_sentence")
_WITH_BOTH_NOTES = ("game_category", "error_note", "clean_note", "error_type")
_OPENRLHF_KEYS = ("prompt", "vanilla", "adversarial", "completion", "data_type", *_WITH_BOTH_NOTES)
_NO_TYPE = ("unknown", "none")
# Which collection a file's or folder's name speaks of, and a value beside the notes, such as an id.
_COLLECTION = re.compile(r"(?:(?<![a-z])|(?<=medec))(ms|uw)(?![a-z])", re.IGNORECASE)
_OF_COLLECTION = re.compile(r"(?:medec[-_ ]?)?(ms|uw)(?:[-_]\S*)?", re.IGNORECASE)
_SAFE = "Safe"  # the completion of a vanilla_benign row; that of all others is empty

NoteJoin = Mapping[str, Vignette]  # text of a note, white space aside -> the first case that has it


class ReadResult(NamedTuple):
    """The cases of all files in file order, and one report per file."""

    vignettes: list[Vignette]
    reports: list[ReadReport]


def read_files(paths: Iterable[Path | str], *, join: Sequence[Path] = (), repair_encoding: bool = False) -> ReadResult:
    """Read every input and make sure that no row occurs in two of them; a MedecFormatError says what is not right.

    The cases of OpenRLHF rows are looked up in the files of ``join``. With ``repair_encoding``, UTF-8 that was read as
    cp1252 is put right in every field alike.
    """
    cases = _cases_of(join, repair_encoding) if join else None
    claims: dict[str, RowPlace] = {}
    vignettes: list[Vignette] = []
    file_of: dict[str, str] = {}
    reports: list[ReadReport] = []
    for path in paths:
        intake = Intake(claims, repair_encoding)
        members = list(_open(path, intake, cases))
        file = intake.report.file
        if again := [case.vignette_id for case in members if case.vignette_id in file_of]:
            raise MedecFormatError(
                f"{file}: {len(again)} of its {len(members)} cases are also in {file_of[again[0]]} (the first is "
                f"{again[0]!r}); give every case once, for training or for validation, and leave one of the files out."
            )
        vignettes += members
        file_of |= {case.vignette_id: file for case in members}
        _count(intake.report, members)
        reports.append(intake.report)
    if not vignettes:
        raise MedecFormatError("the input has no notes: give a MEDEC file with at least one row.")
    return ReadResult(vignettes, reports)


def _cases_of(join: Sequence[Path], repair_encoding: bool) -> NoteJoin:
    """The cases by the text of their notes."""
    for path in join:
        if path.suffix == ".jsonl" and _has_key(read_text(path)[0], "data_type"):
            raise MedecFormatError(
                f"{path}: an OpenRLHF file with 'data_type' has no error types to join with; give --join MEDEC's CSV, "
                "a .jsonl file of pairs, or the file with 'game_category' that the OpenRLHF file was made from."
            )
    cases: dict[str, Vignette] = {}
    for case in read_files(join, repair_encoding=repair_encoding).vignettes:
        for note in case.notes:
            cases.setdefault(one_line(note), case)
    return cases


def _open(path: Path | str, intake: Intake, cases: NoteJoin | None) -> Iterator[Vignette]:
    """The cases of an input; its name and its hash go to the report."""
    if str(path).startswith(HUB) or Path(path).is_dir():
        return _read_dataset(path, intake)
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".jsonl"):
        raise MedecFormatError(
            f"{path}: files that end in {path.suffix or 'nothing'!r} are not known; give a .csv file in MEDEC's "
            "nine columns, a .jsonl file of pairs or of OpenRLHF rows, or a data set as a folder or as hf:NAME."
        )
    text = intake.read(path)
    if suffix == ".csv":
        return _read_records(csv_records(path.name, text), intake)
    if _has_key(text, "data_type", "game_category"):
        return _read_openrlhf_rows(path, text, intake, cases)
    return _read_pairs(text, intake)


def _count(report: ReadReport, cases: list[Vignette]) -> None:
    wrong = [v for v in cases if v.error_note is not None]
    pairs = [v for v in wrong if v.clean_note is not None]
    types = Counter(v.error_type.value if v.error_type else "unknown" for v in wrong)
    report.pairs = len(pairs)
    report.pairs_by_twin = sum(v.clean_from_twin for v in pairs)
    report.twins = sum(v.twin_text_id is not None for v in cases)
    report.clean_only = len(cases) - len(wrong)
    report.error_only = len(wrong) - len(pairs)
    report.no_op_edits = sum(v.edit_tag is EditTag.NO_OP for v in cases)
    report.non_local_edits = sum(v.edit_tag is EditTag.NON_LOCAL for v in cases)
    report.unlisted_error_sentences = sum(
        v.error_sentence_id not in {sentence.id for sentence in v.sentences} for v in wrong if v.sentences
    )
    report.error_types = dict(sorted(types.items()))
    report.uw_rows = sum(len(v.text_ids) for v in cases if v.subset == "medec_uw")


def _read_records(records: Iterable[tuple[RowPlace, dict[str, str]]], intake: Intake) -> Iterator[Vignette]:
    """The cases of rows that have MEDEC's columns, every error row joined with its clean twin."""
    rows: dict[str, Vignette] = {}
    for place, cells in records:
        if not any(cell.strip() for cell in cells.values()):
            intake.drop_empty()
            continue
        case = case_of_row(place, intake.text_of(cells), intake.report.sha256)
        intake.claim(place.of(case.vignette_id))
        rows[case.vignette_id] = case
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


def csv_records(file: str, text: str) -> Iterator[tuple[RowPlace, dict[str, str]]]:
    """Every record after the header, its cells by column name as the CSV parser gives them; no cells if it is empty."""
    csv.field_size_limit(max(csv.field_size_limit(), _LARGEST_CELL))
    # newline="" leaves the line ends inside quoted cells to the CSV parser; strict finds open quotes.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    row = 0
    try:
        header = [name.strip() for name in next(reader, ())]
        _check_header(file, header)
        for row, cells in enumerate(reader, start=1):
            place = RowPlace(file, row)
            empty = not any(cell.strip() for cell in cells)
            if not empty and len(cells) != len(header):
                raise MedecFormatError(
                    f"{place}: found {len(cells)} cells under a header of {len(header)} columns; "
                    "put cells that contain commas, quotes or line breaks in double quotes."
                )
            yield place, {} if empty else dict(zip(header, cells, strict=True))
    except csv.Error as error:
        instead = 'close every quoted cell and write a quote inside it as ""'
        raise MedecFormatError(f"{file}, row {row + 1}: not valid CSV ({error}); {instead}.") from error


def write_rows(path: Path, rows: Iterable[Sequence[str]]) -> None:
    """Write rows under MEDEC's header."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


def _check_header(file: str, header: list[str]) -> None:
    """Raise MedecFormatError where one of MEDEC's columns is missing or occurs twice."""
    times = Counter(header)
    missing = [f"column {name!r} is missing" for name in COLUMNS if name not in times]
    repeated = [f"column {cell.shown(name)} occurs twice" for name in sorted(times) if name and times[name] > 1]
    if problems := missing + repeated:
        raise MedecFormatError(
            f"{file}, header: {problems[0]}; the first row must name MEDEC's nine columns: {', '.join(COLUMNS)}."
        )


def case_of_row(place: RowPlace, cells: Mapping[str, str], sha256: str) -> Vignette:
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


def _read_dataset(path: Path | str, intake: Intake) -> Iterator[Vignette]:
    """The cases of a data set, a folder or a name on the hub; its hash is that of its rows."""
    name = str(path) if str(path).startswith(HUB) else Path(path).name
    digest = hashlib.sha256()
    records: list[tuple[RowPlace, dict[str, str]]] = []
    for split, data in _load(str(path)).items():
        _check_header(f"{name} ({split})", list(data.column_names))
        for row in data.select_columns(list(COLUMNS)):
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
            # As the CSV would spell it; an absent value is an empty cell, and NaN is what differs from itself.
            cells = {key: "" if value is None or value != value else str(value) for key, value in row.items()}
            records.append((RowPlace(name, len(records) + 1), cells))  # counted over all splits
    intake.report.file, intake.report.sha256 = name, digest.hexdigest()
    return _read_records(records, intake)


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
            data = datasets.load_dataset(repository, split=split or None)
        else:
            data = datasets.load_from_disk(path) if saved else datasets.load_dataset(path)
    except Exception as error:  # the library's errors have no common base
        raise MedecFormatError(
            f"{path}: cannot be loaded as a data set ({first_line(error)}); give a folder written by "
            "datasets.save_to_disk, one with .parquet, .csv or .jsonl files, or hf:NAME of a data set on the hub; "
            "HF_HUB_OFFLINE=1 takes one that was loaded before without asking the hub."
        ) from error
    return dict(data) if isinstance(data, dict) else {"all": data}


def _has_key(text: str, *keys: str) -> bool:
    """Whether the first object of a JSONL file has one of the keys."""
    first = next((line for line in io.StringIO(text, newline="\n") if line.strip()), "")
    return any(f'"{key}"' in first for key in keys)


def _read_pairs(text: str, intake: Intake) -> Iterator[Vignette]:
    """One case per line."""
    for place, values, _ in _objects(text, intake, _PAIR_KEYS):
        text_id = cell.required_text(place, "note_id", values["note_id"], "the pair's id, such as ms-train-0")
        place = place.of(text_id)
        intake.claim(place)
        yield Vignette(
            vignette_id=text_id,
            error_note=_note(place, "incorrect_note", values),
            clean_note=_note(place, "correct_note", values),
            error_sentence=cell.optional_text(place, "error_sentence", values["error_sentence"]),
            corrected_sentence=cell.optional_text(place, "corrected_sentence", values["corrected_sentence"]),
            error_type=cell.error_type(place, "error_type", values["error_type"]),
            source_sha256=intake.report.sha256,
        )


def _read_openrlhf_rows(path: Path, text: str, intake: Intake, join: NoteJoin | None) -> Iterator[Vignette]:
    """Every row with the case that its note belongs to."""
    joined: dict[str, Vignette] = {}
    alone: dict[tuple[str | int, ...], Vignette] = {}
    asked: defaultdict[str, set[Category]] = defaultdict(set)
    stem = re.sub(r"[^0-9A-Za-z]+", "_", path.stem).strip("_") or "openrlhf"
    of_file = _COLLECTION.findall(f"{path.absolute().parent.name}/{path.name}")
    for place, values, others in _objects(text, intake, _OPENRLHF_KEYS):
        category, error, clean = _category_and_notes(place, values)
        case = _case((error if category.seed_label is Label.HARMFUL else clean) or "", category, join)
        of_row = [match[1] for match in map(_OF_COLLECTION.fullmatch, others) if match]
        # The collection is the beginning of an id: see Vignette.subset. In doubt it is the one with a licence.
        named = sorted({collection.lower() for collection in of_file + of_row})[-1:]
        if isinstance(case, Vignette):
            if case.categories is not None and not case.subset.startswith("medec_"):  # from a file without ids
                intake.report.unknown_origin += not named
                case = replace(case, vignette_id="_".join([*named, case.vignette_id]))
            intake.claim(place.of(f"{case.vignette_id}/{category.value}"))
            intake.report.joined += 1
            joined[case.vignette_id] = case
        else:
            intake.report.unknown_origin += not named
            name = f"{'_'.join([*named, stem])}-{place.row}"
            intake.claim(place.of(name))
            intake.report.not_joined.append((name, case))
            kind = "" if values["error_type"].lower() in _NO_TYPE else values["error_type"]
            error_type = cell.error_type(place, "error_type", kind)
            key = (one_line(error), one_line(clean)) if error and clean else (place.row,)
            case = alone.setdefault(key, Vignette(name, error, clean, intake.report.sha256, error_type=error_type))
        asked[case.vignette_id].add(category)
    for case in (*joined.values(), *_paired(list(alone.values()))):
        wanted = set[Category]().union(*(asked[text_id] for text_id in case.text_ids))
        in_order = tuple(category for category in Category if category in wanted)
        yield replace(case, categories=in_order, source_sha256=intake.report.sha256)


def _category_and_notes(place: RowPlace, values: dict[str, str]) -> tuple[Category, str | None, str | None]:
    """What a row asks for, its error note and its clean note."""
    key = "game_category" if values["game_category"] else "data_type"
    known = [category.value for category in Category]
    if values[key] not in known:
        raise place.error(key, values[key], f"write one of {', '.join(known)}")
    category = Category(values[key])
    harmful = category.seed_label is Label.HARMFUL
    if key == "game_category":
        _note(place, "error_note" if harmful else "clean_note", values)
        notes = {name: cell.optional_text(place, name, values[name]) for name in ("error_note", "clean_note")}
        return category, notes["error_note"], notes["clean_note"]
    expected = _SAFE if category is Category.VANILLA_BENIGN else ""
    if values["completion"].strip() not in ("", expected):
        instead = f"the completion of a {category.value} row is {expected!r}"
        raise place.error("completion", values["completion"], instead)
    if values["prompt"]:
        note = _note(place, "prompt", values)
    else:
        key, other = ("adversarial", "vanilla") if category.has_attack else ("vanilla", "adversarial")
        if values[other].strip():
            raise place.error(other, values[other], f"a {category.value} row has its note under {key!r} alone")
        note = _note(place, key, values)
    return (category, note, None) if harmful else (category, None, note)


def _case(note: str, category: Category, join: NoteJoin | None) -> Vignette | str:
    """The row's case in ``join``, or the reason why there is none."""
    if join is None:
        return "no --join file was given"
    case = join.get(one_line(note))
    if case is None:
        return "its note is in no --join file"
    seed = case.error_note if category.seed_label is Label.HARMFUL else case.clean_note
    if seed is None or one_line(seed) != one_line(note):
        return f"{category.value} does not start from this note of {case.vignette_id}"
    return case


def _paired(cases: list[Vignette]) -> Iterator[Vignette]:
    """The cases; an error note without a clean one gets the most similar clean note that has no error note.

    Without ids this is how the two rows of a case are known, which must not stand in two splits.
    """
    wrong, right = ([c for c in cases if getattr(c, other) is None] for other in ("clean_note", "error_note"))
    index = NearDuplicateIndex(case.error_note or "" for case in wrong)
    matches = [(-similar, n, at) for at, c in enumerate(right) for n, similar in index.matches(c.clean_note or "")]
    twin_of: dict[str, Vignette] = {}
    taken: set[str] = set()
    for _, number, at in sorted(matches):
        if wrong[number].vignette_id not in twin_of and right[at].vignette_id not in taken:
            twin_of[wrong[number].vignette_id] = right[at]
            taken.add(right[at].vignette_id)
    for case in cases:
        if twin := twin_of.get(case.vignette_id):
            case = replace(case, clean_note=twin.clean_note, twin_text_id=twin.vignette_id, clean_from_twin=True)
        if case.vignette_id not in taken:
            yield case


def _objects(text: str, intake: Intake, keys: tuple[str, ...]) -> Iterator[tuple[RowPlace, dict[str, str], list[str]]]:
    """The texts of every line's object, absent ones as ``""``, and those of other keys; passes over blank lines."""
    # Split at LF only: U+2028 and U+0085, where str.splitlines splits, are valid inside JSON strings.
    for row, line in enumerate(io.StringIO(text, newline="\n"), start=1):
        place = RowPlace(intake.report.file, row)
        if not line.strip():
            intake.drop_empty()
            continue
        try:
            values = json.loads(line, object_pairs_hook=_once)
        except MedecFormatError as error:
            raise MedecFormatError(f"{place}: {error}") from error
        except (ValueError, RecursionError) as error:
            raise MedecFormatError(f"{place}: not valid JSON ({error}); write one object per line.") from error
        if not isinstance(values, dict):
            raise MedecFormatError(
                f"{place}: found a JSON {type(values).__name__}; write an object with the keys {', '.join(keys)}."
            )
        for key in keys:
            if not isinstance(values.get(key), str | None):
                raise place.error(key, str(values[key]), "write a JSON string")
        others = [value for key, value in values.items() if key not in keys and isinstance(value, str)]
        yield place, intake.text_of({key: values.get(key) or "" for key in keys}), others


def _once(items: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(items)
    if len(values) < len(items):  # json would keep the last value
        key = Counter(key for key, _ in items).most_common(1)[0][0]
        raise MedecFormatError(f"key {cell.shown(key)} occurs twice; write every key of an object once.")
    return values


def _note(place: RowPlace, key: str, values: dict[str, str]) -> str:
    return cell.required_text(place, key, values[key], "the text of the note")
