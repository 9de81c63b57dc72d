"""verify_parquet, whole files and several: columns, indices, splits, lengths, profiles."""

from __future__ import annotations

import copy
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from medec.builders import (
    assert_found,
    good_rows,
    verify,
    write,
)

from medserl_agentloop.data.conversion import SCHEMA
from medserl_agentloop.data.verify import Check


def test_good_files_pass(tmp_path: Path) -> None:
    report = verify(
        write(tmp_path / "train.parquet", good_rows()), write(tmp_path / "val.parquet", good_rows(12, 60, "val"))
    )
    assert report.ok and not report.problems
    assert [(file.file, file.rows, dict(file.labels)) for file in report.files] == [
        ("train.parquet", 60, {"harmful": 30, "safe": 30}),
        ("val.parquet", 12, {"harmful": 6, "safe": 6}),
    ]
    assert all(file.longest_prompt > 100 for file in report.files)


def test_missing_and_extra_columns(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(good_rows(12), schema=SCHEMA)
    table = table.drop_columns(["agent_name"]).append_column("index", pa.array(range(12)))
    pq.write_table(table, tmp_path / "train.parquet")
    report = verify(tmp_path / "train.parquet")
    assert_found(report, Check.SCHEMA, "train.parquet: column 'agent_name' is missing")
    assert_found(report, Check.SCHEMA, "train.parquet: column 'index' is int64, and it should be missing")


def test_index_that_two_files_use(tmp_path: Path) -> None:
    train, val = good_rows(12), good_rows(12, 12, "val")
    val[5]["extra_info"]["index"] = train[2]["extra_info"]["index"]
    report = verify(write(tmp_path / "train.parquet", train), write(tmp_path / "val.parquet", val))
    assert_found(report, Check.INDEX, "val.parquet, row 5: index", "already that of train.parquet, row 2")


def test_case_in_two_splits(tmp_path: Path) -> None:
    train, val = good_rows(12), good_rows(12, 12, "val")
    val[4]["extra_info"]["vignette_id"] = train[1]["extra_info"]["vignette_id"]
    report = verify(write(tmp_path / "train.parquet", train), write(tmp_path / "val.parquet", val))
    assert_found(report, Check.SPLITS, "val.parquet, row 4: vignette", "'train' at train.parquet, row 1", "split by")


def test_note_in_two_splits_under_two_ids(tmp_path: Path) -> None:
    train, val = good_rows(12), good_rows(12, 12, "val")
    twin = copy.deepcopy(train[3])
    twin["extra_info"] |= {"index": 99, "split": "val", "vignette_id": "ms-val-99", "text_id": "ms-val-99"}
    report = verify(write(tmp_path / "train.parquet", train), write(tmp_path / "val.parquet", [*val, twin]))
    assert_found(report, Check.SPLITS, "val.parquet, row 12: its note", "'train' at train.parquet, row 3")


def test_prompt_that_is_too_long(tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet", good_rows(12))
    longest = verify(path).files[0].longest_prompt
    assert verify(path, max_prompt_tokens=longest).ok
    report = verify(path, max_prompt_tokens=longest - 1)
    assert_found(report, Check.LENGTH, f"the prompt has {longest} tokens", f"max_prompt_length to at least {longest}")


def test_other_profile_than_the_files(tmp_path: Path) -> None:
    for role, names in (("attacker", ("adversarial_harmful", "adversarial_benign")), ("assessor", ("assess",))):
        (tmp_path / "mine" / role).mkdir(parents=True)
        for name in names:
            (tmp_path / "mine" / role / f"{name}.jinja").write_text("Play: {{ note }}")
    report = verify(write(tmp_path / "train.parquet", good_rows(12)), profile=str(tmp_path / "mine"))
    assert report.failures[Check.PROMPT] == 12
    assert_found(report, Check.PROMPT, "row 0", "that profile 'mine' renders", "--profile")


def test_many_problems_are_counted_and_a_few_shown(tmp_path: Path) -> None:
    rows = good_rows(12)
    for row in rows:
        row["agent_name"] = "other"
    report = verify(write(tmp_path / "train.parquet", rows))
    assert report.failures[Check.AGENT] == 12
    assert sum(problem.check is Check.AGENT for problem in report.problems) == 3
