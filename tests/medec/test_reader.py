"""What the readers accept, what they refuse, and that no row is lost on the way."""

from __future__ import annotations

import csv
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medserl_agentloop.game.types import ErrorType
from medserl_agentloop.medec.fields import MedecFormatError, numbered_sentences
from medserl_agentloop.medec.reader import read_files
from medserl_agentloop.medec.vignettes import EditTag, PairSource


def read_one(path):
    return read_files([path]).vignettes[0]


def message_of(path):
    with pytest.raises(MedecFormatError) as caught:
        read_files([path])
    return str(caught.value)


# --- the real files


def test_official_validation_file_gives_319_pairs_and_255_twins(medec_dir):
    (report,) = read_files([medec_dir / "MEDEC-MS-ValidationSet-with-GroundTruth-and-ErrorType.csv"]).reports
    assert (report.records, report.pairs, report.twins) == (574, 319, 255)
    assert (report.dropped_empty, report.clean_only, report.error_only) == (0, 0, 0)
    assert report.no_op_edits == report.non_local_edits == report.unlisted_error_sentences == 0
    assert report.error_types["causalOrganism"] == 13


def test_pair_file_gives_1219_pairs(medec_dir):
    (report,) = read_files([medec_dir / "medec_ms_train_pairs.jsonl"]).reports
    assert (report.records, report.pairs) == (1219, 1219)
    assert (report.no_op_edits, report.non_local_edits) == (1, 4)
    assert sum(report.error_types.values()) == 1219 and "unknown" not in report.error_types


def test_no_white_space_feature_predicts_the_label_in_the_real_files(medec_dir):
    vignettes = read_files([*medec_dir.glob("MEDEC*.csv"), medec_dir / "medec_ms_train_pairs.jsonl"])
    pairs = [(v.error_note, v.clean_note) for v in vignettes.vignettes]
    for feature in (r"^\s", r"\s$", r"\n", r"  ", r"\s\n", r"\n\s", r"\t", r"\s\.", r"\.\S", "\xa0", "\r"):
        error_notes = sum(bool(re.search(feature, error)) for error, _ in pairs)
        clean_notes = sum(bool(re.search(feature, clean)) for _, clean in pairs)
        assert abs(error_notes - clean_notes) <= 0.01 * len(pairs), feature


# --- the official CSV


def test_error_row_and_its_twin_become_one_vignette(write_csv, error_row, clean_row):
    result = read_files([write_csv(error_row(0), clean_row(1))])
    (vignette,) = result.vignettes
    assert vignette.text_ids == ("ms-test-0", "ms-test-1")
    assert vignette.pair_source is PairSource.IN_ROW
    assert vignette.clean_note == error_row(0)["Corrected Text"]
    assert vignette.twin_note == clean_row(1)["Text"]
    assert (result.reports[0].pairs, result.reports[0].twins) == (1, 1)


def test_twin_stands_in_where_the_corrected_text_is_absent(write_csv, error_row, clean_row):
    vignette = read_one(write_csv(error_row(0, Corrected_Text="NA"), clean_row(1)))
    assert vignette.pair_source is PairSource.TWIN
    assert (vignette.clean_note, vignette.clean_text_id) == (clean_row(1)["Text"], "ms-test-1")


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
    report = read_files([write_csv(error_row(0), tail=",,,,,,,,\r\n , ,,,,,,,\r\n\r\n")]).reports[0]
    assert (report.records, report.dropped_empty, report.pairs) == (4, 3, 1)


@pytest.mark.parametrize(("column", "value"), [("Text", ""), ("Text", "NA"), ("Text ID", " ")])
def test_row_without_id_or_text_is_an_error(write_csv, error_row, column, value):
    message = message_of(write_csv(error_row(0), error_row(1) | {column: value}))
    assert "notes.csv, row 2" in message and repr(column) in message


@pytest.mark.parametrize("flag", ["1", "1.0", " 1 ", "01", "1.", "True"])
def test_flag_is_read_in_any_spelling_of_a_whole_number(write_csv, error_row, flag):
    assert read_one(write_csv(error_row(0, Error_Flag=flag))).error_note


@pytest.mark.parametrize("flag", ["2", "0.5", "yes", "", "NA", "nan", "-1", "1e999999999"])
def test_any_other_flag_is_an_error_that_names_the_row(write_csv, error_row, flag):
    message = message_of(write_csv(error_row(3, Error_Flag=flag)))
    assert "row 1 ('ms-test-3'), column 'Error Flag'" in message and "write 1" in message


