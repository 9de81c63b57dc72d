"""parquet -> datasets -> verl's RLHFDataset -> first-turn tokens: every row and every column."""

import csv
import re
import tempfile
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from medec.builders import clean_row, error_row, run
from note_files import OFFICIAL, SAMPLE, medec_file

from medserl_agentloop.data.cases import MedecFormatError
from medserl_agentloop.data.reader import COLUMNS, read_files
from medserl_agentloop.data.rows import (
    DEFAULT_MIX,
    FIRST_INDEX,
    SCHEMA,
    RowPlan,
    build_eval_rows,
    build_rows,
    write_parquet,
)
from medserl_agentloop.data.verify import verify_files
from medserl_agentloop.games.medical.case import GameSpec
from medserl_agentloop.testing import compose_run

NULLABLE = {"target_label", "error_note", "clean_note", "error_type"}
NULLABLE |= {"error_sentence", "corrected_sentence"}


def round_trip(paths: list[Path], cache: Path) -> list[dict[str, Any]]:
    """The files' rows, after a look at each as ``datasets``, verl and the agent loop see it."""
    from verl.utils.dataset.rl_dataset import RLHFDataset

    config = compose_run().data
    config.filter_overlong_prompts = False
    # datasets' processes replace os.environ, which rich has kept
    config.filter_overlong_prompts_workers = None
    config.max_prompt_length = 8192
    files = [str(path) for path in paths]
    loaded = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(cache))
    dataset = RLHFDataset(files, None, config)
    source = [row for path in paths for row in pq.read_table(path).to_pylist()]
    assert len(source) == len(loaded) == len(dataset)
    for number, row in enumerate(source):
        handed_out = dataset[number]
        assert set(row) == set(SCHEMA.names)
        assert loaded[number] == row == {name: handed_out[name] for name in row}
        assert None not in [
            *row.values(),
            *(row["extra_info"][name] for name in {*row["extra_info"]} - NULLABLE),
        ]
        assert "nan" not in [handed_out["extra_info"][name] for name in NULLABLE]
        assert (
            handed_out["raw_prompt"][0]["content"]
            == GameSpec.from_extra_info(handed_out["extra_info"]).seed_note
        )
    return source


def planned(path: Path, mix: str = DEFAULT_MIX, val_fraction: float = 0.1) -> list[dict[str, Any]]:
    """The rows of both splits before they are written."""
    games = build_rows(read_files([path]).cases, RowPlan(mix=mix, val_fraction=val_fraction))
    return [*games.train, *games.val]


def test_round_trip_of_the_converted_sample(tmp_path: Path, files: dict[str, Any]) -> None:
    paths = [Path(file) for file in files.values()]
    assert round_trip(paths, tmp_path / "cache") == planned(SAMPLE)
    report = verify_files(paths)
    assert report.ok, report.problems


def eval_rows(path: Path, tmp_path: Path, *options: Any) -> list[dict[str, Any]]:
    result = run(
        "medec_to_parquet", "--input", path, "--output", tmp_path / "eval.parquet", *options
    )
    assert result.exit_code == 0, result.output
    rows: list[dict[str, Any]] = pq.read_table(tmp_path / "eval.parquet").to_pylist()
    return rows


@pytest.mark.parametrize("name", [SAMPLE.name, OFFICIAL])
def test_row_of_a_set_becomes_one_assessor_turn_with_its_text_unchanged(
    tmp_path: Path, name: str
) -> None:
    path = SAMPLE if name == SAMPLE.name else medec_file(name)
    with path.open(encoding="utf-8-sig", newline="") as file:
        cells = {row["Text ID"]: row for row in csv.DictReader(file) if row["Text ID"]}
    rows = eval_rows(path, tmp_path)
    assert [row["extra_info"]["text_id"] for row in rows] == list(cells)
    assert len(cells) == (574 if name == OFFICIAL else 300)
    for row, source in zip(rows, cells.values(), strict=True):
        kind = "vanilla_harmful" if source["Error Flag"] == "1" else "vanilla_benign"
        facts, spec = row["extra_info"], GameSpec.from_extra_info(row["extra_info"])
        assert (spec.category.value, spec.seed_note) == (kind, source["Text"])
        assert facts["error_sentence_id"] == int(source["Error Sentence ID"])
        assert row["data_source"] == f"{facts['subset']}_eval/{kind}"
    assert round_trip([tmp_path / "eval.parquet"], tmp_path / "cache") == build_eval_rows([path])[0]
    report = verify_files([tmp_path / "eval.parquet"])
    assert report.ok, report.problems


