"""``medserl data convert``: files that come back as written, what is kept out of them, errors that
are one sentence.
"""

import contextlib
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import medec_to_parquet
import pyarrow.parquet as pq
import pytest
from medec.builders import (
    assert_found,
    assert_one_sentence,
    clean_row,
    error_row,
    good_rows,
    manifest_of,
    pair,
    read_one,
    run,
    write,
)
from note_files import SAMPLE

from medserl_agentloop.data.cases import EditTag
from medserl_agentloop.data.verify import Check, verify_files
from medserl_agentloop.paths import PACKAGE, sha256_of

FILES = ["manifest.json", "train.parquet", "val.parquet"]


def ids_in(path: Path) -> set[str]:
    return {facts["vignette_id"] for facts in pq.read_table(path)["extra_info"].to_pylist()}


# --- the files ---


def test_manifest_and_summary_account_for_sources_outputs_and_exclusions(
    convert, write_csv, tmp_path
):
    rows = [make(n) for i in range(0, 80, 2) for n, make in ((i, error_row), (i + 1, clean_row))]
    path = write_csv(*rows, tail=",,,,,,,,\r\n , ,,,,,,,\r\n\r\n")
    result = convert("--input", path, "--val-fraction", 0.2)
    assert "records 83, dropped empty 3, pairs 40, twins 40" in result.stdout
    assert "left out: twin whose own text" in result.stdout
    assert "train.parquet: 60 rows, presented notes 30 harmful, 30 safe" in result.stdout
    manifest = manifest_of(tmp_path / "out")
    (source,) = manifest["sources"]
    counts = {"records": 83, "dropped_empty": 3, "pairs": 40, "twins": 40}
    assert source.items() >= (counts | {"sha256": sha256_of(path)}).items()
    for name, output in manifest["outputs"].items():
        assert output["sha256"] == sha256_of(tmp_path / "out" / name)
    twins = next(ids for why, ids in manifest["exclusions"].items() if why.startswith("twin"))
    assert sorted(twins) == sorted([f"ms-test-{n}", None] for n in range(1, 80, 2))
    assert (manifest["options"]["--input"], manifest["options"]["--seed"]) == ([str(path)], 42)
    assert set(manifest["versions"]) >= {"python", "pyarrow", "medserl-agentloop"}


# --- what is kept out ---


def test_cases_given_for_validation_all_go_there_and_out_of_training(
    convert, pairs, write_pairs, tmp_path
):
    shared = pair(3, note_id="ms-val-1003")  # the same notes as ms-train-3
    other = write_pairs(
        shared, *(pair(n, note_id=f"ms-val-{n}") for n in range(100, 110)), name="val.jsonl"
    )
    assert convert("--input", pairs, "--val-input", other).exit_code == 0
    train, val = (ids_in(tmp_path / f"out/{name}.parquet") for name in ("train", "val"))
    assert val and all(text_id.startswith("ms-val") for text_id in val)
    assert len(train) == 39 and "ms-train-3" not in train
    exclusions = manifest_of(tmp_path / "out")["exclusions"]
    (left_out,) = (ids for why, ids in exclusions.items() if "given for validation" in why)
    assert left_out == [["ms-train-3", "ms-val-1003"]]


def test_near_duplicates_of_a_file_are_left_out_and_name_their_match(
    convert, pairs, write_pairs, tmp_path
):
    changed = pair(7, note_id="ms-eval-1")
    for key in ("incorrect_note", "correct_note"):
        changed[key] = changed[key].upper().replace("PNEUMONIA", "TUBERCULOSIS")
    changed |= {"error_sentence": None, "corrected_sentence": None}
    near = write_pairs(changed, name="eval.jsonl")
    assert convert("--input", pairs, "--exclude-near-duplicates-of", near).exit_code == 0
    exclusions = manifest_of(tmp_path / "out")["exclusions"]
    near = dict(exclusions["near-duplicate of a case to avoid"])
    assert "ms-train-7" in near
    assert all(detail.startswith("ms-eval-1 (4-gram Jaccard") for detail in near.values())


# --- what is refused ---


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--mix", "vanilla=1"], "'vanilla=1' is not a category with its share"),
        (["--mix", "as-given"], "--mix as-given keeps every row of an input that names its"),
    ],
)
def test_bad_options_end_with_one_sentence(convert, pairs, arguments, part):
    assert_one_sentence(convert("--input", pairs, *arguments), part)
    assert_one_sentence(
        convert("--input", pairs, output=pairs.name), "cannot be written (Not a directory)"
    )


