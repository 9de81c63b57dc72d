"""Files of any format: nothing is lost, nothing is read twice, and what cannot be read is named."""

from __future__ import annotations

import json
import re
import time

import pytest
from medec.builders import message_of
from note_files import OFFICIAL, PAIRS, medec_file

from medserl_agentloop.data.intake import MedecFormatError
from medserl_agentloop.data.official_csv import COLUMNS
from medserl_agentloop.data.reader import read_files


def test_official_validation_file_gives_319_pairs_and_255_twins():
    (report,) = read_files([medec_file(OFFICIAL)]).reports
    assert (report.records, report.pairs, report.twins) == (574, 319, 255)
    assert (report.dropped_empty, report.clean_only, report.error_only) == (0, 0, 0)
    assert report.no_op_edits == report.non_local_edits == report.unlisted_error_sentences == 0
    assert report.error_types["causalOrganism"] == 13


def test_pair_file_gives_1219_pairs():
    (report,) = read_files([medec_file(PAIRS)]).reports
    assert (report.records, report.pairs) == (1219, 1219)
    assert (report.no_op_edits, report.non_local_edits) == (1, 4)
    assert sum(report.error_types.values()) == 1219 and "unknown" not in report.error_types


def test_no_white_space_feature_predicts_the_label_in_the_real_files():
    """Case 5: on the real files."""
    vignettes = read_files([medec_file(OFFICIAL), medec_file(PAIRS)])
    pairs = [(v.error_note, v.clean_note) for v in vignettes.vignettes]
    for feature in (r"^\s", r"\s$", r"\n", r"  ", r"\s\n", r"\n\s", r"\t", r"\s\.", r"\.\S", "\xa0", "\r"):
        error_notes = sum(bool(re.search(feature, error)) for error, _ in pairs)
        clean_notes = sum(bool(re.search(feature, clean)) for _, clean in pairs)
        assert abs(error_notes - clean_notes) <= 0.01 * len(pairs), feature


def test_duplicate_ids_are_an_error_across_files(write_csv, write_pairs, error_row, pair):
    """Case 15: an id in two inputs."""
    paths = [write_csv(error_row(0)), write_pairs(pair(0, note_id="ms-test-0"))]
    with pytest.raises(MedecFormatError, match=r"pairs\.jsonl, row 1 .*already that of notes.csv, row 1"):
        read_files(paths)


def test_byte_of_another_encoding_is_an_error_with_its_row_and_column(write_csv, write_pairs, error_row, pair):
    micro = "5 \N{MICRO SIGN}g"
    csv = write_csv(error_row(0), error_row(2, Text=micro))
    pairs = write_pairs(pair(0), pair(1), pair(2, correct_note=micro))
    for path, place in (
        (csv, "notes.csv, row 2 ('ms-test-2'), column 'Text'"),
        (pairs, "pairs.jsonl, row 3 ('ms-train-2'), column 'correct_note'"),
    ):
        path.write_bytes(path.read_text(encoding="utf-8").encode("cp1252"))
        assert f"{place}: character 2 is the byte 0xb5, which is not UTF-8" in message_of(path)


def test_file_in_utf_16_is_an_error(write_csv, error_row):
    path = write_csv(error_row(0))
    path.write_bytes(path.read_text(encoding="utf-8").encode("utf-16"))
    assert "notes.csv: byte 0 (0xff) is not UTF-8" in message_of(path)


def test_key_that_occurs_twice_is_an_error(write_pairs, pair):
    path = write_pairs(pair(0), pair(1))
    path.write_text(path.read_text().replace('"ms-train-1",', '"ms-train-1", "split": "train",'))
    assert message_of(path).startswith("pairs.jsonl, row 2: key 'split' occurs twice; write every key")


def test_100_000_columns_are_read_in_seconds(tmp_path, pair):
    many = [f"column {n}" for n in range(100_000)]
    (tmp_path / "wide.csv").write_text(",".join([*COLUMNS, *many, many[-1]]) + "\n")
    wide = json.dumps(dict.fromkeys(many, "x") | pair(0))
    (tmp_path / "wide.jsonl").write_text(f"{wide}\n{wide[:-1]}, {wide[1:]}\n")
    start = time.process_time()
    assert "column 'column 99999' occurs twice" in message_of(tmp_path / "wide.csv")
    assert "wide.jsonl, row 2: key 'column 0' occurs twice" in message_of(tmp_path / "wide.jsonl")
    assert time.process_time() - start < 10  # a count of each name in the whole header took minutes


@pytest.mark.parametrize(("name", "content"), [("notes.csv", ",".join(COLUMNS)), ("notes.jsonl", "\u00a0\n\u00a0")])
def test_input_without_a_note_is_an_error(tmp_path, name, content):
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert "the input has no notes: give a MEDEC file with at least one row" in message_of(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("notes.xlsx", "files that end in '.xlsx' are not known"),
        ("empty.csv", "the file is empty"),
        ("absent.csv", "cannot be read (No such file or directory)"),
    ],
)
def test_file_that_cannot_be_read_says_why(tmp_path, name, part):
    if name != "absent.csv":
        (tmp_path / name).write_text("")
    message = message_of(tmp_path / name)
    assert name in message and part in message


def test_vignettes_are_a_list_in_the_order_of_the_input(write_pairs, pair):
    vignettes = read_files([write_pairs(*(pair(n) for n in range(3)))]).vignettes
    assert [v.vignette_id for v in vignettes[::-1]] == ["ms-train-2", "ms-train-1", "ms-train-0"]
    assert vignettes[-1] == vignettes[2]
    for index in (3, -4):
        with pytest.raises(IndexError):
            vignettes[index]
