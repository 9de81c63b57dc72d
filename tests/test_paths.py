"""A file is replaced as a whole or not at all."""

import os
from pathlib import Path

import pytest

from medserl_agentloop.paths import replacing


def write(path: Path) -> None:
    with replacing(path) as file:
        file.write(b"new")


def test_a_link_stays_one_and_only_a_regular_file_is_replaced(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "linked")
    for output in (pipe, tmp_path, Path("/dev/null")):
        with pytest.raises(ValueError, match=f"{output} is no regular file"):
            write(output)
    assert pipe.is_fifo() and Path("/dev/null").is_char_device()
    write(link)
    assert link.is_symlink() and (tmp_path / "linked").read_bytes() == b"new"


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
