"""Files of any format -> cases: nothing is lost, nothing is read twice, and what cannot be read is
named.
"""

import pytest
from medec.builders import clean_row, error_row, message_of, pair, read_one
from note_files import OFFICIAL, PAIRS, medec_file

from medserl_agentloop.data.cases import Case, EditTag, MedecFormatError, numbered_sentences
from medserl_agentloop.data.reader import read_files

# --- any file ---


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        (OFFICIAL, {"records": 574, "pairs": 319, "twins": 255}),
        (PAIRS, {"records": 1219, "pairs": 1219}),
    ],
)
def test_real_files_give_all_their_pairs_and_twins(name, counts):
    (report,) = read_files([medec_file(name)]).reports
    numbers = {
        key: value for key, value in vars(report).items() if isinstance(value, int) and value
    }
    assert numbers == counts
    assert sum(report.error_types.values()) == report.pairs and "unknown" not in report.error_types


@pytest.mark.parametrize(
    ("case_id", "subset"),
    [
        *(("ms-test-0", "medec_ms"), ("UW_7", "medec_uw"), ("own-1", "own"), ("cn_val-3", "cn")),
        *((of_one_case, "unnamed") for of_one_case in ("17", "note17", "pat17-2", "-1")),
        ("ABCDEFAB-2d3a-4c5b-8e7f-0a1b2c3d4e5f", "unnamed"),
    ],
)
def test_letters_that_begin_an_id_name_its_collection(case_id, subset):
    assert Case(id=case_id, note="It is flu.", has_error=False).subset == subset


@pytest.mark.parametrize(("mark", "subset"), [("<NAME/>", "medec_uw"), ("<BR/>", "own")])
def test_marks_of_medec_uw_are_not_those_of_html(mark, subset):
    assert Case(id="own-1", note=f"He{mark}has flu.", has_error=False).subset == subset


def test_duplicate_ids_are_an_error_across_files(write_csv, write_pairs):
    paths = [write_csv(error_row(0)), write_pairs(pair(0, note_id="ms-test-0"))]
    with pytest.raises(MedecFormatError, match=r"pairs\.jsonl, line 1 .* of notes.csv, line 2"):
        read_files(paths)


def test_byte_of_another_encoding_is_an_error_with_its_line(write_csv):
    csv = write_csv(error_row(0), error_row(2, Text="5 \N{MICRO SIGN}g"))
    csv.write_bytes(csv.read_text(encoding="utf-8").encode("cp1252"))
    assert message_of(csv).startswith("notes.csv, line 4, byte 13: 0xb5 is not UTF-8")


def exchange(row, *names):
    one, two = names
    return row | {one: row[two], two: row[one]}


@pytest.mark.parametrize(
    "columns", [("Text", "Corrected Text"), ("error_sentence", "corrected_sentence")]
)
def test_rows_with_exchanged_columns_are_left_out_and_named(write_csv, write_pairs, columns):
    write, make = (write_pairs, pair) if columns[0].islower() else (write_csv, error_row)
    rows = [make(2 * n) for n in range(6)]
    path = write(*(exchange(row, *columns) for row in rows[:3]), *rows[3:])
    (report,) = (result := read_files([path])).reports
    assert (report.records, report.pairs, len(result.cases)) == (6, 3, 3)
    assert len(report.contradictions) == 3
    path = write(*(exchange(row, *columns) for row in rows))
    assert "contradict itself or another one (ms-t" in message_of(path)


def test_numbers_of_other_sentences_are_a_contradiction(write_csv):
    (report,) = read_files([write_csv(error_row(0), error_row(2, Error_Sentence_ID="0"))]).reports
    assert report.contradictions == [
        ("ms-test-2", "the sentence with that number is a different one")
    ]


def test_a_correction_that_is_in_neither_note_is_no_contradiction(write_csv):
    rows = (error_row(n, Corrected_Sentence="Penicillin.") for n in (0, 2))
    (report,) = read_files([write_csv(*rows)]).reports
    assert (report.pairs, report.contradictions) == (2, [])


