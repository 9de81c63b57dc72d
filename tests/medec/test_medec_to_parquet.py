"""The command line: files that come back as written, and errors that are one sentence."""

from __future__ import annotations

import hashlib

import datasets
import pandas as pd
import pyarrow.parquet as pq
import pytest
from medec.builders import assert_one_sentence, manifest_of
from note_files import OFFICIAL, PAIRS, medec_file

from medserl_agentloop.data.conversion import SCHEMA
from medserl_agentloop.data.verify import Check, verify_files
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.types import Category, GameSpec, VanillaAttacker
from medserl_agentloop.testing.tiny import tiny_tokenizer

FILES = ["manifest.json", "train.parquet", "val.parquet"]


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
        assert (Check.PROMPT in report.failures) == (told.value != vanilla_attacker)
    assert Check.PROMPT not in verify_files([path], tokenizer).failures, "the manifest says what they were written with"


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
        (["--rows", "5000"], "can have at most about"),
        (["--rows", "0"], "positive number"),
        (["--val-fraction", "2"], "from 0 to 1"),
        (["--profile", "nonsense"], "no prompt profile 'nonsense'"),
    ],
)
def test_bad_option_ends_with_one_sentence(convert, pairs, arguments, part):
    assert_one_sentence(convert("--input", pairs, *arguments), part)


def test_dry_run_shows_the_summary_and_writes_nothing(convert, pairs, tmp_path):
    result = convert("--input", pairs, "--dry-run")
    assert result.exit_code == 0 and "nothing was written" in result.stdout
    assert not (tmp_path / "out").exists()


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
    assert (manifest["options"]["--rows"], manifest["options"]["--seed"]) == (30, 42)
    assert set(manifest["versions"]) >= {"python", "pyarrow", "medserl-agentloop"}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--max-prompt-tokens", "10"], "needs --tokenizer"),
        (["--max-prompt-tokens", "10", "--tokenizer", "./absent"], "tokenizer ./absent: cannot be loaded"),
        (["--val-input", "other.csv", "--val-fraction", "0.1"], "contradict each other"),
    ],
)
def test_options_that_do_not_go_together_end_with_one_sentence(convert, pairs, arguments, part):
    assert_one_sentence(convert("--input", pairs, *arguments), part)


def test_real_validation_file_loses_no_row(convert, tmp_path):
    assert convert("--input", medec_file(OFFICIAL)).exit_code == 0
    manifest = manifest_of(tmp_path / "out")
    (source,) = manifest["sources"]
    assert (source["records"], source["pairs"], source["twins"]) == (574, 319, 255)
    counts = {entry["reason"]: entry["count"] for entry in manifest["exclusions"]}
    assert [count for reason, count in counts.items() if reason.startswith("twin")] == [255]


def test_real_files_convert_with_exact_counts(convert, tmp_path):
    files = (
        medec_file(OFFICIAL),
        medec_file(PAIRS),
    )
    for path, expected in zip(files, ((570, 60), (2190, 240)), strict=True):
        assert convert("--input", path).exit_code == 0
        written = [pq.read_table(tmp_path / "out" / f"{name}.parquet") for name in ("train", "val")]
        assert tuple(table.num_rows for table in written) == expected
        for row in written[0].to_pylist() + written[1].to_pylist():
            assert GameSpec.from_extra_info(row["extra_info"]).seed_note in row["prompt"][0]["content"]


def profile(folder, template):
    for name in ("assessor/assess", *(f"attacker/{category.value}" for category in Category if category.has_attack)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.jinja").write_text(template)
    return folder


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("Play.", "does not contain its note; write {{ note }} in every template"),
        ("{{ nothing }}", "'nothing' is undefined. It may use {{ note }}"),
    ],
)
def test_profile_that_does_not_show_the_note_is_an_error(convert, pairs, tmp_path, template, part):
    assert_one_sentence(convert("--input", pairs, "--profile", profile(tmp_path / "mine", template)), part)
    assert not (tmp_path / "out").exists()
