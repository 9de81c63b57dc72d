"""``medserl data``: the commands of ``data_prep`` in the installed package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from medec.builders import run
from note_files import SAMPLE
from typer.testing import CliRunner

from medserl_agentloop.cli import app

SCRIPTS = {
    "convert": "medec_to_parquet",
    "verify": "verify_parquet",
    "sft": "sft_to_parquet",
    "eval": "medec_eval_to_parquet",
}


def medserl(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["data", *map(str, arguments)])


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.*")}


def test_a_command_and_its_script_do_the_same(tmp_path: Path, monkeypatch: Any) -> None:
    arguments: dict[str, list[Any]] = {
        "convert": ["--input", SAMPLE, "--output", "data"],
        "verify": ["data/train.parquet", "data/val.parquet"],
        "sft": ["--input", SAMPLE, "--output", "data", "--splits-of", "data"],
        "eval": ["--input", SAMPLE, "--output", "data/eval.parquet"],
    }
    for command, words in arguments.items():
        printed = []
        for name, program in (("one", lambda *w: medserl(command, *w)), ("two", lambda *w: run(SCRIPTS[command], *w))):  # noqa: B023
            (tmp_path / name).mkdir(exist_ok=True)
            monkeypatch.chdir(tmp_path / name)
            result = program(*words)
            assert result.exit_code == 0, result.output
            printed.append(result.stdout)
        assert printed[0] == printed[1]
    one, two = (files(tmp_path / name) for name in ("one", "two"))
    assert one == two


@pytest.mark.slow
def test_the_commands_load_no_parquet_and_no_model_library_before_they_run() -> None:
    code = "import sys, medserl_agentloop.data.cli; print(*{'pyarrow', 'datasets', 'torch', 'verl'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
