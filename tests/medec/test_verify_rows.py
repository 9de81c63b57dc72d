"""verify_parquet, one row: every kind of damage is named with file, row and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from medec.builders import (
    assert_found,
    good_row,
    good_rows,
    verify,
    write,
)

from medserl_agentloop.data.conversion import SCHEMA
from medserl_agentloop.data.sft import rows_for_self_play
from medserl_agentloop.data.verify import Check
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.types import Category, GameSpec, Role


def replaced(path: Path, column: str, values: pa.Array) -> Path:
    """The good rows with one column of another type."""
    table = pa.Table.from_pylist(good_rows(), schema=SCHEMA)
    pq.write_table(table.set_column(SCHEMA.get_field_index(column), column, values), path)
    return path


# The four bugs that once let runs look alive.


def test_historical_prompt_as_json_string(tmp_path: Path) -> None:
    strings = pa.array([json.dumps(row["prompt"]) for row in good_rows()])
    report = verify(replaced(tmp_path / "train.parquet", "prompt", strings))
    assert report.failures[Check.PROMPT] == 60
    assert_found(report, Check.PROMPT, "row 0: the prompt is '[{", "not the list of messages", "medec_to_parquet.py")
    assert_found(report, Check.SCHEMA, "train.parquet: column 'prompt' is string, and it should be list<")


def test_historical_placeholder_prompt(tmp_path: Path) -> None:
    rows = good_rows()
    rows[7]["prompt"] = [{"role": "user", "content": "PLACEHOLDER: built at run time"}]
    report = verify(write(tmp_path / "train.parquet", rows))
    assert report.failures[Check.PROMPT] == 1
    assert_found(report, Check.PROMPT, "train.parquet, row 7: the prompt is [{'role': 'user', 'content': 'PLACEHOLD")


def test_historical_labels_replaced_by_note_ids(tmp_path: Path) -> None:
    rows = good_rows()
    for row in rows:
        row["reward_model"]["ground_truth"] = row["extra_info"]["text_id"]
    report = verify(write(tmp_path / "train.parquet", rows))
    assert report.failures[Check.LABELS] == 60
    assert_found(report, Check.LABELS, "train.parquet, row 0", "ground_truth is 'ms-train-", "'safe'")


def test_historical_constant_column(tmp_path: Path) -> None:
    rows = [good_row(n, category="vanilla_harmful") for n in range(40)]
    report = verify(write(tmp_path / "train.parquet", rows))
    for name in ("ground_truth", "category"):
        assert_found(report, Check.CONSTANT, f"train.parquet: {name} is the same in all 40 rows", "--mix")
    assert report.warnings[Check.BALANCE] == 1


def test_constant_reward_in_place_of_the_label(tmp_path: Path) -> None:
    rows = good_rows()
    for row in rows:
        row["reward_model"]["ground_truth"] = "0.5"
    report = verify(write(tmp_path / "train.parquet", rows))
    assert_found(report, Check.LABELS, "row 0", "ground_truth is '0.5'")
    assert_found(report, Check.CONSTANT, "ground_truth is the same in all 60 rows")


@pytest.mark.parametrize("value", [1, 0.5, "{}", [1], ["a"], None])
def test_extra_info_that_is_no_struct(tmp_path: Path, value: Any) -> None:
    path = replaced(tmp_path / "train.parquet", "extra_info", pa.array([value] * 60))
    with pytest.raises(ValueError, match=r"train\.parquet: column 'extra_info' is .*, not a struct with the facts"):
        verify(path)


@pytest.mark.parametrize("value", [1, "{}", ["a"]])
def test_game_whose_facts_are_no_struct(tmp_path: Path, value: Any) -> None:
    path = replaced(tmp_path / "train.parquet", "extra_info", pa.array([value] * 60))
    with pytest.raises(ValueError, match=r"extra_info is of type \w+, not the facts of a game"):
        GameSpec.from_extra_info(value)
    with pytest.raises(ValueError, match=r"train\.parquet: not a file of rows for self-play"):
        rows_for_self_play(path, [])


def test_labels_of_another_type(tmp_path: Path) -> None:
    for number, values in enumerate(([0.5] * 60, ["harmful", "safe"] * 30, [{"ground_truth": 1}] * 60)):
        report = verify(replaced(tmp_path / f"train{number}.parquet", "reward_model", pa.array(values)))
        assert_found(report, Check.LABELS, f"train{number}.parquet, row 0: reward_model.ground_truth is")
        assert_found(report, Check.SCHEMA, "column 'reward_model' is ")


# One value of one row.

NOTE = good_row(3)["extra_info"]["seed_note"]
PROMPT = good_row(3)["prompt"]


def message(role: str, content: str | None) -> list[dict[str, Any]]:
    return [{"role": role, "content": content}]


@pytest.mark.parametrize(
    ("key", "value", "check", "part"),
    [
        ("agent_name", "single_turn_agent", Check.AGENT, "agent_name is 'single_turn_agent', not 'medserl_selfplay'"),
        ("agent_name", None, Check.SCHEMA, "agent_name has no value"),
        ("prompt", [], Check.PROMPT, "the prompt is [], not the list of messages that profile 'medserl' renders"),
        ("prompt", message("assistant", NOTE), Check.PROMPT, "the prompt is [{'role': 'assistant'"),
        ("prompt", message("user", None), Check.PROMPT, "the prompt is [{'role': 'user', 'content': None}]"),
        ("prompt", message("user", "Read this:\n{{ note }}"), Check.PROMPT, "not the list of messages"),
        ("prompt", message("user", f"Is this right? {NOTE}"), Check.PROMPT, "not the list of messages"),
        ("prompt", good_row(4)["prompt"], Check.PROMPT, "the row's seed note"),
        ("prompt", message("user", f"ms-train-3: {NOTE}"), Check.PROMPT, "not the list of messages"),
        (
            "reward_model",
            {"style": "rule", "ground_truth": "harmful"},
            Check.LABELS,
            "extra_info.target_label is 'safe'",
        ),
        ("reward_model", {"style": "rule", "ground_truth": None}, Check.LABELS, "ground_truth is None"),
        ("reward_model", None, Check.SCHEMA, "reward_model has no value"),
        ("extra_info.target_label", "maybe", Check.FACTS, "is 'maybe': Input should be 'safe' or 'harmful'"),
        ("extra_info.category", None, Check.SCHEMA, "extra_info.category has no value"),
        ("extra_info.category", "vanilla", Check.FACTS, "'category'] is 'vanilla'"),
        ("extra_info.seed_note", None, Check.SCHEMA, "extra_info.seed_note has no value"),
        ("extra_info.clean_note", "Another note.", Check.FACTS, "seed_note is not the row's clean_note"),
        ("extra_info.index", None, Check.SCHEMA, "extra_info.index has no value"),
        ("extra_info", None, Check.SCHEMA, "extra_info has no value"),
    ],
)
def test_damaged_value_is_found(tmp_path: Path, key: str, value: Any, check: Check, part: str) -> None:
    rows = good_rows(12)
    number = next(i for i, row in enumerate(rows) if row["extra_info"]["index"] == 3)
    target = rows[number]
    *parents, last = key.split(".")
    for parent in parents:
        target = target[parent]
    target[last] = value
    report = verify(write(tmp_path / "train.parquet", rows))
    assert_found(report, check, f"train.parquet, row {number}:", part, "data_prep/medec_to_parquet.py")
    assert len({problem.row for problem in report.problems}) == 1


def test_wrong_label_of_a_note_that_is_presented_as_it_is(tmp_path: Path) -> None:
    rows = good_rows(12)
    row = next(r for r in rows if r["extra_info"]["category"] == "vanilla_benign")
    row["reward_model"]["ground_truth"] = row["extra_info"]["target_label"] = "harmful"
    report = verify(write(tmp_path / "train.parquet", rows))
    assert_found(report, Check.LABELS, "a vanilla_benign row presents its seed note as it is")


def test_braces_of_a_note_are_no_template(tmp_path: Path) -> None:
    rows = good_rows(12)
    for row in rows:
        facts = row["extra_info"]
        for key in ("seed_note", "error_note", "clean_note"):
            facts[key] += " Formula {{ x }} {% y %} \\1 <think>."
        category = Category(facts["category"])
        role = Role.ATTACKER if category.has_attack else Role.ASSESSOR
        row["prompt"] = load_profile().messages(role, category, facts["seed_note"])
    assert verify(write(tmp_path / "train.parquet", rows)).ok


def test_prompt_of_messages_with_other_keys(tmp_path: Path) -> None:
    prompts = pa.array([[{"role": "user", "text": "Play."}]] * 60)
    report = verify(replaced(tmp_path / "train.parquet", "prompt", prompts))
    assert_found(report, Check.PROMPT, "row 0: the prompt is [{", "not the list of messages")
