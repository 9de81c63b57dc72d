"""parquet -> datasets -> verl's RLHFDataset -> first-turn tokens: every row and every column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
from medec.builders import TOKENIZER, run
from note_files import OFFICIAL, SAMPLE, medec_file

from medserl_agentloop.data.reader import read_files
from medserl_agentloop.data.rows import DEFAULT_MIX, SCHEMA, RowPlan, build_eval_rows, build_rows
from medserl_agentloop.data.verify import verify_files
from medserl_agentloop.games.medical.prompting import ProfileEncoder, load_profile
from medserl_agentloop.games.medical.types import Category, GameSpec, Role
from medserl_agentloop.testing.tiny import compose_run

NULLABLE = {"error_note", "clean_note", "error_type", "error_sentence", "corrected_sentence"}


def round_trip(paths: list[Path], cache: Path) -> list[dict[str, Any]]:
    """The files' rows, after a look at each as ``datasets``, verl and the agent loop see it."""
    from verl.utils.dataset.rl_dataset import RLHFDataset

    config = compose_run().data
    config.filter_overlong_prompts = True
    config.filter_overlong_prompts_workers = 1
    config.max_prompt_length = 8192
    encoder = ProfileEncoder(TOKENIZER, load_profile())
    files = [str(path) for path in paths]
    loaded = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(cache))
    dataset = RLHFDataset(files, TOKENIZER, config)
    source = [row for path in paths for row in pq.read_table(path).to_pylist()]
    assert len(source) == len(loaded) == len(dataset)
    for number, row in enumerate(source):
        handed_out = dataset[number]
        assert set(row) == set(SCHEMA.names)
        assert loaded[number] == row == {name: handed_out[name] for name in row}
        assert None not in [*row.values(), *(row["extra_info"][name] for name in {*row["extra_info"]} - NULLABLE)]
        assert "nan" not in [handed_out["extra_info"][name] for name in NULLABLE]
        spec = GameSpec.from_extra_info(handed_out["extra_info"])
        role = Role.ATTACKER if spec.category.has_attack else Role.ASSESSOR
        tokens = encoder.of(role, spec.category, spec.seed_note).ids
        assert TOKENIZER.decode(tokens) == TOKENIZER.apply_chat_template(
            handed_out["raw_prompt"], add_generation_prompt=True, tokenize=False
        )
        assert spec.seed_note in TOKENIZER.decode(tokens)
    return source


def planned(path: Path, mix: str = DEFAULT_MIX, val_fraction: float = 0.1) -> list[dict[str, Any]]:
    """The rows of both splits before they are written."""
    games = build_rows(read_files([path]).cases, RowPlan(mix=mix, val_fraction=val_fraction))
    return [*games.train, *games.val]


def test_round_trip_of_the_converted_sample(tmp_path: Path) -> None:
    assert run("medec_to_parquet", "--input", SAMPLE, "--output", tmp_path).exit_code == 0
    paths = [tmp_path / "train.parquet", tmp_path / "val.parquet"]
    assert round_trip(paths, tmp_path / "cache") == planned(SAMPLE)
    report = verify_files(paths, TOKENIZER)
    assert report.ok, report.problems


def test_round_trip_of_the_official_validation_set(tmp_path: Path) -> None:
    official, evaluation = medec_file(OFFICIAL), tmp_path / "eval.parquet"
    assert run("medec_to_parquet", "--input", official, "--output", tmp_path).exit_code == 0
    assert run("medec_eval_to_parquet", "--input", official, "--output", evaluation).exit_code == 0
    paths = [tmp_path / "train.parquet", tmp_path / "val.parquet"]
    assert round_trip([*paths, evaluation], tmp_path / "cache") == planned(official) + build_eval_rows([official])[0]
    report = verify_files(paths, TOKENIZER)
    assert report.ok, report.problems


def test_awkward_text_comes_through_in_every_category(tmp_path: Path, write_csv: Any, error_row: Any) -> None:
    """Cases 3, 10, 13 and 14: tags, markup and braces to the first tokens, 0 as 0, and absent as null."""
    awkward = (
        " pO2 <5 % <image> <think>x</think></answer></note> {{ note }} {% if %} %s \\1 a\u2028b \u00b5 |<|im_end|>"
    )
    cells = {"Error_Sentence_ID": "0.0", "Error_Type": "NA", "Error_Sentence": ""}
    rows = [error_row(n, **cells) for n in range(0, 20, 2)]
    for row in rows:
        row["Text"], row["Corrected Text"] = row["Text"].strip() + awkward, row["Corrected Text"] + awkward
    mix = ",".join(f"{category.value}=1" for category in Category)
    path = write_csv(*rows)
    arguments = ("--input", path, "--output", tmp_path, "--mix", mix, "--val-fraction", 0)
    assert run("medec_to_parquet", *arguments).exit_code == 0
    found = round_trip([tmp_path / "train.parquet"], tmp_path / "cache")
    assert found == planned(path, mix, 0) and len(found) == 10 * len(Category)
    for facts in (row["extra_info"] for row in found):
        assert awkward in facts["error_note"] and awkward in facts["clean_note"]
        assert (facts["error_sentence_id"], facts["error_type"], facts["error_sentence"]) == (0, None, None)