def test_a_note_that_is_wrong_in_one_row_and_right_in_another_is_in_no_row(write_csv):
    rows = [error_row(0), clean_row(7, Text=error_row(0)["Text"].upper()), error_row(20)]
    read = read_files([write_csv(*rows)])
    assert [case.id for case in read.cases] == ["ms-test-20"]
    assert dict(read.reports[0].contradictions) == {
        "ms-test-0": "its note with an error is correct in another row",
        "ms-test-7": "its correct note has an error in another row",
    }


# --- MEDEC's CSV ---


OTHER = "A woman of 70 fell at home and cannot lift her left arm any more."


@pytest.mark.parametrize(
    ("error", "clean", "text_ids", "source"),
    [
        ({}, {}, [("ms-test-0", "ms-test-1")], "in_row"),
        ({"Corrected_Text": "NA"}, {}, [("ms-test-0", "ms-test-1")], "twin"),
        # the next id, about another case
        ({}, {"Text": OTHER}, [("ms-test-0",), ("ms-test-1",)], "in_row"),
        ({"Text_ID": "first"}, {"Text_ID": "second"}, [("first",), ("second",)], "in_row"),
    ],
)
def test_an_error_row_and_its_twin_become_one_case(write_csv, error, clean, text_ids, source):
    rows = [error_row(0, **error), clean_row(1, **clean)]
    (report,) = (result := read_files([write_csv(*rows)])).reports
    case = result.cases[0]
    assert [each.text_ids for each in result.cases] == text_ids and case.pair_source == source
    assert case.clean_note == (rows[1]["Text"] if source == "twin" else rows[0]["Corrected Text"])
    counts = (1, 2 - len(text_ids), len(text_ids) - 1)
    assert (report.pairs, report.twins, report.clean_only) == counts


@pytest.mark.parametrize("words", [20_001, 200_000])
def test_a_note_that_is_too_long_is_refused(write_csv, words):
    assert message_of(write_csv(error_row(0, Text="word " * words))).startswith("notes.csv, line 2")


# --- single values ---


@pytest.mark.parametrize(
    ("column", "value", "part"),
    [
        *(("Error Flag", value, "write 1 for a note") for value in ("2", "", "-1", "1e999999")),
        *(("Error Sentence ID", value, "") for value in ("1.5", "True", "-2")),
        *(("Text", value, "write the text of the note") for value in ("", "NA", " None")),
        ("Text ID", " ", "write the row's id"),
        ("Error Type", "Mrs Example " * 10, "found a text of 119 characters"),
        ("Text", "pH\0 7", "character 2 is U+0000"),
        ("Text", "#NAME?", "Excel's mark for a failed formula"),
        ("Corrected Text", "#REF!", "Excel's mark for a failed formula"),
        ("Text", "x" * 32_767, "Excel cuts a text at 32,767 characters"),
    ],
)
def test_bad_cell_of_an_error_row_is_named_with_its_row(write_csv, column, value, part):
    message = message_of(write_csv(error_row(3) | {column: value}))
    assert message.startswith("notes.csv, line 2")
    assert f", column {column!r}" in message and part in message


@pytest.mark.parametrize(
    ("column", "value"),
    [("Error Type", "diagnosis"), ("Corrected Text", "a"), ("Error Sentence ID", "0")],
)
def test_clean_row_that_names_an_error_is_a_contradiction(write_csv, column, value):
    message = message_of(write_csv(clean_row(1) | {column: value}))
    assert repr(column) in message and "says that its note has no error: write " in message


