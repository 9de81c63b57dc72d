"""Evaluation rows: every row of an official set, text untouched, playable as one assessor turn."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from medec.builders import TOKENIZER, run
from note_files import OFFICIAL, SAMPLE, medec_file

from medserl_agentloop.data.rows import FIRST_INDEX, SCHEMA
from medserl_agentloop.data.verify import verify_files
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.types import Category, GameSpec, Role


def written(tmp_path: Path, *inputs: Path, options: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    output = tmp_path / "eval.parquet"
    arguments = [argument for path in inputs for argument in ("--input", path)]
    result = run("medec_eval_to_parquet", *arguments, "--output", output, *options)
    assert result.exit_code == 0, result.output
    assert [path.name for path in tmp_path.glob("*.parquet")] == ["eval.parquet"]
    table = pq.read_table(output)
    assert table.schema.equals(SCHEMA)
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def cells_of(path: Path) -> dict[str, dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return {row["Text ID"]: row for row in csv.DictReader(file) if row["Text ID"]}


def assert_untouched_and_playable(rows: list[dict[str, Any]], cells: dict[str, dict[str, str]]) -> None:
    assert [row["extra_info"]["text_id"] for row in rows] == list(cells)
    for row in rows:
        facts = row["extra_info"]
        source = cells[facts["text_id"]]
        category = Category.VANILLA_HARMFUL if source["Error Flag"] == "1" else Category.VANILLA_BENIGN
        spec = GameSpec.from_extra_info(facts)
        assert spec.category is category and spec.target_label is category.seed_label
        assert spec.seed_note == source["Text"]
        assert facts["error_sentence_id"] == int(source["Error Sentence ID"])
        assert row["prompt"] == load_profile().messages(Role.ASSESSOR, category, source["Text"])
        assert row["reward_model"]["ground_truth"] == category.seed_label.value
        assert row["agent_name"] == "medserl_selfplay"
        assert row["data_source"] == f"{facts['subset']}_eval/{category.value}"


def test_every_row_becomes_one_row_with_its_text_as_it_is(tmp_path: Path, write_csv: Any, error_row: Any) -> None:
    text = "  Two  blanks,\ta tab,\r\nCR LF, {{ braces }}, â€“, <think>, \\1 and a newline at the end\n"
    awkward = error_row(4, Text=text, Error_Sentence_ID="0")
    awkward["Sentences"] = "0 Two blanks.\n1 More."
    rows = written(tmp_path, write_csv(error_row(0), error_row(2), awkward, tail=",,,,,,,,\n"))
    assert [row["extra_info"]["seed_note"] for row in rows][2] == text
    assert rows[0]["extra_info"]["seed_note"].endswith(" ")
    assert rows[2]["extra_info"]["error_sentence_id"] == 0
    assert rows[2]["prompt"][0]["content"].endswith(text)
    assert [row["extra_info"]["index"] for row in rows] == [FIRST_INDEX, FIRST_INDEX + 1, FIRST_INDEX + 2]


def test_twins_are_two_rows_of_one_case(tmp_path: Path, write_csv: Any, error_row: Any, clean_row: Any) -> None:
    rows = written(tmp_path, write_csv(error_row(0), clean_row(1)), options=("--first-index", "7"))
    error, clean = (row["extra_info"] for row in rows)
    assert [(facts["index"], facts["split"]) for facts in (error, clean)] == [(7, "eval"), (8, "eval")]
    assert (error["text_id"], clean["text_id"]) == ("ms-test-0", "ms-test-1")
    assert error["vignette_id"] == clean["vignette_id"] == "ms-test-0"
    assert clean["error_type"] is None and clean["error_note"] is None and clean["error_sentence_id"] == -1
    assert error["clean_note"] is not None and error["error_type"] == "pharmacotherapy"


def test_what_is_wrong_is_said_in_one_sentence(
    tmp_path: Path, write_csv: Any, error_row: Any, write_pairs: Any
) -> None:
    bad = write_csv(error_row(0), error_row(2, Error_Flag="maybe"), name="bad.csv")
    uw = write_csv(error_row(0, Text_ID="uw-test-0"), name="uw.csv")
    good = write_csv(error_row(0), name="good.csv")
    for path, output, part in (
        (bad, "eval.parquet", "bad.csv, row 2"),
        (uw, "eval.parquet", "--i-have-the-uw-agreement"),
        (write_pairs({}), "eval.parquet", "MEDEC's .csv files"),
        (good, "eval.csv", "end in .parquet"),
        (good, "good.csv/eval.parquet", "cannot be written"),
    ):
        result = run("medec_eval_to_parquet", "--input", path, "--output", tmp_path / output)
        assert result.exit_code == 2, result.output
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and part in result.stderr
    assert not list(tmp_path.glob("*.parquet"))
    agreed = run(
        "medec_eval_to_parquet", "--input", uw, "--output", tmp_path / "uw.parquet", "--i-have-the-uw-agreement"
    )
    assert agreed.exit_code == 0


def test_sample_rows_pass_verification(tmp_path: Path) -> None:
    rows = written(tmp_path, SAMPLE)
    assert_untouched_and_playable(rows, cells_of(SAMPLE))
    report = verify_files([tmp_path / "eval.parquet"], TOKENIZER)
    assert report.ok, report.problems


def test_official_validation_set_is_complete(tmp_path: Path) -> None:
    rows = written(tmp_path, medec_file(OFFICIAL))
    assert len(rows) == 574
    assert Counter(row["data_source"] for row in rows) == {
        "medec_ms_eval/vanilla_harmful": 319,
        "medec_ms_eval/vanilla_benign": 255,
    }
    assert_untouched_and_playable(rows, cells_of(medec_file(OFFICIAL)))
    report = verify_files([tmp_path / "eval.parquet"], TOKENIZER)
    assert report.ok, report.problems
