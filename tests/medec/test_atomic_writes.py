"""A run that fails or is killed leaves the old files or the new ones, never half of one."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import medec_to_parquet
import pytest
from medec.builders import assert_found, assert_one_sentence, good_rows, run, verify, write
from note_files import SAMPLE

from medserl_agentloop.data import rows as data_rows
from medserl_agentloop.data.verify import Check

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

    monkeypatch.setattr(data_rows, "write_parquet", full_disk)
    assert_one_sentence(convert("--input", pairs, "--seed", 2), "No space left")
    assert (tmp_path / "out" / "train.parquet").read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES


# A real process, killed by itself just before the given call of the interpreter: no exit handler runs.
KILLED = """
import os, runpy, signal, sys

event, part, number, script = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]

def hook(name, arguments):
    global number
    if name == event and part in str(arguments[0]):
        number -= 1
        if number == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(hook)
sys.argv = sys.argv[4:]
sys.path.insert(0, os.path.dirname(script))
runpy.run_path(script, run_name="__main__")
"""
SCRIPT = medec_to_parquet.__file__


def process(folder, *before, seed):
    arguments = ["--input", str(SAMPLE), "--output", "out", "--seed", str(seed)]
    return subprocess.Popen(
        [sys.executable, *before, SCRIPT, *arguments], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.fixture(scope="module")
def old_and_new(tmp_path_factory):
    """What two runs write that differ in their seed."""
    folders = [tmp_path_factory.mktemp(f"seed{seed}") for seed in (1, 2)]
    runs = [process(folder, seed=seed) for folder, seed in zip(folders, (1, 2), strict=True)]
    assert [run.wait() for run in runs] == [0, 0]
    old, new = (contents(folder / "out") for folder in folders)
    assert sorted(old) == sorted(new) == FILES
    assert not [name for name in FILES if old[name] == new[name]]
    return old, new


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "part", "number", "replaced"),
    [
        ("open", ".tmp/train.parquet", 1, 0),  # written, and about to be hashed
        ("os.rename", ".tmp", 1, 0),
        ("os.rename", ".tmp", 3, 2),
        ("shutil.rmtree", ".tmp", 1, 3),
    ],
)
def test_killed_run_leaves_whole_files_and_a_mixture_is_told(tmp_path, old_and_new, event, part, number, replaced):
    old, new = old_and_new
    (tmp_path / "out").mkdir()
    for name, content in old.items():
        (tmp_path / "out" / name).write_bytes(content)
    assert process(tmp_path, "-c", KILLED, event, part, str(number), seed=2).wait() == -signal.SIGKILL
    found = contents(tmp_path / "out")
    assert sorted(found) == FILES
    assert all(found[name] in (old[name], new[name]) for name in FILES)
    assert sum(found[name] == new[name] for name in FILES) == replaced
    report = verify(*(tmp_path / "out" / name for name in FILES if name.endswith(".parquet")))
    assert report.ok == (replaced in (0, 3))
    if not report.ok:
        assert_found(report, Check.MANIFEST, "val.parquet: the file is not the one that manifest.json", "was killed")
        assert process(tmp_path, seed=2).wait() == 0
        assert contents(tmp_path / "out") == new


def test_splits_of_a_mixture_are_refused(convert, pairs, tmp_path):
    convert("--input", pairs, output="a")
    convert("--input", pairs, "--seed", 2, output="b")
    shutil.copy(tmp_path / "b/val.parquet", tmp_path / "a/val.parquet")
    result = run("sft_to_parquet", "--input", pairs, "--output", tmp_path / "sft", "--splits-of", tmp_path / "a")
    assert_one_sentence(result, "a/val.parquet: the file is not the one that manifest.json beside it describes")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"outputs": {"train.parquet": {}}}', '{"outputs": null}', "\x00"])
def test_a_manifest_of_something_else_says_nothing_about_a_file(tmp_path, text):
    path = write(tmp_path / "train.parquet", good_rows(12))
    (tmp_path / "manifest.json").write_text(text)
    assert verify(path).ok
