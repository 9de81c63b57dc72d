"""UTF-8 that was read as cp1252: left alone by default, put right in every field alike on request."""

from __future__ import annotations

import pyarrow.parquet as pq

from medserl_agentloop.data.intake import repair_encoding
from medserl_agentloop.data.reader import read_files


def test_only_complete_misread_spans_are_repaired():
    """Case 11: a lone lead byte or an impossible sequence stays."""
    misread = "2\u20133 \u00b5g".encode().decode("cp1252")
    assert repair_encoding(misread) == "2\u20133 \u00b5g"
    for genuine in ("5 \u00b5g, 3 m\u00b3", "caf\u00e9 \u20ac5", "\u00c2 alone"):
        assert repair_encoding(genuine) == genuine
    overlong = b"\xe0\x80\x80".decode("latin-1").replace("\x80", "\u20ac")
    assert repair_encoding(overlong) == overlong


def test_misread_characters_are_put_right_only_if_asked(convert, write_pairs, pair, tmp_path):
    """Case 11: raw by default, repaired on request, genuine signs untouched."""
    dash = "\u2013".encode().decode("cp1252")
    broken = [pair(n, correct_note=f"Note {n}: 2{dash}3 \u00b5g, 5 m\u00b3.") for n in range(12)]
    path = write_pairs(*broken)
    arguments = ("--input", path, "--mix", "vanilla_benign=1", "--val-fraction", 0)
    for options, expected in (
        ((), f"2{dash}3 \u00b5g, 5 m\u00b3."),
        (("--repair-encoding",), "2\u20133 \u00b5g, 5 m\u00b3."),
    ):
        assert convert(*arguments, *options).exit_code == 0
        notes = [row["clean_note"] for row in pq.read_table(tmp_path / "out/train.parquet")["extra_info"].to_pylist()]
        assert all(note.endswith(expected) for note in notes)


def test_every_text_of_a_row_is_repaired_and_the_row_is_counted_once(write_csv, error_row):
    """Case 11: the error sentence must still be found in its note."""
    dash = "\u2013".encode().decode("cp1252")
    row = {name: cell.replace("for it", f"2{dash}3 times for it") for name, cell in error_row(0).items()}
    result = read_files([write_csv(row, error_row(2))], repair_encoding=True)
    vignette = result.vignettes[0]
    texts = [vignette.error_note, vignette.clean_note, vignette.error_sentence, vignette.corrected_sentence]
    assert all("2\u20133 times" in text for text in [*texts, vignette.sentences[1].text])
    assert result.reports[0].repaired == 1