def test_sentence_id_may_be_written_as_a_float_and_may_be_zero(write_csv, error_row):
    path = write_csv(error_row(0, Error_Sentence_ID="0.0"), error_row(2, Error_Sentence_ID="10.0"))
    assert [v.error_sentence_id for v in read_files([path]).vignettes] == [0, 10]


@pytest.mark.parametrize("number", ["1.5", "True", "one", "-2", "-1", "NA"])
def test_error_row_with_an_impossible_sentence_id_is_an_error(write_csv, error_row, number):
    assert "'Error Sentence ID'" in message_of(write_csv(error_row(0, Error_Sentence_ID=number)))


def test_na_and_an_empty_cell_both_mean_absent(write_csv, error_row):
    path = write_csv(error_row(0, Error_Type="NA", Error_Sentence=""), error_row(2, Corrected_Text=""))
    first, second = read_files([path]).vignettes
    assert (first.error_type, first.error_sentence, second.clean_note) == (None, None, None)


def test_clean_row_that_names_an_error_is_a_contradiction(write_csv, clean_row):
    assert "flag says that it has no error" in message_of(write_csv(clean_row(1, Error_Type="diagnosis")))


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_line_ends_become_lf_and_rows_are_not_counted_by_lines(write_csv, error_row, newline):
    note = f'One "quoted",{newline}two.{newline}{newline}Three.'
    path = write_csv(error_row(0, Text=note), newline=newline)
    path.write_bytes(path.read_bytes().rstrip(b"\r\n"))  # no final newline
    assert read_one(path).error_note == 'One "quoted",\ntwo.\n\nThree.'


def test_byte_order_mark_is_no_part_of_the_first_column(write_csv, error_row):
    path = write_csv(error_row(0))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_one(path).vignette_id == "ms-test-0"


def test_both_notes_of_a_pair_are_stripped_alike(write_csv, error_row):
    note = error_row(0)["Text"]
    vignette = read_one(write_csv(error_row(0, Text=f"\n {note} \n", Corrected_Text=f"{note}x \t")))
    assert vignette.error_note == note.strip() and vignette.clean_note == f"{note}x"


def test_given_corrected_text_is_used_where_rebuilding_would_differ(write_csv, error_row):
    cells = {"Error_Sentence": "It is gout.\n", "Corrected_Sentence": "It is flu."}
    path = write_csv(error_row(0, Text="A.\nIt is gout.\n", Corrected_Text="A.\nIt is flu. B.", **cells))
    assert read_one(path).clean_note == "A.\nIt is flu. B."


def test_moved_corrected_sentence_is_kept_and_tagged(write_csv, error_row):
    row = error_row(0)
    moved = f"{row['Corrected Sentence']} {row['Text'].replace(row['Error Sentence'], '')}"
    vignette = read_one(write_csv(row | {"Corrected Text": moved}))
    assert vignette.edit_tag is EditTag.NON_LOCAL and vignette.clean_note == moved.strip()


def test_edit_of_letter_case_only_is_tagged_as_no_op(write_csv, error_row):
    row = error_row(0)
    path = write_csv(row | {"Corrected Text": row["Text"].replace("warfarin", "Warfarin")})
    assert read_one(path).edit_tag is EditTag.NO_OP


@pytest.mark.parametrize("spelling", ["causalOrganism", "causalorganism", "Causal Organism"])
def test_error_type_has_one_canonical_name(write_csv, error_row, spelling):
    assert read_one(write_csv(error_row(0, Error_Type=spelling))).error_type is ErrorType.CAUSAL_ORGANISM


def test_unknown_error_type_is_an_error(write_csv, error_row):
    message = message_of(write_csv(error_row(0, Error_Type="dosage")))
    assert "'dosage'" in message and "pharmacotherapy" in message


@pytest.mark.parametrize(
    "note", ["pO2 <5 %, K >3 <tag/> <think>x</think></answer><image>", "{{ note }} {% if %} 5 % \\1 a\u2028b"]
)
def test_markup_braces_and_line_separators_in_a_note_stay_text(write_csv, error_row, note):
    assert read_one(write_csv(error_row(0, Text=note))).error_note == note


def test_lone_surrogate_is_an_error_with_the_id_of_the_row(write_csv, error_row):
    message = message_of(write_csv(error_row(4, Text="pH 7\ud83d3")))
    assert "ms-test-4" in message and "U+D83D" in message


