"""Anyone's tables of notes: every kind of file, columns by any name, and what is refused."""

import csv
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow.parquet as pq
import pytest
from medec.builders import assert_one_sentence, clean_row, error_row, manifest_of, message_of, run

from medserl_agentloop.data.cases import Case
from medserl_agentloop.data.reader import COLUMNS, FIELDS, read_files

WRONG = "Patient {n} of ward {n} has had a fever since Monday. He was given warfarin for it."
RIGHT = WRONG.replace("warfarin", "amoxicillin")
MIX = {"vanilla_benign": 1, "adversarial_benign": 1}


def pairs_of(count: int = 40) -> list[dict[str, Any]]:
    """Rows of a user's own: a note with an error and its correction."""
    return [
        {"id": f"own-{n}", "note": WRONG.format(n=n), "corrected": RIGHT.format(n=n)}
        for n in range(count)
    ]


def renamed(rows: list[dict[str, Any]], **names: str) -> list[dict[str, Any]]:
    return [{names.get(key, key): value for key, value in row.items()} for row in rows]


def write_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    frame = pd.DataFrame(rows)
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    elif path.suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    elif path.suffix == ".parquet":
        frame.to_parquet(path)
    elif path.suffix == ".xlsx":
        pytest.importorskip("openpyxl")
        frame.to_excel(path, index=False)
    else:
        datasets.Dataset.from_pandas(frame).save_to_disk(path)
    return path


def categories(folder: Path) -> dict[str, int]:
    table = pq.read_table(folder / "train.parquet")["extra_info"].to_pylist()
    return pd.Series([facts["category"] for facts in table]).value_counts().to_dict()


def cases_of(path: Path, **columns: str) -> list[Case]:
    return read_files([path], columns=columns).cases


# --- any kind of file ---


@pytest.mark.parametrize("name", ["own.csv", "own.jsonl", "own.parquet", "own.xlsx", "saved"])
def test_columns_of_any_name_can_be_named(convert: Any, tmp_path: Path, name: str) -> None:
    path = write_table(tmp_path / name, renamed(pairs_of(), note="TEXT", corrected="FIXED"))
    refused = convert("--input", path)
    assert_one_sentence(refused, "no column 'note'", "'id', 'TEXT', 'FIXED'", "--column note=TEXT")
    done = convert("--input", path, "--column", "note=TEXT", "--column", "corrected=FIXED")
    assert done.exit_code == 0, done.output
    assert "note is TEXT; corrected is FIXED" in done.stderr
    assert len(categories(tmp_path / "out")) == 4


def test_a_column_that_may_tell_wrong_notes_is_asked_about(convert: Any, tmp_path: Path) -> None:
    """As correct notes, those with errors would be rewarded as safe."""
    rows = [row | {"error_type": "diagnosis"} for row in pairs_of()]
    path = write_table(tmp_path / "own.csv", renamed(rows, corrected="corrected_note"))
    assert_one_sentence(convert("--input", path), "--column corrected=corrected_note")
    done = convert("--input", path, "--column", "corrected=corrected_note")
    assert done.exit_code == 0, done.output
    (facts, *_) = pq.read_table(tmp_path / "out/train.parquet")["extra_info"].to_pylist()
    assert facts["error_type"] == "diagnosis" and "warfarin" in facts["error_note"]
    misspelt = convert("--input", path, "--column", "corrected=corected_note")
    assert_one_sentence(misspelt, "'corected_note'", "did you mean 'corrected_note'?")
    assert_one_sentence(convert("--input", path, "--column", "fixed=x"), "--column fixed=x", "id")


def test_medecs_name_of_the_flag_is_known_in_a_table_of_ones_own(tmp_path: Path) -> None:
    rows = [{"note": RIGHT.format(n=n), "Error Flag": n % 2} for n in range(4)]
    found = cases_of(write_table(tmp_path / "own.csv", rows))
    assert [case.has_error for case in found] == [False, True, False, True]


def test_other_columns_need_the_word_that_all_notes_are_correct(tmp_path: Path) -> None:
    path = write_table(tmp_path / "own.csv", [{"note": RIGHT.format(n=1), "label": "wrong"}])
    assert "--column has_error= if all notes are correct" in message_of(path)
    (case,) = cases_of(path, has_error="")
    assert not case.has_error


@pytest.mark.parametrize(
    ("header", "part"),
    [
        ("id,note,error_type", "--column has_error="),
        ("id,note,is_corrected", "--column corrected=is_corrected"),
        ("patient,findings", "no column 'note'"),
        (",".join(COLUMNS[:3]), "column 'Error Flag' of MEDEC's"),  # a test set without its answers
        (",".join(COLUMNS[:-1]), "column 'Corrected Text' of MEDEC's"),
        (",".join([*COLUMNS, "Text"]), "column 'Text' occurs twice"),
    ],
)
def test_a_header_that_does_not_say_enough_is_refused(
    tmp_path: Path, header: str, part: str
) -> None:
    path = tmp_path / "own.csv"
    path.write_text(header + "\n")
    message = message_of(path)
    assert message.startswith("own.csv, header: ") and part in message


