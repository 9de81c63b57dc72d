"""``medserl data verify``: every kind of damage is named with file, row and remedy; what was not
checked says so.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from medec.builders import assert_found, good_rows, run, write
from note_files import OFFICIAL, PAIRS, medec_file

from medserl_agentloop.data.reader import read_files
from medserl_agentloop.data.rows import DEFAULT_MIX, SCHEMA, RowPlan, build_rows
from medserl_agentloop.data.verify import Check, find_leaks, verify_files
from medserl_agentloop.games.medical.case import Category, GameSpec, Label
from medserl_agentloop.paths import sha256_of

# --- columns and values ---


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("prompt", [json.dumps(row["prompt"]) for row in good_rows()]),
        ("reward_model", [0.5] * 60),
        *(("extra_info", [value] * 60) for value in (1, "{}", ["a"])),
        ("index", range(60)),  # one column more
    ],
)
def test_a_column_of_another_type_is_named(tmp_path: Path, column: str, values: list[Any]) -> None:
    table = pa.Table.from_pylist(good_rows(), schema=SCHEMA)
    others = [name for name in SCHEMA.names if name != column]
    pq.write_table(
        table.select(others).append_column(column, pa.array(values)), tmp_path / "train.parquet"
    )
    report = verify_files([tmp_path / "train.parquet"])
    assert_found(report, Check.ROWS, f"train.parquet: column {column!r} is ")


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("agent_name", "single_turn_agent", "agent_name is 'single_turn_agent'"),
        ("agent_name", None, "agent_name has no value"),
        ("extra_info.target_label", "maybe", "is 'maybe': Input should be 'safe' or 'harmful'"),
        ("extra_info.category", None, "extra_info.category has no value"),
        ("extra_info.target_label", "harmful", "a vanilla_benign game shows its note unchanged"),
        ("extra_info.clean_note", None, "extra_info['clean_note'] is None"),
        ("extra_info", None, "extra_info"),
        ("prompt", [{"role": "user", "content": "Play."}], "prompt is not the row's"),
    ],
)
def test_damaged_value_is_found(tmp_path: Path, key: str, value: Any, part: str) -> None:
    rows = good_rows(12)
    number = next(i for i, row in enumerate(rows) if row["extra_info"]["index"] == 3)
    target = rows[number]
    *parents, last = key.split(".")
    for parent in parents:
        target = target[parent]
    target[last] = value
    report = verify_files([write(tmp_path / "train.parquet", rows)])
    where = f"train.parquet, row {number}:"
    assert_found(report, Check.ROWS, where, part, "rite the file again with")
    assert len(report.problems) == 1


# --- several rows and files ---


def test_index_case_and_note_that_two_files_share(tmp_path: Path) -> None:
    train, val = good_rows(12), good_rows(12, 12, "val")
    val[5]["extra_info"]["index"] = train[2]["extra_info"]["index"]
    val[4]["extra_info"]["vignette_id"] = train[1]["extra_info"]["vignette_id"]
    twin = copy.deepcopy(train[3])
    twin["extra_info"] |= {"index": 99, "split": "val", "vignette_id": "ms-val-99"}
    report = verify_files(
        [write(tmp_path / "train.parquet", train), write(tmp_path / "val.parquet", [*val, twin])]
    )
    assert_found(report, Check.INDEX, "val.parquet, row 5: index", "train.parquet, row 2")
    assert_found(report, Check.SPLITS, "row 4: case", "'train' at ", "train.parquet, row 1")
    assert_found(report, Check.SPLITS, "row 12: its note", "train.parquet, row 3")


# --- leaks ---


def test_white_space_that_tells_the_label(tmp_path: Path) -> None:
    rows = good_rows(90)
    for row in rows:
        of_error = row["prompt"][0]["content"] == row["extra_info"]["error_note"]
        row["extra_info"]["error_note"] += " "
        row["prompt"][0]["content"] += " " * of_error
    report = verify_files([write(tmp_path / "train.parquet", rows)])
    told = "train.parquet: white space after the note tells the target_label"
    assert_found(report, Check.LEAKS, told, "strip the notes")
    for row in rows:  # official text stays as published, and nothing is trained on it
        row["data_source"] = row["data_source"].replace("medec_ms", "medec_ms_eval")
    report = verify_files([write(tmp_path / "eval.parquet", rows)])
    assert report.ok and report.problems[0].check is Check.LEAKS


def test_white_space_that_tells_only_which_note_the_attacker_got() -> None:
    kinds = (Category.VANILLA_HARMFUL, Category.ADVERSARIAL_BENIGN)  # each ends in a wrong note
    specs = [
        GameSpec(kind, Label.HARMFUL, f"He has gout {n}.{' ' * (kind is kinds[0])}")
        for n in range(60)
        for kind in kinds
    ]
    [leak] = find_leaks(specs)
    assert leak.startswith("white space after the note tells the seed_label")


def test_order_that_tells_the_label(tmp_path: Path) -> None:
    rows = sorted(good_rows(), key=lambda row: row["extra_info"]["category"] != "vanilla_benign")
    report = verify_files([write(tmp_path / "train.parquet", rows)])
    assert_found(report, Check.LEAKS, "place in the file tells the target_label", "shuffle")


@pytest.mark.parametrize("games", ["vanilla", "adversarial decoy", "vanilla adversarial decoy"])
def test_nothing_tells_the_label_in_converted_rows(games: str) -> None:
    """In games that present a note as it is and in those that start an attack from it."""
    cases = read_files([medec_file(name) for name in (OFFICIAL, PAIRS)]).cases
    whole = f"{DEFAULT_MIX},decoy_benign=1"
    mix = "vanilla_harmful=1,vanilla_benign=1" if games == "vanilla" else whole
    rows = build_rows(cases, RowPlan(mix=mix, val_fraction=0.0)).train
    specs = [GameSpec.from_extra_info(row["extra_info"]) for row in rows]
    kept = [spec for spec in specs if spec.category.value.split("_")[0] in games.split()]
    assert {spec.category.seed_label for spec in kept} == set(Label)
    assert list(find_leaks(kept)) == []


# --- the command ---


def test_verify_reports_checks_that_hold_and_a_file_of_another_manifest(tmp_path: Path) -> None:
    train = write(tmp_path / "train.parquet", good_rows())
    result = run("verify_parquet", train)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("holds") == len(Check)
    val = write(tmp_path / "val.parquet", good_rows(12, 60, "val"))
    outputs = {path.name: {"sha256": sha256_of(path)} for path in (train, val)}
    (tmp_path / "manifest.json").write_text(json.dumps({"outputs": outputs}))
    report = verify_files([train, val])
    assert report.files[str(val)] == {"rows": 12, "harmful": 6, "safe": 6} and not report.problems
    val.write_bytes(train.read_bytes())
    assert_found(verify_files([val]), Check.MANIFEST, "val.parquet: the file is not the one that")


def test_exit_code_is_1_and_the_first_rows_are_named_for_bad_files(tmp_path: Path) -> None:
    rows = good_rows()
    for row in rows[9:19]:
        row["agent_name"] = "other"
    result = run("verify_parquet", write(tmp_path / "train.parquet", rows))
    assert result.exit_code == 1
    assert "train.parquet, row 9: agent_name is 'other'" in result.stdout
    assert result.stdout.count("train.parquet, row") == 3
    assert "and 7 more of this kind" in result.stdout and "failed: 10" in result.stdout
