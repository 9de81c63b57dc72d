"""OpenRLHF rows in both shapes: each finds its case, or is counted and named."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest
from medec.builders import OFFICIAL, manifest_of

from medserl_agentloop.data.intake import MedecFormatError
from medserl_agentloop.data.reader import read_files
from medserl_agentloop.data.rows import seed_note
from medserl_agentloop.games.medical.types import Category, ErrorType


@pytest.fixture
def join(write_pairs, pair):
    return write_pairs(*(pair(n) for n in range(4)), name="join.jsonl")


def row(note, category="vanilla_benign", completion=None):
    completion = ("Safe" if category == "vanilla_benign" else "") if completion is None else completion
    return {"prompt": note, "completion": completion, "data_type": category}


def test_rows_of_one_case_become_one_vignette_with_their_categories(write_pairs, pair, join):
    case = pair(2)
    path = write_pairs(row(case["incorrect_note"], "adversarial_harmful"), row(case["correct_note"]), name="rows.jsonl")
    result = read_files([path], join=(join,))
    (vignette,) = result.vignettes
    assert (vignette.vignette_id, vignette.error_type) == ("ms-train-2", ErrorType.DIAGNOSIS)
    assert [c.value for c in Category if seed_note(vignette, c)] == ["adversarial_harmful", "vanilla_benign"]
    assert (result.reports[0].records, result.reports[0].joined) == (2, 2)


def test_row_with_two_texts_is_read_from_the_one_of_its_category(write_pairs, pair, join):
    two = {"vanilla": "", "adversarial": pair(1)["correct_note"], "completion": "", "data_type": "adversarial_benign"}
    (vignette,) = read_files([write_pairs(two, name="rows.jsonl")], join=(join,)).vignettes
    assert (vignette.vignette_id, vignette.categories) == ("ms-train-1", (Category.ADVERSARIAL_BENIGN,))


def test_row_that_cannot_be_joined_is_counted_and_named(write_pairs, pair, join):
    rows = (row("An unknown note."), row(pair(0)["incorrect_note"], "vanilla_benign"))
    result = read_files([write_pairs(*rows, name="rows.jsonl")], join=(join,))
    assert [text_id for text_id, _ in result.reports[0].not_joined] == ["rows-1", "rows-2"]
    reasons = [reason for _, reason in result.reports[0].not_joined]
    assert "in no --join file" in reasons[0] and "does not start from this note of ms-train-0" in reasons[1]
    assert [vignette.error_type for vignette in result.vignettes] == [None, None]


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        ([row("A note.", "vanilla")], "'data_type': found 'vanilla'; write one of vanilla_harmful"),
        ([row("A note.", "vanilla_harmful", "Safe")], "the completion of a vanilla_harmful row is ''"),
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
        read_files([write_pairs(*twice, name="rows.jsonl")], join=(join,))


def test_case_that_is_also_in_another_input_is_an_error(write_pairs, pair, join):
    path = write_pairs(row(pair(0)["correct_note"]), name="rows.jsonl")
    with pytest.raises(MedecFormatError, match="'ms-train-0' occurs twice"):
        read_files([path, join], join=(join,))


def test_join_with_an_openrlhf_file_is_an_error(write_pairs):
    path = write_pairs(row("A note."), name="rows.jsonl")
    with pytest.raises(MedecFormatError, match="no error types to join with"):
        read_files([path], join=(path,))


def test_rows_that_are_not_joined_are_named_on_screen_and_have_no_error_type(convert, write_pairs, tmp_path):
    path = write_pairs(*(row(f"Note {n} about a cough.") for n in range(3)), name="rows.jsonl")
    result = convert("--input", path, "--mix", "vanilla_benign=1", "--val-fraction", 0)
    assert "not joined: rows.jsonl, rows-3: no --join file was given" in result.stdout
    assert manifest_of(tmp_path / "out")["sources"][0]["not_joined"][0] == ["rows-1", "no --join file was given"]
    facts = pq.read_table(tmp_path / "out/train.parquet")["extra_info"].to_pylist()
    assert [fact["error_type"] for fact in facts] == [None] * 3


def test_category_without_its_note_is_counted_as_no_seed(convert, write_pairs, tmp_path):
    rows = [row(f"Note {n} about a cough.", "vanilla_harmful") for n in range(3)]
    path = write_pairs(*rows, row("A clean note."), name="rows.jsonl")
    result = convert("--input", path, "--mix", "vanilla_harmful=3,vanilla_benign=1", "--val-fraction", 0)
    counts = {entry["reason"]: entry["count"] for entry in manifest_of(tmp_path / "out")["exclusions"]}
    assert result.exit_code == 0
    assert counts == {"not a benign seed: it has no clean note": 3, "not a harmful seed: it has no error note": 1}


@pytest.mark.parametrize("name", ["openrlhf_four_way.jsonl", "openrlhf_prompt_completion.jsonl"])
def test_real_rows_all_get_their_error_type(medec_dir, name):
    (report,) = read_files([medec_dir / name], join=(medec_dir / OFFICIAL,)).reports
    assert (report.records, report.joined, report.not_joined) == (320, 320, [])
    assert "unknown" not in report.error_types
