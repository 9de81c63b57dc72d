"""The command line: files that come back as written, and errors that are one sentence."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import datasets
import pandas as pd
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from medserl_agentloop.game.types import GameSpec, VanillaAttacker
from medserl_agentloop.medec import conversion
from medserl_agentloop.medec.reader import ReadOptions, read_files
from medserl_agentloop.medec.schema import SCHEMA
from medserl_agentloop.medec.verify import verify_files
from medserl_agentloop.medec.verify_rows import Check
from medserl_agentloop.prompting import load_profile
from medserl_agentloop.testing.tiny import tiny_tokenizer

FILES = ["manifest.json", "train.parquet", "val.parquet"]
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
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == FILES
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


@pytest.mark.parametrize("profile", ["medserl", "classic", "baseline"])
@pytest.mark.parametrize("vanilla_attacker", ["skip", "copy"])
def test_first_prompts_are_those_of_profile_and_vanilla_attacker(convert, pairs, tmp_path, profile, vanilla_attacker):
    options = ("--profile", profile, "--vanilla-attacker", vanilla_attacker)
    assert convert("--input", pairs, *options).exit_code == 0
    path = tmp_path / "out" / "train.parquet"
    for row in pq.read_table(path).to_pylist():
        spec = GameSpec.from_extra_info(row["extra_info"])
        role = spec.category.first_role(VanillaAttacker(vanilla_attacker))
        assert row["prompt"] == load_profile(profile).messages(role, spec.category, spec.seed_note)
    tokenizer = tiny_tokenizer()
    for told in VanillaAttacker:
        report = verify_files([path], tokenizer, profile=profile, vanilla_attacker=told)
        assert (Check.RENDERED in report.failures) == (told.value != vanilla_attacker)


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


def test_dry_run_shows_the_summary_and_writes_nothing(convert, pairs, tmp_path):
    result = convert("--input", pairs, "--dry-run")
    assert result.exit_code == 0 and "nothing was written" in result.stdout
    assert not (tmp_path / "out").exists()


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


def test_manifest_accounts_for_sources_outputs_and_every_exclusion(convert, write_csv, error_row, clean_row, tmp_path):
    rows = [make(n) for i in range(0, 80, 2) for n, make in ((i, error_row), (i + 1, clean_row))]
    path = write_csv(*rows, tail=",,,,,,,,\n")
    assert convert("--input", path, "--rows", 30, "--val-fraction", 0.2).exit_code == 0
    manifest = manifest_of(tmp_path / "out")
    (source,) = manifest["sources"]
    assert source["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (source["records"], source["dropped_empty"], source["pairs"], source["twins"]) == (81, 1, 40, 40)
    for name, output in manifest["outputs"].items():
        content = (tmp_path / "out" / name).read_bytes()
        assert output["sha256"] == hashlib.sha256(content).hexdigest()
    rows_of = {entry["reason"]: entry["rows"] for entry in manifest["exclusions"]}
    twins = next(rows for reason, rows in rows_of.items() if reason.startswith("twin"))
    assert sorted(row["id"] for row in twins) == sorted(f"ms-test-{n}" for n in range(1, 80, 2))
    assert all(entry["count"] == len(entry["rows"]) for entry in manifest["exclusions"])
    assert "--rows 30" in manifest["command"] and manifest["options"]["--seed"] == 42
    assert set(manifest["versions"]) >= {"python", "pyarrow", "medserl-agentloop"}


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


def test_misread_characters_are_put_right_only_if_asked(convert, write_pairs, pair, tmp_path):
    dash = "\u2013".encode().decode("cp1252")
    broken = [pair(n, correct_note=f"Note {n}: 2{dash}3 \u00b5g, 5 m\u00b3.") for n in range(12)]
    path = write_pairs(*broken)
    arguments = ("--input", path, "--mix", "vanilla_benign=1", "--val-fraction", 0)
    for options, expected in (
        ((), f"2{dash}3 \u00b5g, 5 m\u00b3."),
        (("--repair-encoding",), "2\u20133 \u00b5g, 5 m\u00b3."),
    ):
        assert convert(*arguments, *options).exit_code == 0
        notes = [row["clean_note"] for row in pq.read_table(tmp_path / "out/train.parquet")["extra_info"].to_pylist()]
        assert all(note.endswith(expected) for note in notes)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_overlong_prompts_are_an_error_that_names_them(convert, pairs, tokenizer, tmp_path):
    arguments = ("--input", pairs, "--max-prompt-tokens", 100, "--tokenizer", tokenizer)
    assert_one_sentence(
        convert(*arguments), "160 prompts are overlong", "ms-train-0 (vanilla_harmful:", "--on-overlong"
    )
    assert not (tmp_path / "out").exists()


def test_overlong_prompts_are_left_out_and_listed_if_asked(convert, write_pairs, pair, tokenizer, tmp_path):
    long_note = "word " * 4000
    path = write_pairs(pair(0, incorrect_note=long_note), *(pair(n) for n in range(1, 20)))
    arguments = ("--max-prompt-tokens", 8000, "--tokenizer", tokenizer, "--on-overlong", "exclude")
    assert convert("--input", path, "--mix", "vanilla_harmful=1", "--val-fraction", 0, *arguments).exit_code == 0
    assert pq.read_metadata(tmp_path / "out/train.parquet").num_rows == 19
    overlong = [e for e in manifest_of(tmp_path / "out")["exclusions"] if e["reason"] == "overlong prompt"]
    assert [row["id"] for entry in overlong for row in entry["rows"]] == ["ms-train-0"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--max-prompt-tokens", "10"], "needs --tokenizer"),
        (["--max-prompt-tokens", "10", "--tokenizer", "./absent"], "tokenizer ./absent: cannot be loaded"),
        (["--split", "train=0.9,val=0.2"], "add up to 1"),
        (["--split", "train=0.9,val=0.1", "--val-fraction", "0.1"], "contradict each other"),
    ],
)
def test_options_that_do_not_go_together_end_with_one_sentence(convert, pairs, arguments, part):
    assert_one_sentence(convert("--input", pairs, *arguments), part)


def test_split_fractions_are_the_val_fraction(convert, pairs, tmp_path):
    convert("--input", pairs, "--split", "train=0.75,val=0.25", output="a")
    convert("--input", pairs, "--val-fraction", 0.25, output="b")
    assert (tmp_path / "a/val.parquet").read_bytes() == (tmp_path / "b/val.parquet").read_bytes()


@pytest.mark.parametrize("name", ["openrlhf_four_way.jsonl", "openrlhf_prompt_completion.jsonl"])
def test_real_openrlhf_rows_all_get_their_error_type(medec_dir, name):
    join = next(medec_dir.glob("MEDEC*.csv"))
    (report,) = read_files([medec_dir / name], ReadOptions(join=(join,))).reports
    assert (report.records, report.joined, report.not_joined) == (320, 320, ())
    assert "unknown" not in report.error_types


def test_real_validation_file_loses_no_row(convert, medec_dir, tmp_path):
    assert convert("--input", next(medec_dir.glob("MEDEC*.csv"))).exit_code == 0
    manifest = manifest_of(tmp_path / "out")
    (source,) = manifest["sources"]
    assert (source["records"], source["pairs"], source["twins"]) == (574, 319, 255)
    counts = {entry["reason"]: entry["count"] for entry in manifest["exclusions"]}
    assert [count for reason, count in counts.items() if reason.startswith("twin")] == [255]


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
