"""A file is replaced as a whole or not at all, and what is no file is not read."""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from invoking import invoke
from note_files import SAMPLE

from medserl_agentloop.paths import read_parquet, replacing


def write(path: Path) -> None:
    with replacing(path) as file:
        file.write(b"new")


def test_a_link_stays_one_and_only_a_regular_file_is_replaced(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "linked")
    for output in (pipe, tmp_path, Path("/dev/null")):
        with pytest.raises(ValueError, match=f"{output} is not a regular file"):
            write(output)
    assert pipe.is_fifo() and Path("/dev/null").is_char_device()
    write(link)
    assert link.is_symlink() and (tmp_path / "linked").read_bytes() == b"new"


def test_nested_columns_are_read_over_the_border_of_row_groups(tmp_path: Path) -> None:
    rows = pa.Table.from_pylist([{"prompt": [{"role": "user", "content": "note"}]}] * 20)
    pq.write_table(rows, tmp_path / "rows.parquet", row_group_size=15)
    assert read_parquet(tmp_path / "rows.parquet") == rows


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(f"os.{call}", full)
    with pytest.raises((OSError, ValueError), match="No space left on device"):
        write(path)
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"old"


@pytest.mark.parametrize(
    "words",
    [
        "data convert --input {csv} --output out",
        "data verify {parquet}",
        "score {csv} --reference {sample}",
        "show {jsonl}",
        "play http://127.0.0.1:9 --model none --judge labels --data {parquet}",
        "evaluate http://127.0.0.1:9 --model none --notes {csv}",
    ],
)
def test_a_pipe_is_refused_by_every_command_that_reads_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {kind: tmp_path / f"input.{kind}" for kind in ("csv", "jsonl", "parquet")}
    for path in names.values():
        os.mkfifo(path)
    result = invoke(*words.format(sample=SAMPLE, **names).split())
    refused = "is not a regular file" in result.stderr or "holds no games" in result.stderr
    assert result.exit_code == 2 and refused, result.output
