"""MEDEC's CSV: records, line ends, pairs and their twins, edits."""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from medec.builders import message_of, read_one

from medserl_agentloop.data.reader import read_files
from medserl_agentloop.data.vignettes import EditTag, PairSource


def test_error_row_and_its_twin_become_one_vignette(write_csv, error_row, clean_row):
    result = read_files([write_csv(error_row(0), clean_row(1))])
    (vignette,) = result.vignettes
    assert vignette.text_ids == ("ms-test-0", "ms-test-1")
    assert vignette.pair_source is PairSource.IN_ROW
    assert vignette.clean_note == error_row(0)["Corrected Text"]
    assert vignette.twin_note == clean_row(1)["Text"]
    assert (result.reports[0].pairs, result.reports[0].twins) == (1, 1)


def test_clean_row_is_the_twin_of_one_error_row_only(write_csv, error_row, clean_row):
    rows = (error_row(9, Text_ID="case-9"), error_row(9, Text_ID="case-09"), clean_row(10, Text_ID="case-10"))
    result = read_files([write_csv(*rows)])
    assert [v.text_ids for v in result.vignettes] == [("case-9", "case-10"), ("case-09",)]
    assert result.reports[0].twins == 1


def test_twin_stands_in_where_the_corrected_text_is_absent(write_csv, error_row, clean_row):
    vignette = read_one(write_csv(error_row(0, Corrected_Text="NA"), clean_row(1)))
    assert vignette.pair_source is PairSource.TWIN
    assert (vignette.clean_note, vignette.twin_text_id) == (clean_row(1)["Text"], "ms-test-1")


def test_twin_is_found_by_id_not_by_row_order(write_csv, error_row, clean_row):
    result = read_files([write_csv(clean_row(8), error_row(0), error_row(7), clean_row(1))])
    assert [v.text_ids for v in result.vignettes] == [("ms-test-0", "ms-test-1"), ("ms-test-7", "ms-test-8")]


def test_next_id_about_another_case_is_not_a_twin(write_csv, error_row, clean_row):
    other = clean_row(1, Text="A woman of 70 fell at home and cannot lift her left arm any more.")
    report = read_files([write_csv(error_row(0), other)]).reports[0]
    assert (report.pairs, report.twins, report.clean_only) == (1, 0, 1)


def test_clean_row_without_an_error_partner_is_unpaired(write_csv, clean_row):
    vignette = read_one(write_csv(clean_row(5)))
    assert vignette.pair_source is PairSource.UNPAIRED
    assert (vignette.error_note, vignette.vignette_id, vignette.edit_tag) == (
        None,
        "ms-test-5",
        EditTag.NO_PAIR,
    )


def test_records_without_content_are_dropped_and_counted(write_csv, error_row):
    """Case 1: records of empty cells at the end."""
    report = read_files([write_csv(error_row(0), tail=",,,,,,,,\r\n , ,,,,,,,\r\n\r\n")]).reports[0]
    assert (report.records, report.dropped_empty, report.pairs) == (4, 3, 1)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_line_ends_become_lf_and_rows_are_not_counted_by_lines(write_csv, error_row, newline):
    """Case 4: quoted cells over several lines, either line end, no final newline."""
    note = f'One "quoted",{newline}two.{newline}{newline}Three.'
    path = write_csv(error_row(0, Text=note), newline=newline)
    path.write_bytes(path.read_bytes().rstrip(b"\r\n"))  # no final newline
    assert read_one(path).error_note == 'One "quoted",\ntwo.\n\nThree.'


def test_byte_order_mark_is_no_part_of_the_first_column(write_csv, error_row):
    path = write_csv(error_row(0))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_one(path).vignette_id == "ms-test-0"


def test_given_corrected_text_is_used_where_rebuilding_would_differ(write_csv, error_row):
    """Case 6: the error sentence ends in a newline, the corrected one does not."""
    cells = {"Error_Sentence": "It is gout.\n", "Corrected_Sentence": "It is flu."}
    path = write_csv(error_row(0, Text="A.\nIt is gout.\n", Corrected_Text="A.\nIt is flu. B.", **cells))
    assert read_one(path).clean_note == "A.\nIt is flu. B."


def test_moved_corrected_sentence_is_kept_and_tagged(write_csv, error_row):
    """Case 7: the corrected sentence stands elsewhere."""
    row = error_row(0)
    moved = f"{row['Corrected Sentence']} {row['Text'].replace(row['Error Sentence'], '')}"
    vignette = read_one(write_csv(row | {"Corrected Text": moved}))
    assert vignette.edit_tag is EditTag.NON_LOCAL and vignette.clean_note == moved.strip()


def test_edit_of_letter_case_only_is_tagged_as_no_op(write_csv, error_row):
    """Case 8: tagged here, and kept out of harmful seeds by ``rows.py``."""
    row = error_row(0)
    path = write_csv(row | {"Corrected Text": row["Text"].replace("warfarin", "Warfarin")})
    assert read_one(path).edit_tag is EditTag.NO_OP


def test_duplicate_ids_are_an_error_within_a_file(write_csv, error_row):
    """Case 15: an id twice."""
    message = message_of(write_csv(error_row(0), error_row(2), error_row(0)))
    assert "row 3 ('ms-test-0')" in message and "row 1" in message


def test_missing_column_is_named(write_csv, error_row):
    path = write_csv(error_row(0))
    path.write_text(path.read_text().replace("Corrected Text", "Corrected"))
    assert "'Corrected Text' is missing" in message_of(path)


def test_unclosed_quote_and_ragged_row_are_errors(write_csv, error_row):
    assert "not valid CSV" in message_of(write_csv(error_row(0), tail='ms-test-9,"open'))
    assert "row 2: found 2 cells" in message_of(write_csv(error_row(0), tail="ms-test-9,text"))


def test_note_longer_than_the_csv_modules_limit_is_read(write_csv, error_row):
    assert len(read_one(write_csv(error_row(0, Text="word " * 60_000))).error_note) == 299_999


@examples(100)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00") | st.sampled_from('\r\n",')))
def test_any_unicode_note_survives_but_for_outer_strip_and_newlines(error_row_cells, note):
    expected = note.replace("\r\n", "\n").replace("\r", "\n").strip()
    if expected in ("", "NA"):
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "notes.csv")
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(error_row_cells)
            writer.writerow((error_row_cells | {"Text": note}).values())
        assert read_one(path).error_note == expected


@pytest.fixture(scope="module")
def error_row_cells():
    return {
        "Text ID": "ms-test-0",
        "Text": "",
        "Sentences": "0 A.",
        "Error Flag": "1",
        "Error Type": "diagnosis",
        "Error Sentence ID": "0",
        "Error Sentence": "A.",
        "Corrected Sentence": "B.",
        "Corrected Text": "B.",
    }


def test_id_without_a_number_has_no_twin(write_csv, error_row, clean_row):
    report = read_files([write_csv(error_row(0, Text_ID="first"), clean_row(1, Text_ID="second"))]).reports[0]
    assert (report.pairs, report.twins, report.clean_only) == (1, 0, 1)


def test_header_that_names_a_column_twice_is_an_error(write_csv, error_row):
    path = write_csv(error_row(0))
    path.write_text(path.read_text().replace("Text ID,Text,", "Text ID,Text,Text,", 1))
    assert "notes.csv, header: column 'Text' occurs twice" in message_of(path)
