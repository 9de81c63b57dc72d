"""The pair format, line by line."""

from __future__ import annotations

import pytest
from medec.builders import message_of, read_one

from medserl_agentloop.data.vignettes import EditTag, PairSource
from medserl_agentloop.games.medical.types import ErrorType


def test_pair_line_becomes_a_vignette(write_pairs, pair):
    vignette = read_one(write_pairs(pair(4, error_type="causalorganism")))
    assert (vignette.vignette_id, vignette.subset) == ("ms-train-4", "medec_ms")
    assert (vignette.error_type, vignette.edit_tag) == (ErrorType.CAUSAL_ORGANISM, EditTag.LOCAL)
    assert (vignette.pair_source, vignette.error_sentence_id) == (PairSource.IN_ROW, -1)


def test_jsonl_is_split_at_line_feeds_only(write_pairs, pair):
    """Case 14: U+2028 and its like are no line ends."""
    note = "One\u2028two\u0085three\x0cfour"
    assert read_one(write_pairs(pair(0, incorrect_note=note))).error_note == note


def test_escaped_surrogate_in_a_pair_is_an_error_with_its_id(write_pairs, pair):
    """Case 14: the same as a JSON escape."""
    message = message_of(write_pairs(pair(0), pair(6, correct_note="a\udc00b"), ensure_ascii=True))
    assert "pairs.jsonl, row 2 ('ms-train-6'), column 'correct_note'" in message


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "not valid JSON"),
        ("[1]", "found a JSON list"),
        ('{"note_id": "a-1", "correct_note": "b"}', "column 'incorrect_note': found an empty cell"),
        ('{"note_id": 5, "incorrect_note": "a", "correct_note": "b"}', "write a JSON string"),
    ],
)
def test_line_that_is_no_pair_is_an_error_with_its_row(tmp_path, line, expected):
    path = tmp_path / "pairs.jsonl"
    path.write_text(f"\n{line}\n")
    message = message_of(path)
    assert "row 2" in message and expected in message
