"""The command line: files that come back as written, and errors that are one sentence."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import datasets
import pandas as pd
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from medserl_agentloop.game.types import GameSpec
from medserl_agentloop.medec.schema import SCHEMA

SCRIPT = Path(__file__).resolve().parents[2] / "data_prep" / "medec_to_parquet.py"


@pytest.fixture(scope="module")
def command():
    spec = importlib.util.spec_from_file_location("medec_to_parquet", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def convert(command, tmp_path):
    def run(*arguments, output="out"):
        return CliRunner().invoke(command.app, [*map(str, arguments), "--output", str(tmp_path / output)])

    return run


@pytest.fixture
def pairs(write_pairs, pair):
    return write_pairs(*(pair(n) for n in range(40)))


def assert_one_sentence(result, *parts):
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in result.stderr


def test_files_have_the_declared_schema_and_no_temporary_file_stays(convert, pairs, tmp_path):
    assert convert("--input", pairs).exit_code == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["train.parquet", "val.parquet"]
    for name in ("train", "val"):
        assert pq.read_schema(tmp_path / f"out/{name}.parquet").equals(SCHEMA)


def test_prompt_comes_back_as_a_native_list_of_messages(convert, pairs, tmp_path):
    convert("--input", pairs)
    path = str(tmp_path / "out" / "train.parquet")
    loaded = datasets.load_dataset("parquet", data_files=path, split="train", cache_dir=str(tmp_path / "cache"))
    assert isinstance(loaded[0]["prompt"], list)
    assert [sorted(message) for message in loaded[0]["prompt"]] == [["content", "role"]]
    frame = pd.read_parquet(path)
    assert list(frame["prompt"].iloc[0]) == loaded[0]["prompt"]
    for row in loaded:
        assert GameSpec.from_extra_info(row["extra_info"]).target_label.value == (row["reward_model"]["ground_truth"])


def test_same_input_and_seed_give_identical_bytes(convert, pairs, tmp_path):
    convert("--input", pairs, output="a")
    convert("--input", pairs, output="b")
    convert("--input", pairs, "--seed", 1, output="c")
    files = [(tmp_path / name / "train.parquet").read_bytes() for name in "abc"]
    assert files[0] == files[1] != files[2]


def test_files_of_two_inputs_can_be_concatenated(convert, pairs, write_csv, clean_row, tmp_path):
    clean = write_csv(*(clean_row(n) for n in range(0, 40, 2)))
    convert("--input", pairs, output="a")
    result = convert("--input", clean, "--mix", "vanilla_benign=1", output="b")
    assert result.exit_code == 0
    paths = [str(tmp_path / name / "train.parquet") for name in "ab"]
    loaded = datasets.load_dataset("parquet", data_files=paths, cache_dir=str(tmp_path / "cache"))
    assert len(loaded["train"]) == sum(pq.read_metadata(p).num_rows for p in paths)


def test_summary_counts_rows_and_says_what_was_left_out(convert, write_csv, error_row, clean_row):
    rows = [make(n) for i in range(0, 80, 2) for n, make in ((i, error_row), (i + 1, clean_row))]
    result = convert("--input", write_csv(*rows, tail=",,,,,,,,\n"), "--rows", 30, "--val-fraction", 0.2)
    words = " ".join(result.stdout.split())
    assert "records read │ 81" in words and "twin │ 40" in words
    assert "every field is empty │ 1" in words
    assert "without any row" in words
    assert "train.parquet: 24 rows, presented notes 12 harmful, 12 safe" in words


def test_several_inputs_are_joined(convert, pairs, write_pairs, pair, tmp_path):
    more = write_pairs(*(pair(n, note_id=f"toy-train-{n}") for n in range(50, 60)), name="more.jsonl")
    convert("--input", pairs, "--input", more)
    sources = set(pd.read_parquet(tmp_path / "out" / "train.parquet")["data_source"])
    assert {"medec_ms/vanilla_benign", "toy/vanilla_benign"} <= sources


def test_uw_rows_are_refused_without_the_agreement(convert, write_pairs, pair, tmp_path):
    uw = write_pairs(*(pair(n, note_id=f"uw-train-{n}") for n in range(40)))
    assert_one_sentence(convert("--input", uw), "40 MEDEC-UW rows", "--i-have-the-uw-agreement")
    assert not (tmp_path / "out").exists()
    assert convert("--input", uw, "--i-have-the-uw-agreement").exit_code == 0


def test_bad_row_ends_with_one_sentence(convert, write_csv, error_row):
    path = write_csv(error_row(0), error_row(2, Error_Flag="maybe"))
    assert_one_sentence(convert("--input", path), "notes.csv, row 2", "'Error Flag'", "'maybe'", "write 1")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--mix", "vanilla=1"], "'vanilla' is not a category"),
        (["--rows", "5000"], "need"),
        (["--rows", "0"], "positive number"),
        (["--val-fraction", "2"], "from 0 to 1"),
        (["--profile", "nonsense"], "no prompt profile 'nonsense'"),
    ],
)
def test_bad_option_ends_with_one_sentence(convert, pairs, arguments, part):
    assert_one_sentence(convert("--input", pairs, *arguments), part)


def test_output_that_is_a_file_ends_with_one_sentence(convert, pairs, tmp_path):
    (tmp_path / "taken").write_text("mine")
    assert_one_sentence(convert("--input", pairs, output="taken"), "cannot be written")
    assert (tmp_path / "taken").read_text() == "mine"


def test_failed_write_leaves_the_old_files_alone(command, convert, pairs, tmp_path, monkeypatch):
    convert("--input", pairs)
    before = (tmp_path / "out" / "train.parquet").read_bytes()

    def full_disk(table, path):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command.pq, "write_table", full_disk)
    assert_one_sentence(convert("--input", pairs, "--seed", 2), "No space left")
    assert (tmp_path / "out" / "train.parquet").read_bytes() == before
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_missing_package_says_how_to_install_it():
    code = (
        "import runpy, sys; sys.modules['medserl_agentloop'] = None; "
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install -e ." in done.stderr and "Traceback" not in done.stderr


def test_real_files_convert_with_exact_counts(convert, medec_dir, tmp_path):
    files = (
        medec_dir / "MEDEC-MS-ValidationSet-with-GroundTruth-and-ErrorType.csv",
        medec_dir / "medec_ms_train_pairs.jsonl",
    )
    for path, expected in zip(files, ((570, 60), (2190, 240)), strict=True):
        assert convert("--input", path).exit_code == 0
        written = [pq.read_table(tmp_path / "out" / f"{name}.parquet") for name in ("train", "val")]
        assert tuple(table.num_rows for table in written) == expected
        for row in written[0].to_pylist() + written[1].to_pylist():
            assert GameSpec.from_extra_info(row["extra_info"]).seed_note in row["prompt"][0]["content"]
