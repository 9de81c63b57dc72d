"""verify_parquet on the command line: exit codes, what is printed, the default tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from medec.builders import assert_one_sentence, good_rows, run, verify, write
from note_files import SAMPLE

from medserl_agentloop.data.verify import Check
from medserl_agentloop.paths import sha256_of


def test_exit_code_is_0_for_good_files(tokenizer: str, tmp_path: Path) -> None:
    result = run("verify_parquet", write(tmp_path / "train.parquet", good_rows()), "--tokenizer", tokenizer)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("not checked: ") == 3  # no manifest, no limit of length, one split
    assert result.stdout.count("holds") == len(Check) - 3


def test_what_was_checked_holds_and_what_was_not_says_so(tokenizer: str, tmp_path: Path) -> None:
    train, val = (
        write(tmp_path / "train.parquet", good_rows()),
        write(tmp_path / "val.parquet", good_rows(12, 60, "val")),
    )
    outputs = {path.name: {"sha256": sha256_of(path)} for path in (train, val)}
    (tmp_path / "manifest.json").write_text(json.dumps({"outputs": outputs}))
    result = run("verify_parquet", train, val, "--tokenizer", tokenizer, "--max-prompt-tokens", 2000)
    assert result.exit_code == 0 and result.stdout.count("holds") == len(Check)
    row = good_rows(1)[0]
    row["extra_info"]["category"] = "vanilla"
    report = verify(write(tmp_path / "one.parquet", [row]))
    assert set(report.unchecked) == {
        *(Check.MANIFEST, Check.LENGTH, Check.PROMPT, Check.SPLITS, Check.CONSTANT, Check.BALANCE, Check.LEAKS)
    }


def test_warm_start_files_are_refused_in_one_sentence(tmp_path: Path, tokenizer: str) -> None:
    assert run("sft_to_parquet", "--input", SAMPLE, "--output", tmp_path).exit_code == 0
    result = run("verify_parquet", tmp_path / "sft_train.parquet", "--tokenizer", tokenizer)
    assert_one_sentence(result, "sft_train.parquet: the file has conversations for a warm start")


def test_similar_notes_on_two_sides_under_ids_of_their_own_are_a_warning(tmp_path: Path) -> None:
    train, val = good_rows(12), good_rows(12, 12, "val")
    twin = next(row for row in good_rows(12) if row["extra_info"]["category"] == "vanilla_harmful")
    twin["extra_info"] |= {"index": 99, "split": "val", "vignette_id": "rows-2", "text_id": "rows-2"}
    note = twin["extra_info"]["error_note"].replace("He was", "She was")
    twin["extra_info"] |= {"seed_note": note, "error_note": note}
    twin["prompt"][0]["content"] = twin["prompt"][0]["content"].replace("He was", "She was")
    report = verify(write(tmp_path / "train.parquet", train), write(tmp_path / "val.parquet", [*val, twin]))
    assert report.ok and report.warnings[Check.SPLITS] == 1
    (warning,) = (str(problem) for problem in report.problems)
    assert "val.parquet: 1 notes are nearly those of split 'train', such as val.parquet, row 12 and train" in warning


def test_exit_code_is_1_and_the_row_is_named_for_bad_files(tokenizer: str, tmp_path: Path) -> None:
    rows = good_rows()
    rows[9]["agent_name"] = "other"
    result = run("verify_parquet", write(tmp_path / "train.parquet", rows), "--tokenizer", tokenizer)
    assert result.exit_code == 1
    assert "failed: train.parquet, row 9: agent_name is 'other'" in result.stdout
    assert "agent name" in result.stdout and "failed: 1" in result.stdout


def test_exit_code_is_2_for_what_cannot_be_read(tokenizer: str, tmp_path: Path) -> None:
    good = write(tmp_path / "good.parquet", good_rows(12))
    (tmp_path / "bad.parquet").write_text("no parquet")
    write(tmp_path / "empty.parquet", [])
    for arguments, part in (
        ([tmp_path / "none.parquet"], "none.parquet: cannot be read as parquet"),
        ([tmp_path / "bad.parquet"], "bad.parquet: cannot be read as parquet"),
        ([tmp_path / "rows.csv"], "verl reads files that end in .parquet"),
        ([tmp_path / "empty.parquet", "--tokenizer", tokenizer], "has no rows"),
        ([good, "--tokenizer", tmp_path / "nowhere"], "nowhere: cannot be loaded"),
        ([good, "--tokenizer", tokenizer, "--profile", "nonsense"], "no prompt profile 'nonsense'"),
    ):
        result = run("verify_parquet", *arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert part in result.stderr and result.stderr.count("error: ") == 1 and "Traceback" not in result.stderr


def test_default_tokenizer_is_the_tiny_players(tmp_path: Path) -> None:
    assert run("verify_parquet", write(tmp_path / "train.parquet", good_rows(12))).exit_code == 0


def test_file_that_verl_cannot_open_is_named(tmp_path: Path, tokenizer: str) -> None:
    path = write(tmp_path / "train.parquet", good_rows())
    content = bytearray(path.read_bytes())
    content[4:400] = bytes(396)  # the footer is whole, the rows are not
    path.write_bytes(content)
    result = run("verify_parquet", path, "--tokenizer", tokenizer)
    assert result.exit_code == 2
    assert "train.parquet: verl's RLHFDataset cannot open it (" in result.stderr
    assert "write the file again with data_prep/medec_to_parquet.py" in result.stderr


def test_failures_beyond_the_first_of_a_kind_are_counted(tmp_path: Path, tokenizer: str) -> None:
    rows = good_rows()
    for row in rows[:10]:
        row["agent_name"] = "other"
    result = run("verify_parquet", write(tmp_path / "train.parquet", rows), "--tokenizer", tokenizer)
    assert result.stdout.count("failed: train.parquet, row") == 3
    assert "and 7 more failures of the same kinds" in result.stdout
