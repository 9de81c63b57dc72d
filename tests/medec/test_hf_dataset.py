"""Hugging Face data sets with MEDEC's columns: local folders in every form, and names on the hub."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import datasets
import huggingface_hub
import pytest
from medec.builders import assert_one_sentence

from medserl_agentloop.data.intake import MedecFormatError
from medserl_agentloop.data.reader import read_files


@pytest.mark.parametrize("saved", ["disk", "splits", "parquet", "csv", "jsonl"])
def test_local_data_set_reads_as_the_csv_does(write_csv, error_row, clean_row, tmp_path, saved):
    """Case 3: what a library's types make of flags, numbers and absent cells is read as the CSV's text."""
    rows = [error_row(0), clean_row(1), error_row(4, Text="Two lines,\nand <tags>.", Error_Sentence_ID="0")]
    typed = [r | {"Error Flag": float(r["Error Flag"]), "Error Sentence ID": int(r["Error Sentence ID"])} for r in rows]
    typed[1]["Error Type"] = None
    data, folder = datasets.Dataset.from_list(typed), tmp_path / "data"
    if saved in ("disk", "splits"):
        (data if saved == "disk" else datasets.DatasetDict(train=data)).save_to_disk(str(folder))
    else:
        folder.mkdir()
        to_file = {"parquet": data.to_parquet, "csv": data.to_csv, "jsonl": data.to_json}[saved]
        to_file(str(folder / f"part.{saved}"))
    result, expected = read_files([folder]), read_files([write_csv(*rows)])
    assert without_source(result) == without_source(expected)
    assert (result.reports[0].file, result.reports[0].records, result.reports[0].pairs) == ("data", 3, 2)


def without_source(result: Any) -> list[dict[str, Any]]:
    return [{name: value for name, value in vars(v).items() if name != "source_sha256"} for v in result.vignettes]


def test_several_files_of_a_folder_are_read_in_the_order_of_their_names(write_csv, error_row, tmp_path):
    (tmp_path / "data").mkdir()
    for n, name in ((2, "b.csv"), (0, "a.csv")):
        write_csv(error_row(n)).rename(tmp_path / "data" / name)
    assert [v.vignette_id for v in read_files([tmp_path / "data"]).vignettes] == ["ms-test-0", "ms-test-2"]


def test_nan_is_an_absent_cell(error_row, tmp_path):
    """Case 3: never the text ``nan``."""
    rows = [error_row(0) | {"Error Type": math.nan, "Corrected Text": None}]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "data"))
    (vignette,) = read_files([tmp_path / "data"]).vignettes
    assert (vignette.error_type, vignette.clean_note) == (None, None)


def test_data_set_that_lacks_a_column_or_rows_or_is_broken_is_an_error(tmp_path):
    datasets.Dataset.from_list([{"Text": "a"}]).save_to_disk(str(tmp_path / "data"))
    with pytest.raises(MedecFormatError, match="'Text ID' is missing"):
        read_files([tmp_path / "data"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(MedecFormatError, match="empty: cannot be loaded as a data set"):
        read_files([tmp_path / "empty"])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "part.parquet").write_text("no parquet")
    with pytest.raises(MedecFormatError, match=r"broken: cannot be loaded as a data set \(.+\); give a folder"):
        read_files([tmp_path / "broken"])


def test_row_of_a_data_set_is_named_as_that_of_a_file(error_row, tmp_path):
    rows = [error_row(0), error_row(2, Error_Flag="maybe")]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "data"))
    with pytest.raises(MedecFormatError, match=r"data, row 2 \('ms-test-2'\), column 'Error Flag'"):
        read_files([tmp_path / "data"])


class _NothingHere(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HTTPServer]:
    """A hub on this machine that has no data set."""
    with HTTPServer(("127.0.0.1", 0), _NothingHere) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        yield server
        server.shutdown()


def test_name_that_the_hub_does_not_know_is_an_error(convert, hub):
    assert_one_sentence(
        convert("--input", "hf:nobody/nothing"), "hf:nobody/nothing: cannot be loaded as a data set (404"
    )


def test_hub_that_does_not_answer_is_an_error_within_seconds(convert, hub):
    hub.shutdown()
    hub.server_close()
    started = time.monotonic()
    result = convert("--input", "hf:nobody/nothing:train")
    assert_one_sentence(result, "hf:nobody/nothing:train: cannot be loaded as a data set (", "HF_HUB_OFFLINE=1")
    assert time.monotonic() - started < 40  # 80 to 99 s with the hub's own retries


def test_name_that_cannot_be_one_is_an_error(convert):
    assert_one_sentence(convert("--input", "hf:./nothing"), "hf:./nothing: cannot be loaded as a data set (Repo id")


def test_data_set_that_is_not_in_the_cache_is_an_error_offline(convert, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert_one_sentence(convert("--input", "hf:nobody/nothing"), "hf:nobody/nothing: cannot be loaded as a data set (")
