"""Single values: what is accepted, what is refused with its row, and that text stays text."""

from __future__ import annotations

import pytest
from medec.builders import message_of, read_one

from medserl_agentloop.data.intake import numbered_sentences
from medserl_agentloop.data.reader import read_files
from medserl_agentloop.games.medical.types import ErrorType


@pytest.mark.parametrize(("column", "value"), [("Text", ""), ("Text", "NA"), ("Text ID", " ")])
def test_row_without_id_or_text_is_an_error(write_csv, error_row, column, value):
    """Case 1: any other row without id or text."""
    message = message_of(write_csv(error_row(0), error_row(1) | {column: value}))
    assert "notes.csv, row 2" in message and repr(column) in message


@pytest.mark.parametrize("flag", ["1", "1.0", " 1 ", "01", "1.", "True"])
def test_flag_is_read_in_any_spelling_of_a_whole_number(write_csv, error_row, flag):
    """Case 2: flags as pandas or a spreadsheet writes them."""
    assert read_one(write_csv(error_row(0, Error_Flag=flag))).error_note


@pytest.mark.parametrize("flag", ["2", "0.5", "yes", "", "NA", "nan", "-1", "1e999999999"])
def test_any_other_flag_is_an_error_that_names_the_row(write_csv, error_row, flag):
    """Case 2: what is no whole number is refused."""
    message = message_of(write_csv(error_row(3, Error_Flag=flag)))
    assert "row 1 ('ms-test-3'), column 'Error Flag'" in message and "write 1" in message


def test_sentence_id_may_be_written_as_a_float_and_may_be_zero(write_csv, error_row):
    """Cases 2 and 10: ``10.0``, and 0 is a sentence."""
    path = write_csv(error_row(0, Error_Sentence_ID="0.0"), error_row(2, Error_Sentence_ID="10.0"))
    assert [v.error_sentence_id for v in read_files([path]).vignettes] == [0, 10]


@pytest.mark.parametrize("number", ["1.5", "True", "one", "-2", "-1", "NA"])
def test_error_row_with_an_impossible_sentence_id_is_an_error(write_csv, error_row, number):
    """Case 2: the same for sentence ids."""
    assert "'Error Sentence ID'" in message_of(write_csv(error_row(0, Error_Sentence_ID=number)))


def test_na_and_an_empty_cell_both_mean_absent(write_csv, error_row):
    """Case 3: ``NA`` beside a really empty cell."""
    path = write_csv(error_row(0, Error_Type="NA", Error_Sentence=""), error_row(2, Corrected_Text=""))
    first, second = read_files([path]).vignettes
    assert (first.error_type, first.error_sentence, second.clean_note) == (None, None, None)


def test_clean_row_that_names_an_error_is_a_contradiction(write_csv, clean_row):
    for column, value in (("Error Type", "diagnosis"), ("Error Sentence", "a"), ("Corrected Text", "b")):
        message = message_of(write_csv(clean_row(1) | {column: value}))
        assert repr(column) in message and "flag says that it has no error: write NA, or flag 1" in message
    message = message_of(write_csv(clean_row(1, Error_Sentence_ID="0")))
    assert "'Error Sentence ID': found '0'; the row's flag says that it has no error: write -1, or flag 1" in message


def test_both_notes_of_a_pair_are_stripped_alike(write_csv, error_row):
    """Case 5: trailing blanks on one side are a label leak."""
    note = error_row(0)["Text"]
    vignette = read_one(write_csv(error_row(0, Text=f"\n {note} \n", Corrected_Text=f"{note}x \t")))
    assert vignette.error_note == note.strip() and vignette.clean_note == f"{note}x"


@pytest.mark.parametrize("spelling", ["causalOrganism", "causalorganism", "Causal Organism"])
def test_error_type_has_one_canonical_name(write_csv, error_row, spelling):
    """Case 12: spellings of one type."""
    assert read_one(write_csv(error_row(0, Error_Type=spelling))).error_type is ErrorType.CAUSAL_ORGANISM


def test_unknown_error_type_is_an_error(write_csv, error_row):
    """Case 12: no type is guessed."""
    message = message_of(write_csv(error_row(0, Error_Type="dosage")))
    assert "'dosage'" in message and "pharmacotherapy" in message


@pytest.mark.parametrize(
    "note", ["pO2 <5 %, K >3 <tag/> <think>x</think></answer><image>", "{{ note }} {% if %} 5 % \\1 a\u2028b"]
)
def test_markup_braces_and_line_separators_in_a_note_stay_text(write_csv, error_row, note):
    """Cases 13 and 14: neither markup nor template."""
    assert read_one(write_csv(error_row(0, Text=note))).error_note == note


def test_lone_surrogate_is_an_error_with_the_id_of_the_row(write_csv, error_row):
    """Case 14: no tokenizer reads it."""
    message = message_of(write_csv(error_row(4, Text="pH 7\ud83d3")))
    assert "ms-test-4" in message and "U+D83D" in message


def test_error_about_a_long_cell_does_not_show_the_cell(write_csv, error_row):
    message = message_of(write_csv(error_row(0, Error_Type="Mrs Example " * 10)))
    assert "a text of 120 characters" in message and "Mrs Example" not in message


def test_sentences_keep_their_numbers_and_lines_without_one_are_appended():
    """Case 9: continuation lines, blank lines, a missing number."""
    found = numbered_sentences("0 First\nand on.\n\n1 Second.\n3 Fourth.\n1 week later.\n4 End.")
    assert [(s.id, s.text) for s in found] == [
        (0, "First\nand on."),
        (1, "Second."),
        (3, "Fourth.\n1 week later."),
        (4, "End."),
    ]


def test_figure_at_the_start_of_a_continuation_line_is_no_sentence_number():
    """Case 9: a dose is no sentence number."""
    found = numbered_sentences("0 He takes\n500 mg daily.\n1 His wife\n3 times.\n2 End.")
    assert [s.id for s in found] == [0, 1, 2]


def test_line_before_the_first_number_is_a_sentence_without_one():
    """Case 9: nothing is lost and nothing renumbered."""
    found = numbered_sentences("\nHistory:\n0 First.")
    assert [(s.id, s.text) for s in found] == [(-1, "History:"), (0, "First.")]


def test_nul_character_is_an_error(write_csv, error_row):
    assert "character 2 is a NUL character (U+0000)" in message_of(write_csv(error_row(0, Text="pH\0 7")))
