"""A run that fails or is killed leaves the old files or the new ones, never half of one."""

from __future__ import annotations

from pathlib import Path

from medec.builders import (
    assert_one_sentence,
)

from medserl_agentloop.medec import conversion

FILES = ["manifest.json", "train.parquet", "val.parquet"]


def test_output_that_is_a_file_ends_with_one_sentence(convert, pairs, tmp_path):
    (tmp_path / "taken").write_text("mine")
    assert_one_sentence(convert("--input", pairs, output="taken"), "cannot be written")
    assert (tmp_path / "taken").read_text() == "mine"


def test_failed_write_leaves_the_old_files_alone(convert, pairs, tmp_path, monkeypatch):
    convert("--input", pairs)
    before = (tmp_path / "out" / "train.parquet").read_bytes()

    def full_disk(rows, path):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversion, "write_parquet", full_disk)
    assert_one_sentence(convert("--input", pairs, "--seed", 2), "No space left")
    assert (tmp_path / "out" / "train.parquet").read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES


def test_file_that_cannot_be_exchanged_brings_the_others_back(convert, pairs, tmp_path):
    folder = tmp_path / "out"
    convert("--input", pairs)
    (folder / "val.parquet").unlink()
    (folder / "val.parquet").mkdir()
    before = (folder / "train.parquet").read_bytes()
    assert_one_sentence(convert("--input", pairs, "--seed", 2), "cannot be written")
    assert (folder / "train.parquet").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == FILES