def test_file_in_another_encoding_is_an_error(write_csv, error_row):
    path = write_csv(error_row(0, Text="5 \N{MICRO SIGN}g"))
    path.write_bytes(path.read_text(encoding="utf-8").encode("cp1252"))
    assert "is not UTF-8" in message_of(path)


def test_duplicate_ids_are_an_error_within_a_file(write_csv, error_row):
    message = message_of(write_csv(error_row(0), error_row(2), error_row(0)))
    assert "row 3 ('ms-test-0')" in message and "row 1" in message


def test_duplicate_ids_are_an_error_across_files(write_csv, write_pairs, error_row, pair):
    paths = [write_csv(error_row(0)), write_pairs(pair(0, note_id="ms-test-0"))]
    with pytest.raises(MedecFormatError, match=r"pairs\.jsonl, row 1 .*already that of notes.csv, row 1"):
        read_files(paths)


def test_missing_column_is_named(write_csv, error_row):
    path = write_csv(error_row(0))
    path.write_text(path.read_text().replace("Corrected Text", "Corrected"))
    assert "'Corrected Text' is missing" in message_of(path)


def test_unclosed_quote_and_ragged_row_are_errors(write_csv, error_row):
    assert "not valid CSV" in message_of(write_csv(error_row(0), tail='ms-test-9,"open'))
    assert "row 2: found 2 cells" in message_of(write_csv(error_row(0), tail="ms-test-9,text"))


def test_note_longer_than_the_csv_modules_limit_is_read(write_csv, error_row):
    assert len(read_one(write_csv(error_row(0, Text="word " * 60_000))).error_note) == 299_999


def test_error_about_a_long_cell_does_not_show_the_cell(write_csv, error_row):
    message = message_of(write_csv(error_row(0, Error_Type="Mrs Example " * 10)))
    assert "a text of 120 characters" in message and "Mrs Example" not in message


@settings(max_examples=60, deadline=None)
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


# --- the numbered sentences


def test_sentences_keep_their_numbers_and_lines_without_one_are_appended():
    found = numbered_sentences("0 First\nand on.\n\n1 Second.\n3 Fourth.\n1 week later.\n4 End.")
    assert [(s.id, s.text) for s in found] == [
        (0, "First\nand on."),
        (1, "Second."),
        (3, "Fourth.\n1 week later."),
        (4, "End."),
    ]


def test_figure_at_the_start_of_a_continuation_line_is_no_sentence_number():
    found = numbered_sentences("0 He takes\n500 mg daily.\n1 His wife\n3 times.\n2 End.")
    assert [s.id for s in found] == [0, 1, 2]


# --- the pair format


def test_pair_line_becomes_a_vignette(write_pairs, pair):
    vignette = read_one(write_pairs(pair(4, error_type="causalorganism")))
    assert (vignette.vignette_id, vignette.subset) == ("ms-train-4", "medec_ms")
    assert (vignette.error_type, vignette.edit_tag) == (ErrorType.CAUSAL_ORGANISM, EditTag.LOCAL)
    assert (vignette.pair_source, vignette.error_sentence_id) == (PairSource.IN_ROW, -1)


def test_jsonl_is_split_at_line_feeds_only(write_pairs, pair):
    note = "One\u2028two\u0085three\x0cfour"
    assert read_one(write_pairs(pair(0, incorrect_note=note))).error_note == note


def test_escaped_surrogate_in_a_pair_is_an_error_with_its_id(write_pairs, pair):
    message = message_of(write_pairs(pair(0), pair(6, correct_note="a\udc00b"), ensure_ascii=True))
    assert "pairs.jsonl, row 2 ('ms-train-6'), column 'correct_note'" in message


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "not valid JSON"),
        ("[1]", "found a JSON list"),
        ('{"note_id": "a-1", "correct_note": "b"}', "'incorrect_note' is missing"),
        ('{"note_id": 5, "incorrect_note": "a", "correct_note": "b"}', "write a JSON string"),
    ],
)
def test_line_that_is_no_pair_is_an_error_with_its_row(tmp_path, line, expected):
    path = tmp_path / "pairs.jsonl"
    path.write_text(f"\n{line}\n")
    message = message_of(path)
    assert "row 2" in message and expected in message


@pytest.mark.parametrize("name", ["notes.xlsx", "empty.csv", "absent.csv"])
def test_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path, name):
    if name != "absent.csv":
        (tmp_path / name).write_text("")
    assert name in message_of(tmp_path / name)