def test_own_notes_example_converts_and_the_pair_of_the_page_is_read(
    convert, write_pairs, tmp_path
):
    assert convert("--input", SAMPLE.with_name("own_notes.csv")).exit_code == 0
    made = (tmp_path / "out/train.parquet", tmp_path / "out/val.parquet")
    assert run("verify_parquet", *made).exit_code == 0
    page = (PACKAGE.parent / "docs" / "data.md").read_text(encoding="utf-8")
    example = json.loads(page.partition("```json")[2].partition("```")[0])
    assert read_one(write_pairs(example)).edit_tag is EditTag.LOCAL


def test_rows_that_contradict_themselves_are_named(convert, write_pairs, tmp_path):
    wrong = [pair(n, error_sentence="This is nowhere.") for n in range(6)]
    result = convert("--input", write_pairs(*wrong, *(pair(n) for n in range(6, 40))))
    why = "left out: pairs.jsonl, the error sentence is not in the error note (6)"
    assert f"{why}: ms-train-0, ms-train-1, ms-train-2, ..." in result.stdout
    assert len(manifest_of(tmp_path / "out")["sources"][0]["contradictions"]) == 6


def test_uw_rows_are_known_by_marks(convert, write_pairs, write_csv, tmp_path):
    """The ids say MEDEC-MS; the notes have MEDEC-UW's de-identification marks."""
    marked = [
        pair(n, incorrect_note=f"<NAME/> is <AGE/>. {pair(n)['incorrect_note']}")
        for n in range(40, 45)
    ]
    marked_note = f"Mr. <NAME/> fell. {error_row(0)['Text']}"
    csv = write_csv(error_row(0) | {"Text": marked_note})
    path = write_pairs(*(pair(n) for n in range(40)), *marked)
    inputs = ("--input", path, "--input", csv)
    assert_one_sentence(convert(*inputs), "6 MEDEC-UW rows", "--i-have-the-uw-agreement")
    assert convert(*inputs, "--i-have-the-uw-agreement").exit_code == 0
    result = convert("--input", csv, output="eval.parquet")
    assert_one_sentence(result, "1 MEDEC-UW rows")


# --- a run that is killed leaves the old files or the new ones, never half of one ---


# A real process, killed by itself just before the given rename: no exit handler runs.
KILLED = """
import os, runpy, signal, sys

number, script = int(sys.argv[1]), sys.argv[2]

def hook(name, arguments):
    global number
    if name == "os.rename" and ".tmp" in str(arguments[0]):
        number -= 1
        if number == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(hook)
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(script))
runpy.run_path(script, run_name="__main__")
"""


def written(folder, seed):
    """Convert the sample into ``folder``, and return its files."""
    with contextlib.chdir(folder):
        arguments = ("--input", SAMPLE, "--output", "out", "--seed", seed)
        assert run("medec_to_parquet", *arguments).exit_code == 0
    return {name: (folder / "out" / name).read_bytes() for name in FILES}


@pytest.mark.slow
@pytest.mark.parametrize(("number", "replaced"), [(1, 0), (3, 2)])
def test_killed_run_leaves_whole_files_and_names_a_mixture(tmp_path, number, replaced):
    (tmp_path / "other").mkdir()
    new, old = written(tmp_path / "other", seed=2), written(tmp_path, seed=1)
    options = ["--input", SAMPLE, "--output", "out", "--seed", "2"]
    command = [sys.executable, "-c", KILLED, str(number), medec_to_parquet.__file__, *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    found = {name: (tmp_path / "out" / name).read_bytes() for name in FILES}
    assert all(found[name] in (old[name], new[name]) for name in FILES)
    assert sum(found[name] == new[name] for name in FILES) == replaced
    report = verify_files([tmp_path / "out" / name for name in FILES[1:]])
    assert report.ok == (replaced == 0)
    if not report.ok:
        assert_found(report, Check.MANIFEST, "val.parquet: the file is not the one", "was killed")
    assert written(tmp_path, seed=2) == new


def test_conversations_of_a_mixture_are_refused(convert, pairs, tmp_path):
    convert("--input", pairs, output="a")
    convert("--input", pairs, "--seed", 2, output="b")
    shutil.copy(tmp_path / "b/val.parquet", tmp_path / "a/val.parquet")
    result = run("sft_to_parquet", "--input", tmp_path / "a", "--output", tmp_path / "sft")
    assert_one_sentence(result, "a/val.parquet: the file is not the one that manifest.json")


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"outputs": {"train.parquet": {}}}', '{"outputs": null}', "\x00"]
)
def test_a_manifest_of_something_else_says_nothing_about_a_file(tmp_path, text):
    path = write(tmp_path / "train.parquet", good_rows(12))
    (tmp_path / "manifest.json").write_text(text)
    assert verify_files([path]).ok