def test_twins_are_two_rows_of_one_case_and_awkward_text_stays(
    tmp_path: Path, write_csv: Any
) -> None:
    text = (
        "  Two  blanks,\ta tab,\r\nCR LF, {{ braces }}, â€“, <think>, \\1 and a newline at the "
        "end\n"
    )
    awkward = error_row(4, Text=text, Error_Sentence_ID="0") | {
        "Sentences": "0 Two blanks.\n1 More."
    }
    path = write_csv(error_row(0), clean_row(1), awkward, tail=",,,,,,,,\n")
    found = eval_rows(path, tmp_path)
    error, clean, last = (row["extra_info"] for row in found)
    assert [facts["index"] - error["index"] for facts in (error, clean, last)] == [0, 1, 2]
    assert (error["text_id"], clean["text_id"]) == ("ms-test-0", "ms-test-1")
    assert error["vignette_id"] == clean["vignette_id"] == "ms-test-0"
    assert error["error_note"].endswith(" ") and clean["error_note"] is None
    assert (last["error_note"], last["error_sentence_id"]) == (text, 0)
    assert found[2]["prompt"][0]["content"].endswith(text)


def test_sets_that_are_validated_on_together_have_other_indices(
    tmp_path: Path, write_csv: Any
) -> None:
    paths = [write_csv(error_row(n), name=f"{n}.csv") for n in (0, 2)]
    indices = [build_eval_rows([path])[0][0]["extra_info"]["index"] for path in paths]
    assert len(set(indices)) == 2 and min(indices) >= FIRST_INDEX
    assert build_eval_rows([paths[0]])[0][0]["extra_info"]["index"] == indices[0]


TEXT = st.text(st.characters() | st.sampled_from('\r\n",\x00\ud800 '), max_size=30)


@examples(100)
@given(
    notes=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4),
    newline=st.sampled_from(["\n", "\r\n"]),
    encoding=st.sampled_from(["utf-8", "utf-8-sig"]),
    last=st.booleans(),
)
def test_csv_comes_back_unchanged_from_parquet_or_is_refused_with_its_row(
    notes, newline, encoding, last
):
    """Quoted cells over several lines, either line end, with and without a last one and a byte
    order mark.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "notes.csv")
        with path.open("w", encoding=encoding, errors="surrogatepass", newline="") as file:
            writer = csv.writer(file, lineterminator=newline, quoting=csv.QUOTE_ALL)
            writer.writerow(COLUMNS)
            for n, (wrong, right) in enumerate(notes):
                writer.writerow(
                    [f"t-{2 * n}", f"{wrong}x{n}", "NA", "1", "NA", "0", "NA", "NA", f"{right}y{n}"]
                )
        if not last:
            path.write_bytes(path.read_bytes().removesuffix(newline.encode()))
        unusable = [
            n for n, pair in enumerate(notes) if re.search("[\0\ud800-\udfff]", "".join(pair))
        ]
        if unusable:
            with pytest.raises(MedecFormatError, match=f"'t-{2 * unusable[0]}'"):
                read_files([path])
            return
        games = build_rows(
            read_files([path]).cases, RowPlan(mix="adversarial_benign=1", val_fraction=0.0)
        )
        write_parquet(games.train, Path(folder, "out.parquet"))
        rows = pq.read_table(Path(folder, "out.parquet"))["extra_info"].to_pylist()
        found = {row["vignette_id"]: (row["error_note"], row["clean_note"]) for row in rows}

    def as_read(text):
        return text.replace("\r\n", "\n").replace("\r", "\n").strip()

    assert found == {
        f"t-{2 * n}": (as_read(f"{a}x{n}"), as_read(f"{b}y{n}")) for n, (a, b) in enumerate(notes)
    }
