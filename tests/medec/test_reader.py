"""Files of any format -> cases: nothing is lost, nothing is read twice, and what cannot be read is
named.
"""

import pytest
from medec.builders import clean_row, error_row, message_of, pair, read_one
from note_files import OFFICIAL, PAIRS, medec_file

from medserl_agentloop.data.cases import (
    Case,
    EditTag,
    MedecFormatError,
    numbered_sentences,
    with_numbers,
)
from medserl_agentloop.data.reader import read_files
from medserl_agentloop.data.rows import build_eval_rows

# --- any file ---


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        (OFFICIAL, {"records": 574, "pairs": 319, "twins": 255}),
        (PAIRS, {"records": 1219, "pairs": 1219, "no_op_edits": 1, "non_local_edits": 4}),
    ],
)
def test_real_files_give_all_their_pairs_and_twins(name, counts):
    (report,) = read_files([medec_file(name)]).reports
    numbers = {
        key: value for key, value in vars(report).items() if isinstance(value, int) and value
    }
    assert numbers == counts
    assert sum(report.error_types.values()) == report.pairs and "unknown" not in report.error_types


def test_own_notes_need_four_columns(tmp_path):
    (tmp_path / "own.csv").write_text(
        ",id,note,has_error,corrected\n0,a-1,It is gout.,1,It is flu.\n1,a-2,It is flu.,0,\n"
    )
    (case,) = read_files([tmp_path / "own.csv"]).cases
    assert (case.error_note, case.clean_note, case.text_ids) == (
        "It is gout.",
        "It is flu.",
        ("a-1", "a-2"),
    )
    with pytest.raises(MedecFormatError, match="'a-1' does not say which sentence is wrong"):
        build_eval_rows([tmp_path / "own.csv"])


@pytest.mark.parametrize(
    ("case_id", "subset"),
    [
        *(("ms-test-0", "medec_ms"), ("UW_7", "medec_uw"), ("own-1", "own"), ("cn_val-3", "cn")),
        *(
            (of_one_case, "unnamed")
            for of_one_case in ("17", "note17", "note", "pat17-2", "-1", "_a-1")
        ),
        ("9f8b6c1e-2d3a-4c5b-8e7f-0a1b2c3d4e5f", "unnamed"),
        ("ABCDEFAB-2d3a-4c5b-8e7f-0a1b2c3d4e5f", "unnamed"),
    ],
)
def test_letters_that_begin_an_id_name_its_collection(case_id, subset):
    assert Case(case_id, None, "It is flu.", "").subset == subset


def test_duplicate_ids_are_an_error_across_files(write_csv, write_pairs):
    paths = [write_csv(error_row(0)), write_pairs(pair(0, note_id="ms-test-0"))]
    with pytest.raises(
        MedecFormatError, match=r"pairs\.jsonl, line 1 .*already that of notes.csv, line 2"
    ):
        read_files(paths)


def test_byte_of_another_encoding_is_an_error_with_its_row_and_column(write_csv, write_pairs):
    micro = "5 \N{MICRO SIGN}g"
    csv = write_csv(error_row(0), error_row(2, Text=micro))
    pairs = write_pairs(pair(0), pair(1), pair(2, correct_note=micro))
    for path, place in (
        (csv, "notes.csv, line 4 ('ms-test-2'), column 'Text'"),
        (pairs, "pairs.jsonl, line 3 ('ms-train-2'), column 'correct_note'"),
    ):
        path.write_bytes(path.read_text(encoding="utf-8").encode("cp1252"))
        message = message_of(path)
        assert message.startswith(place) and "the byte 0xb5, which is not UTF-8" in message


def test_all_problems_of_a_file_are_told_at_once_and_the_first_ten_named(convert, write_csv):
    bad = [error_row(2 * n, Error_Flag="maybe") for n in range(12)]
    both = error_row(30, Text="NA", Error_Sentence_ID="one")
    for rows, problems, lines in (([both, error_row(32)], 2, 2), ([*bad, both], 14, 10)):
        result = convert("--input", write_csv(*rows))
        first, *others = result.stderr.splitlines()
        assert result.exit_code == 2 and first.startswith("error: notes.csv, line 2")
        assert first.endswith(f"There are {problems} such problems.") and len(others) == lines - 1
        assert all(line.startswith("notes.csv, line ") for line in others)


