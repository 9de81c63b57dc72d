"""OpenRLHF rows in both shapes, and Hugging Face data sets with MEDEC's columns."""

from __future__ import annotations

import datasets
import pytest

from medserl_agentloop.game.types import Category, ErrorType
from medserl_agentloop.medec.encoding_repair import repair_encoding
from medserl_agentloop.medec.fields import MedecFormatError
from medserl_agentloop.medec.near_duplicates import NearDuplicateIndex, four_grams, similarity
from medserl_agentloop.medec.reader import ReadOptions, read_files
from medserl_agentloop.medec.rows import seed_note


@pytest.fixture
def join(write_pairs, pair):
    return write_pairs(*(pair(n) for n in range(4)), name="join.jsonl")


def row(note, category="vanilla_benign", completion=None):
    completion = ("Safe" if category == "vanilla_benign" else "") if completion is None else completion
    return {"prompt": note, "completion": completion, "data_type": category}


def test_rows_of_one_case_become_one_vignette_with_their_categories(write_pairs, pair, join):
    case = pair(2)
    path = write_pairs(row(case["incorrect_note"], "adversarial_harmful"), row(case["correct_note"]), name="rows.jsonl")
    result = read_files([path], ReadOptions(join=(join,)))
    (vignette,) = result.vignettes
    assert (vignette.vignette_id, vignette.error_type) == ("ms-train-2", ErrorType.DIAGNOSIS)
    assert [c.value for c in Category if seed_note(vignette, c)] == ["adversarial_harmful", "vanilla_benign"]
    assert (result.reports[0].records, result.reports[0].joined) == (2, 2)


def test_row_with_two_texts_is_read_from_the_one_of_its_category(write_pairs, pair, join):
    two = {"vanilla": "", "adversarial": pair(1)["correct_note"], "completion": "", "data_type": "adversarial_benign"}
    (vignette,) = read_files([write_pairs(two, name="rows.jsonl")], ReadOptions(join=(join,))).vignettes
    assert (vignette.vignette_id, vignette.categories) == ("ms-train-1", (Category.ADVERSARIAL_BENIGN,))


def test_row_that_cannot_be_joined_is_counted_and_named(write_pairs, pair, join):
    rows = (row("An unknown note."), row(pair(0)["incorrect_note"], "vanilla_benign"))
    result = read_files([write_pairs(*rows, name="rows.jsonl")], ReadOptions(join=(join,)))
    assert [text_id for text_id, _ in result.reports[0].not_joined] == ["rows-1", "rows-2"]
    reasons = [reason for _, reason in result.reports[0].not_joined]
    assert "in no --join file" in reasons[0] and "does not start from this note of ms-train-0" in reasons[1]
    assert [vignette.error_type for vignette in result.vignettes] == [None, None]


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        ([row("A note.", "vanilla")], "'data_type': found 'vanilla'; write one of vanilla_harmful"),
        ([row("A note.", "vanilla_harmful", "Safe")], "the completion of a vanilla_harmful row is ''"),
        ([{"prompt": "A note.", "data_type": "vanilla_benign"}], "'completion' is missing"),
        ([row(" ")], "write the text of the note"),
        (
            [{"vanilla": "a", "adversarial": "b", "completion": "", "data_type": "vanilla_harmful"}],
            "has its note under 'vanilla' alone",
        ),
    ],
)
def test_row_that_contradicts_itself_is_an_error(write_pairs, rows, part):
    with pytest.raises(MedecFormatError, match=r"rows\.jsonl, row 1") as caught:
        read_files([write_pairs(*rows, name="rows.jsonl")])
    assert part in str(caught.value)


def test_same_row_twice_is_an_error(write_pairs, pair, join):
    twice = [row(pair(0)["correct_note"])] * 2
    with pytest.raises(MedecFormatError, match="already that of"):
        read_files([write_pairs(*twice, name="rows.jsonl")], ReadOptions(join=(join,)))


def test_case_that_is_also_in_another_input_is_an_error(write_pairs, pair, join):
    path = write_pairs(row(pair(0)["correct_note"]), name="rows.jsonl")
    with pytest.raises(MedecFormatError, match="'ms-train-0' occurs twice"):
        read_files([path, join], ReadOptions(join=(join,)))


def test_join_with_an_openrlhf_file_is_an_error(write_pairs):
    path = write_pairs(row("A note."), name="rows.jsonl")
    with pytest.raises(MedecFormatError, match="no error types to join with"):
        read_files([path], ReadOptions(join=(path,)))


@pytest.mark.parametrize("saved", ["disk", "splits", "parquet"])
def test_local_data_set_reads_as_the_csv_does(write_csv, error_row, clean_row, tmp_path, saved):
    rows = [error_row(0), clean_row(1)]
    typed = [r | {"Error Flag": float(r["Error Flag"]), "Error Sentence ID": int(r["Error Sentence ID"])} for r in rows]
    typed[1]["Error Type"] = None
    data, folder = datasets.Dataset.from_list(typed), tmp_path / "data"
    if saved == "parquet":
        folder.mkdir()
        data.to_parquet(str(folder / "part.parquet"))
    else:
        (data if saved == "disk" else datasets.DatasetDict(train=data)).save_to_disk(str(folder))
    (found,), (expected,) = read_files([folder]).vignettes, read_files([write_csv(*rows)]).vignettes
    assert (found.text_ids, found.error_note, found.clean_note, found.twin_note, found.sentences) == (
        expected.text_ids,
        expected.error_note,
        expected.clean_note,
        expected.twin_note,
        expected.sentences,
    )


def test_data_set_that_lacks_a_column_or_rows_is_an_error(tmp_path):
    datasets.Dataset.from_list([{"Text": "a"}]).save_to_disk(str(tmp_path / "data"))
    with pytest.raises(MedecFormatError, match="'Text ID' is missing"):
        read_files([tmp_path / "data"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(MedecFormatError, match="the folder has no data set"):
        read_files([tmp_path / "empty"])


def test_only_complete_misread_spans_are_repaired():
    """Case 11: a lone lead byte or an impossible sequence stays."""
    misread = "2\u20133 \u00b5g".encode().decode("cp1252")
    assert repair_encoding(misread) == "2\u20133 \u00b5g"
    for genuine in ("5 \u00b5g, 3 m\u00b3", "caf\u00e9 \u20ac5", "\u00c2 alone"):
        assert repair_encoding(genuine) == genuine


def test_index_finds_every_pair_that_comparing_all_would_find():
    words = "abcdefghijklmnopqrst"
    texts = [" ".join(words[(start + step * i) % 20] for i in range(16)) for start in range(20) for step in (1, 3)]
    index = NearDuplicateIndex(texts, texts.__getitem__)
    for text in [*texts, "a b c d e f g h x y", "no", ""]:
        best = max(similarity(four_grams(text), four_grams(other)) for other in texts)
        match = index.find(text)
        assert (match.similarity if match else 0.0) == (best if best >= 0.5 else 0.0)
