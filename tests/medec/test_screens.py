"""What is kept out of the files: near-duplicates, overlong prompts, training cases that validation has."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest
from medec.builders import (
    assert_one_sentence,
    manifest_of,
)

from medserl_agentloop.testing.tiny import tiny_tokenizer


def test_cases_given_for_validation_all_go_there_and_out_of_training(convert, pairs, write_pairs, pair, tmp_path):
    shared = pair(3, note_id="ms-val-1003")  # the same notes as ms-train-3
    other = write_pairs(shared, *(pair(n, note_id=f"ms-val-{n}") for n in range(100, 110)), name="val.jsonl")
    assert convert("--input", pairs, "--val-input", other).exit_code == 0
    ids = {
        name: {row["vignette_id"] for row in pq.read_table(tmp_path / f"out/{name}.parquet")["extra_info"].to_pylist()}
        for name in ("train", "val")
    }
    assert ids["val"] and all(text_id.startswith("ms-val") for text_id in ids["val"])
    assert len(ids["train"]) == 39 and "ms-train-3" not in ids["train"]
    left_out = [
        entry for entry in manifest_of(tmp_path / "out")["exclusions"] if "given for validation" in entry["reason"]
    ]
    assert left_out[0]["rows"] == [{"id": "ms-train-3", "detail": "ms-val-1003"}]


def test_near_duplicates_of_a_file_are_left_out_and_name_their_match(convert, pairs, write_pairs, pair, tmp_path):
    changed = pair(7, note_id="ms-eval-1")
    for key in ("incorrect_note", "correct_note"):
        changed[key] = changed[key].upper().replace("PNEUMONIA", "TUBERCULOSIS")
    near = write_pairs(changed, name="eval.jsonl")
    assert convert("--input", pairs, "--exclude-near-duplicates-of", near).exit_code == 0
    exclusions = manifest_of(tmp_path / "out")["exclusions"]
    rows = [row for entry in exclusions if "near-duplicate" in entry["reason"] for row in entry["rows"]]
    assert "ms-train-7" in {row["id"] for row in rows}
    assert all(row["detail"].startswith("ms-eval-1 (4-gram Jaccard") for row in rows)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_overlong_prompts_are_an_error_that_names_them(convert, pairs, tokenizer, tmp_path):
    """Case 15: overlong rows, by default."""
    arguments = ("--input", pairs, "--max-prompt-tokens", 100, "--tokenizer", tokenizer)
    assert_one_sentence(
        convert(*arguments), "160 prompts are overlong", "ms-train-0 (vanilla_harmful:", "--on-overlong"
    )
    assert not (tmp_path / "out").exists()


def test_overlong_prompts_are_left_out_and_listed_if_asked(convert, write_pairs, pair, tokenizer, tmp_path):
    """Case 15: overlong rows, left out on request."""
    long_note = "word " * 4000
    path = write_pairs(pair(0, incorrect_note=long_note), *(pair(n) for n in range(1, 20)))
    arguments = ("--max-prompt-tokens", 8000, "--tokenizer", tokenizer, "--on-overlong", "exclude")
    assert convert("--input", path, "--mix", "vanilla_harmful=1", "--val-fraction", 0, *arguments).exit_code == 0
    assert pq.read_metadata(tmp_path / "out/train.parquet").num_rows == 19
    overlong = [e for e in manifest_of(tmp_path / "out")["exclusions"] if e["reason"] == "overlong prompt"]
    assert [row["id"] for entry in overlong for row in entry["rows"]] == ["ms-train-0"]