def exchange(row, *names):
    one, two = names
    return row | {one: row[two], two: row[one]}


EXCHANGED = {
    "the notes": lambda row: exchange(row, "Text", "Corrected Text"),
    "the sentences": lambda row: exchange(row, "Error Sentence", "Corrected Sentence"),
    "numbers one off": lambda row: row | {"Error Sentence ID": "0"},
    "a list from 1": lambda row: (
        row | {"Sentences": with_numbers(row["Sentences"].replace("1 ", "0 ").split("0 "))}
    ),
    "the notes of a pair": lambda row: exchange(row, "incorrect_note", "correct_note"),
    "the sentences of a pair": lambda row: exchange(row, "error_sentence", "corrected_sentence"),
}


@pytest.mark.parametrize("name", EXCHANGED)
def test_exchanged_columns_are_refused_and_single_rows_left_out(
    write_csv, write_pairs, tmp_path, name
):
    write, make = (write_pairs, pair) if "pair" in name else (write_csv, error_row)
    rows = [make(2 * n) for n in range(6)]
    message = message_of(write(*map(EXCHANGED[name], rows)))
    assert "6 of 6 error rows contradict themselves" in message
    path = write(*map(EXCHANGED[name], rows[:3]), *rows[3:])
    (report,) = (result := read_files([path])).reports
    assert (report.records, report.contradicting, report.pairs, len(result.cases)) == (6, 3, 3, 3)
    assert len(report.contradictions) == 3


def test_a_correction_that_is_in_neither_note_is_no_contradiction(write_csv):
    """MedErrBench has it in most of its rows."""
    (report,) = read_files(
        [write_csv(*(error_row(n, Corrected_Sentence="Penicillin.") for n in (0, 2)))]
    ).reports
    assert (report.pairs, report.contradicting) == (2, 0)


# --- sister benchmarks ---


def test_sentences_on_one_line_are_split_where_the_note_has_no_such_number(write_csv):
    note = "He waits 1 week.\nLabs:\nNa 2\n3 of the patient's 2 eyes hurt."
    listed = r"0 He waits 1 week. 1 Labs:\nNa 2 2 3 of the patients 2 eyes hurt. 3 He left."
    case = read_one(write_csv(clean_row(Text=note, Sentences=listed)))
    assert [*case.sentences.values()][1:3] == ["Labs: Na 2", "3 of the patients 2 eyes hurt."]
    whole = "He waits\n  for 1 week."
    assert read_one(write_csv(clean_row(Text=whole, Sentences=f"0 {whole}"))).sentences == {
        0: whole
    }
    with pytest.raises(
        MedecFormatError, match=r"line 2 .'ms-test-1'., column 'Sentences': .* each sentence"
    ):
        read_one(
            write_csv(
                clean_row(Text=note, Sentences="0 Somebody else's notes. 1 They are about a cold.")
            )
        )


@pytest.mark.parametrize(
    ("name", "notes", "errors", "left_out"),
    [
        ("meb_EN_train.csv", 708, 354, 8),
        ("meb_EN_test.csv", 208, 104, 5),
        ("meb_CN_test.csv", 200, 100, 0),
        ("meb_ARA_test.csv", 97, 53, 1),
    ],
)
def test_the_sister_benchmarks_are_read_as_they_are(name, notes, errors, left_out):
    (report,) = (
        published := read_files([medec_file(f"../boards/{name}")], as_published=True)
    ).reports
    assert (report.records, report.contradicting) == (notes, left_out)
    assert sum(case.error_note is not None for case in published.cases) == errors


# --- MEDEC's CSV ---