def test_correct_notes_alone_are_enough(convert: Any, tmp_path: Path) -> None:
    rows = [{"id": f"own-{n}", "note": RIGHT.format(n=n)} for n in range(40)]
    done = convert("--input", write_table(tmp_path / "own.csv", rows))
    assert done.exit_code == 0, done.output
    assert "every note counts as correct" in done.stderr
    took = "--mix vanilla_benign=1,adversarial_benign=1"
    assert took in done.stdout
    assert categories(tmp_path / "out") == {name: 36 * share for name, share in MIX.items()}
    assert manifest_of(tmp_path / "out")["mix"] == took.removeprefix("--mix ")
    assert run("verify_parquet", tmp_path / "out/train.parquet").exit_code == 0
    own = write_table(tmp_path / "text.csv", [{"TEXT": row["note"]} for row in rows])
    named = convert("--input", own, "--column", "note=TEXT")
    assert named.exit_code == 0, named.output
    asked = convert("--input", tmp_path / "own.csv", "--mix", "vanilla_harmful=1")
    assert asked.exit_code == 2 and "no case for train can serve vanilla_harmful" in asked.stderr


def test_a_correction_like_its_note_means_a_correct_note(tmp_path: Path) -> None:
    right, (wrong, *_) = RIGHT.format(n=7), pairs_of()
    same = [{"id": f"ok-{n}", "note": right, "corrected": c} for n, c in ((1, right), (3, ""))]
    found = cases_of(write_table(tmp_path / "own.csv", [wrong, *same]))
    assert [case.has_error for case in found] == [True, False, False]
    assert all(case.clean_note for case in found)


def test_rows_without_ids_are_named_after_their_file(tmp_path: Path) -> None:
    rows = [{"note": RIGHT.format(n=n)} for n in range(2)]
    found = cases_of(write_table(tmp_path / "ward7 notes.csv", rows))
    assert [case.case_id for case in found] == ["ward7_notes-1", "ward7_notes-2"]


def test_medec_columns_are_read_from_every_kind_of_file(tmp_path: Path, write_csv: Any) -> None:
    rows: list[dict[str, Any]] = [error_row(0), clean_row(1)]
    (expected,) = read_files([write_csv(*rows)]).cases
    for row in rows:
        row |= {"Error Flag": int(row["Error Flag"])}
        row |= {"Error Sentence ID": float(row["Error Sentence ID"])}
    for name in ("notes.jsonl", "notes.parquet", "notes.xlsx", "saved"):
        (case,) = read_files([write_table(tmp_path / name, rows)]).cases
        for field in FIELDS:
            assert getattr(case, field) == getattr(expected, field)
            assert getattr(case.twin, field) == getattr(expected.twin, field)


# --- what spreadsheets do to files ---


@pytest.mark.parametrize(
    ("delimiter", "before"),
    [(";", ""), ("\t", "sep=\t\n"), ("|", "\ufeffsep=|\r\n"), (",", "\ufeff\ufeff")],
)
def test_first_lines_of_spreadsheets_are_understood(
    tmp_path: Path, write_csv: Any, delimiter: str, before: str
) -> None:
    (expected,) = read_files([write_csv(error_row(0))]).cases
    with (tmp_path / "notes.csv").open("w", newline="") as file:
        file.write(before)
        csv.writer(file, delimiter=delimiter).writerows([COLUMNS, error_row(0).values()])
    (case,) = read_files([tmp_path / "notes.csv"]).cases
    assert (case.error_note, case.sentences) == (expected.error_note, expected.sentences)


def test_a_formula_that_failed_in_an_excel_file_is_refused(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for row in (["id", "note", "corrected"], ["own-1", "It is gout.", "#NAME?"]):
        book.active.append(row)
    assert book.active["C2"].data_type == "e"  # which pandas would read as no value
    book.save(tmp_path / "notes.xlsx")
    assert message_of(tmp_path / "notes.xlsx").startswith("notes.xlsx, row 2 ('own-1'), column 'c")


# --- what cannot be read ---


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("notes.xls", b"", "files that end in '.xls' are not known"),
        ("empty.csv", b"", "the file is empty"),
        ("utf16.csv", "Text".encode("utf-16"), "utf16.csv, line 1, byte 1: 0xff is not UTF-8"),
        ("notes.csv", ",".join(COLUMNS).encode(), "the input has no notes"),
        ("open.csv", f'{",".join(COLUMNS)}\n\nms-test-9,"open'.encode(), "line 3: not valid CSV"),
        ("ragged.csv", b"note,corrected\ntext", "line 2: not valid CSV (1 cells under a header"),
        ("lines.jsonl", b'{"note": "a"}\n{', "lines.jsonl, line 2: not a JSON object"),
        ("list.jsonl", b'{"note": "a"}\n[1]', "found a JSON list"),
        ("nested.jsonl", b'{"note": ["a"]}', "column 'note': found \"['a']\"; write the text"),
        ("lone.jsonl", b'{"note": "a\\ud800"}', "character 1 is U+D800"),
        ("damaged.parquet", b"PAR1 no more", "cannot be read as parquet"),
        ("damaged.xlsx", b"PK no more", "damaged.xlsx: cannot be read as an Excel file"),
    ],
)
def test_what_cannot_be_read_says_why(tmp_path: Path, name: str, content: bytes, part: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_files([tmp_path / name])
    assert part in str(caught.value)


def test_a_folder_is_a_saved_data_set_without_splits(tmp_path: Path) -> None:
    assert "not the folder of a saved Hugging Face data set" in message_of(tmp_path)
    split = datasets.Dataset.from_list(pairs_of(2))
    datasets.DatasetDict(train=split, test=split).save_to_disk(tmp_path / "saved")
    assert "the folder of one split" in message_of(tmp_path / "saved")
    assert len(cases_of(tmp_path / "saved" / "train")) == 2