NOTE = "Fever since Monday."
NO_SENTENCES = {"Error_Sentence": "NA", "Sentences": "NA"}


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        # ``NA`` beside a really empty cell, and what pandas writes.
        *(
            ({"Error_Type": absent, "Error_Sentence": absent}, {"error_type": None})
            for absent in ("NA", "", "nan")
        ),
        ({"Corrected_Text": "None"}, {"clean_note": None, "pair_source": "unpaired"}),
        # Flags and numbers as pandas or a spreadsheet writes them. 0 is a sentence.
        *(({"Error_Flag": flag}, {"has_error": True}) for flag in ("1.0", " 1 ", "1.", "True")),
        *(
            ({"Error_Sentence_ID": f"{n}.0", "Sentences": "NA"}, {"error_sentence_id": n})
            for n in (0, 10)
        ),
        # Trailing blanks on one side are a label leak.
        (
            NO_SENTENCES | {"Text": f"\n {NOTE} \n", "Corrected_Text": f"{NOTE}x \t"},
            {"error_note": NOTE, "clean_note": f"{NOTE}x"},
        ),
        # Spellings of one type, and types of one's own.
        ({"Error_Type": "Causal Organism"}, {"error_type": "causalOrganism"}),
        ({"Error_Type": " Lab /  Serum value"}, {"error_type": "Lab / Serum value"}),
    ],
)
def test_values_are_read_as_what_they_mean(write_csv, cells, expected):
    case = read_one(write_csv(error_row(0, **cells)))
    assert {name: getattr(case, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        (  # continuation lines, blank lines, a missing number
            "0 First\nand on.\n\n1 Second.\n3 Fourth.\n1 week later.\n4 End.",
            [(0, "First\nand on."), (1, "Second."), (3, "Fourth.\n1 week later."), (4, "End.")],
        ),
        (  # a dose is no sentence number
            "0 He takes\n500 mg daily.\n1 His wife\n3 times.\n2 End.",
            [(0, "He takes\n500 mg daily."), (1, "His wife\n3 times."), (2, "End.")],
        ),
        ("\nHistory:\n0 First.", [(-1, "History:"), (0, "First.")]),
    ],
)
def test_sentences_keep_their_numbers_and_lines_without_one_are_appended(text, sentences):
    assert list(numbered_sentences(text).items()) == sentences


# --- pairs ---


def test_pair_line_becomes_a_case_and_lines_end_at_line_feeds_only(write_pairs):
    opening = "One\u2028two\u0085three\x0cfour. "
    notes = {key: opening + pair(4)[key] for key in ("incorrect_note", "correct_note")}
    case = read_one(write_pairs(pair(4, error_type="causalorganism", **notes)))
    facts = (case.case_id, case.subset, case.error_type, case.edit_tag, case.pair_source)
    assert facts == ("ms-train-4", "medec_ms", "causalOrganism", EditTag.LOCAL, "in_row")
    assert case.clean_note == notes["correct_note"]


def test_the_same_notes_given_twice_are_refused(write_pairs):
    path = write_pairs(pair(0))
    with pytest.raises(MedecFormatError, match="is already that of"):
        read_files([path, path])


# --- sister benchmarks: files with MEDEC's header ---


def test_sentences_on_one_line_are_split_where_the_note_has_no_such_number(write_csv):
    note = "He waits 1 week.\nLabs:\nNa 2\n3 of the patient's 2 eyes hurt."
    listed = r"0 He waits 1 week. 1 Labs:\nNa 2 2 3 of the patients 2 eyes hurt. 3 He left."
    case = read_one(write_csv(clean_row(Text=note, Sentences=listed)))
    assert [*case.sentences.values()][1:3] == ["Labs: Na 2", "3 of the patients 2 eyes hurt."]
    whole = "He waits\n  for 1 week."
    listed = {0: whole}
    assert read_one(write_csv(clean_row(Text=whole, Sentences=f"0 {whole}"))).sentences == listed


@pytest.mark.parametrize(
    ("name", "notes", "left_out"),
    [
        ("meb_EN_train.csv", 708, 8),
        ("meb_EN_test.csv", 208, 5),
        ("meb_CN_test.csv", 200, 0),
        ("meb_ARA_test.csv", 97, 1),
    ],
)
def test_the_sister_benchmarks_are_read_as_they_are(name, notes, left_out):
    (report,) = read_files([medec_file(f"../boards/{name}")], as_published=True).reports
    assert (report.records, len(report.contradictions)) == (notes, left_out)