def test_edits_are_tagged(write_csv):
    """A corrected sentence that stands elsewhere, and an edit of letter case only."""
    row = error_row(0)
    moved = f"{row['Corrected Sentence']} {row['Text'].replace(row['Error Sentence'], '')}"
    for corrected, tag in (
        (moved, EditTag.NON_LOCAL),
        (row["Text"].replace("warfarin", "Warfarin"), EditTag.NO_OP),
        (row["Corrected Text"], EditTag.LOCAL),
    ):
        case = read_one(write_csv(row | {"Corrected Text": corrected}))
        assert (case.edit_tag, case.clean_note) == (tag, corrected.strip())


OTHER = "A woman of 70 fell at home and cannot lift her left arm any more."


@pytest.mark.parametrize(
    ("error", "clean", "text_ids", "source"),
    [
        ({}, {}, [("ms-test-0", "ms-test-1")], "in_row"),
        ({"Corrected_Text": "NA"}, {}, [("ms-test-0", "ms-test-1")], "twin"),
        (
            {},
            {"Text": OTHER},
            [("ms-test-0",), ("ms-test-1",)],
            "in_row",
        ),  # the next id, about another case
        ({"Text_ID": "first"}, {"Text_ID": "second"}, [("first",), ("second",)], "in_row"),
    ],
)
def test_an_error_row_and_its_twin_become_one_case(write_csv, error, clean, text_ids, source):
    rows = [error_row(0, **error), clean_row(1, **clean)]
    (report,) = (result := read_files([write_csv(*rows)])).reports
    case = result.cases[0]
    assert [each.text_ids for each in result.cases] == text_ids and case.pair_source == source
    assert case.clean_note == (rows[1]["Text"] if source == "twin" else rows[0]["Corrected Text"])
    assert case.twin_note == (rows[1]["Text"] if len(text_ids) == 1 else None)
    assert (report.pairs, report.twins, report.clean_only) == (
        1,
        2 - len(text_ids),
        len(text_ids) - 1,
    )


def test_clean_row_is_the_twin_of_one_error_row_only(write_csv):
    rows = (
        error_row(9, Text_ID="case-9"),
        error_row(9, Text_ID="case-09"),
        clean_row(10, Text_ID="case-10"),
    )
    assert [case.text_ids for case in read_files([write_csv(*rows)]).cases] == [
        ("case-9", "case-10"),
        ("case-09",),
    ]


def test_cell_over_the_csv_limit_is_read_and_a_note_over_ours_is_refused(write_csv):
    note = "word " * 20_000
    assert (
        len(read_one(write_csv(error_row(0, Text=note, Sentences=f"0 {note * 2}"))).error_note)
        == 99_999
    )
    for text, part in (
        (note + "x", "'Text': found a text of 100001 characters; a note has at most 100,000"),
        (note * 100, "line 2: not valid CSV (field larger than field limit (400000))"),
    ):
        assert part in message_of(write_csv(error_row(0, Text=text)))


# --- single values ---


BAD_CELLS = [
    *(("Error Flag", value, "write 1") for value in ("2", "0.5", "", "nan", "-1", "1e999999999")),
    *(("Error Sentence ID", value, "") for value in ("1.5", "True", "-2", "-1", "NA")),
    *(
        ("Text", value, "write the text of the note")
        for value in ("", "NA", "nan", " None", "null")
    ),
    ("Text ID", " ", "write the row's id"),
    ("Error Type", "Mrs Example " * 10, "found a text of 120 characters"),
    ("Text", "pH 7\ud83d3", "character 4 is the byte 0xed, which is not UTF-8"),
    ("Text", "pH\0 7", "character 2 is a NUL character (U+0000)"),
]


@pytest.mark.parametrize(("column", "value", "part"), BAD_CELLS)
def test_bad_cell_of_an_error_row_is_named_with_its_row(write_csv, column, value, part):
    message = message_of(write_csv(error_row(3) | {column: value}))
    assert (
        message.startswith("notes.csv, line 2")
        and f", column {column!r}" in message
        and part in message
    )


