"""UTF-8 that was read as cp1252: left alone by default, put right in every field alike on request."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest
from note_files import OFFICIAL, PAIRS, medec_file

from medserl_agentloop.data.intake import repair_encoding
from medserl_agentloop.data.reader import read_files

SIGNS = "2–3 µg|≥ 5|37 °C|−2|90 µg/dL, 3 × 10³ ± 2|HCO₃⁻|Sjögren’s|β-blocker|½ cup|5\xa0mg"  # noqa: RUF001


@pytest.mark.parametrize("text", SIGNS.split("|"))
def test_signs_of_a_note_stay_and_come_back_where_they_were_misread(text):
    """Case 11: nothing but misread UTF-8 changes."""
    assert repair_encoding(text) == text
    assert repair_encoding(f"At 5 µg: {text}") == f"At 5 µg: {text}"
    misread = "".join(bytes([b]).decode("cp1252", "replace").replace("\ufffd", chr(b)) for b in text.encode())
    assert misread != text and repair_encoding(f"At 5 µg: {misread}") == f"At 5 µg: {text}"


def test_a_sequence_that_is_no_utf_8_stays():
    overlong = b"\xe0\x80\x80".decode("latin-1").replace("\x80", "\u20ac")
    for genuine in ("caf\u00e9 \u20ac5", overlong, "no-break\xa0space \u2026 \u201cquoted\u201d \ufb01ne \uff21"):
        assert repair_encoding(genuine) == genuine


@pytest.mark.parametrize(("name", "rows"), [(OFFICIAL, 124), (PAIRS, 244)])
def test_misread_rows_of_the_real_files_are_put_right(name, rows):
    (report,) = read_files([medec_file(name)], repair_encoding=True).reports
    assert report.repaired == rows


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
