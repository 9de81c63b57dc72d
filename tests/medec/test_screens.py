"""What is kept out of the files: near-duplicates, overlong prompts, training cases that validation has."""

from __future__ import annotations

import pyarrow.parquet as pq
from medec.builders import (
    assert_one_sentence,
    manifest_of,
)

from medserl_agentloop.data.vignettes import NearDuplicateIndex, four_grams
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


def similarity(a, b):
    """Jaccard similarity of two sets of 4-grams."""
    return len(a & b) / len(a | b)


def test_index_finds_every_pair_that_comparing_all_would_find():
    words = "abcdefghijklmnopqrst"
    texts = [" ".join(words[(start + step * i) % 20] for i in range(16)) for start in range(20) for step in (1, 3)]
    index = NearDuplicateIndex(texts)
    for text in [*texts, "a b c d e f g h x y", "no", ""]:
        best = max(similarity(four_grams(text), four_grams(other)) for other in texts)
        _, found = index.find(text) or (0, 0.0)
        assert found == (best if best >= 0.5 else 0.0)


def nearly(pair, n, note_id):
    """``pair(n)`` with a word added in the middle of both notes."""
    changed = pair(n, note_id=note_id)
    for key in ("incorrect_note", "correct_note"):
        changed[key] = changed[key].replace("temperature", "high temperature")
    return changed


def test_near_duplicates_across_the_splits_are_reported_and_kept(convert, pairs, write_pairs, pair, tmp_path):
    others = [nearly(pair, 7, "ms-val-0"), *(pair(n, note_id=f"ms-val-{n}") for n in range(100, 110))]
    result = convert("--input", pairs, "--val-input", write_pairs(*others, name="val.jsonl"))
    grams = [four_grams(nearly(pair, 7, "")["correct_note"]), four_grams(pair(7)["correct_note"])]
    expected = round(similarity(*grams), 3)
    assert 0.5 <= expected < 1
    assert manifest_of(tmp_path / "out")["near_duplicates_across_splits"] == [
        {"train": "ms-train-7", "val": "ms-val-0", "similarity": expected}
    ]
    found = f"train ms-train-7, val ms-val-0 (4-gram Jaccard {expected:.2f})"
    assert f"warning: near-duplicates across the splits (1): {found}" in result.stdout
    facts = pq.read_table(tmp_path / "out/train.parquet")["extra_info"].to_pylist()
    assert "ms-train-7" in {fact["vignette_id"] for fact in facts}


def test_splits_without_near_duplicates_report_none(convert, pairs, tmp_path):
    result = convert("--input", pairs)
    assert manifest_of(tmp_path / "out")["near_duplicates_across_splits"] == []
    assert "near-duplicates across" not in result.stdout


def test_tokenizer_without_a_chat_template_is_an_error(convert, pairs, tmp_path):
    plain = tiny_tokenizer()
    plain.chat_template = None
    plain.save_pretrained(tmp_path / "plain")
    result = convert("--input", pairs, "--max-prompt-tokens", 100, "--tokenizer", tmp_path / "plain")
    assert_one_sentence(result, "plain: it has no chat template; give --tokenizer that of an instruct model")


def test_prompts_are_measured_for_the_notes_that_a_case_has(convert, write_csv, error_row, clean_row, tokenizer):
    path = write_csv(*(error_row(n) for n in range(0, 20, 2)), *(clean_row(n) for n in range(31, 50, 2)))
    arguments = ("--max-prompt-tokens", 100, "--tokenizer", tokenizer, "--val-fraction", 0)
    result = convert("--input", path, "--mix", "vanilla_harmful=1,vanilla_benign=1", *arguments)
    assert_one_sentence(result, "30 prompts are overlong", "ms-test-0 (vanilla_harmful:")