@pytest.mark.parametrize(
    ("column", "value"),
    [("Error Type", "diagnosis"), ("Error Sentence", "a"), ("Error Sentence ID", "0")],
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
        *(
            ({"Error_Flag": flag}, {"error_type": "pharmacotherapy"})
            for flag in ("1.0", " 1 ", "01", "1.", "True")
        ),
        *(
            ({"Error_Sentence_ID": f"{n}.0", "Sentences": "NA"}, {"error_sentence_id": n})
            for n in (0, 10)
        ),
        # Trailing blanks on one side are a label leak.
        (
            NO_SENTENCES | {"Text": f"\n {NOTE} \n", "Corrected_Text": f"{NOTE}x \t"},
            {"error_note": NOTE},
        ),
        (
            NO_SENTENCES | {"Text": NOTE, "Corrected_Text": f"{NOTE}x \t"},
            {"clean_note": f"{NOTE}x"},
        ),
        # The corrected text is used where rebuilding it would differ.
        (
            {"Text": "Gout.\n", "Error_Sentence": "Gout.\n", "Corrected_Text": "Flu. B."},
            {"clean_note": "Flu. B."},
        ),
        # Spellings of one type, and types of one's own.
        *(
            ({"Error_Type": name}, {"error_type": "causalOrganism"})
            for name in ("causalorganism", "Causal Organism")
        ),
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
    assert (case.case_id, case.subset, case.error_type) == (
        "ms-train-4",
        "medec_ms",
        "causalOrganism",
    )
    assert (case.edit_tag, case.pair_source, case.error_sentence_id) == (
        EditTag.LOCAL,
        "in_row",
        -1,
    )
    assert case.clean_note == notes["correct_note"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"note_id": "a-1", "correct_note": "b"}', "column 'incorrect_note': found an empty cell"),
        (
            '{"note_id": "a", "incorrect_note": "a\\udc00b"}',
            "('a'), column 'incorrect_note': found 'a\\udc00b'; character 1 is a lone",
        ),
        ('{"note_id": "a", "incorrect_note": "b"}', "column 'correct_note': found an empty cell"),
    ],
)
def test_line_that_is_no_pair_is_an_error_with_its_line(write_pairs, line, expected):
    path = write_pairs(pair(0))
    path.write_text(f"{path.read_text()}\n{line}\n")
    message = message_of(path)
    assert message.startswith("pairs.jsonl, line 3") and expected in message


def test_a_note_that_is_wrong_in_one_row_and_correct_in_another_is_left_out(write_csv, write_pairs):
    """Under two ids, in one file or in two; both rows would teach, with opposite labels."""
    note = error_row(8)["Text"]
    rows = [error_row(0), clean_row(1), error_row(8), clean_row(21, Text=note.upper())]
    twice, other = write_csv(*rows), write_pairs(pair(3, correct_note=note), name="other.jsonl")
    for paths, left_out in (
        ([twice], [2]),
        ([write_csv(*rows[:3], name="less.csv"), other], [1, 1]),
    ):
        found = read_files(paths)
        assert [report.contradicting for report in found.reports] == left_out
        assert [case.case_id for case in found.cases] == ["ms-test-0"]
        assert "is correct in another row" in found.reports[0].contradictions[0][1]
    published = read_files([twice], as_published=True)
    assert len(published.cases) == 4 and len(published.reports[0].contradictions) == 2


def test_a_correction_that_is_of_another_case_is_left_out(write_pairs):
    note = "Conflict case 77 has gout and is in room 5. He rests and walks daily."
    other = pair(0)["correct_note"]
    found = read_files([write_pairs(pair(0), pair(9, incorrect_note=note, correct_note=other))])
    assert "another row's" in found.reports[0].contradictions[0][1] and len(found.cases) == 1


def test_tags_of_html_are_no_marks_of_medec_uw():
    for mark, subset in (("<BR/>", "own"), ("<P/><HR />", "own"), ("<NAME/>", "medec_uw")):
        assert Case("own-1", None, f"Mr. {mark} fell.").subset == subset
