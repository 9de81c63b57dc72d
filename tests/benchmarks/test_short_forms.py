"""A test runs each script in ``benchmarks/``, in a short form."""

import csv
import subprocess
from pathlib import Path
from unittest.mock import Mock

import card
import edits_step
import pytest
from transformers import AutoModelForCausalLM

from medserl_agentloop.paths import resource
from medserl_agentloop.testing import compose_run

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
RUN_BY = {
    "edits_step": "tests/benchmarks/test_short_forms.py",
    "card": "tests/benchmarks/test_short_forms.py",
    "plan_memory": "tests/planning/test_plan.py",
    "report_page": "tests/report/test_page.py",
}
# The parts of the first run in backends/, the second wants MEDEC's files, the last SGLang.
NOT_RUN = {"adapters", "sentences", "prefix_reuse"}


def test_every_benchmark_is_run_by_a_test() -> None:
    scripts = {
        path.stem
        for path in BENCHMARKS.glob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    assert RUN_BY.keys() | NOT_RUN == scripts
    for script, test in RUN_BY.items():
        assert f"{script}." in (ROOT / test).read_text()


def test_both_halves_of_a_step_take_time() -> None:
    player = AutoModelForCausalLM.from_pretrained(resource("assets/tiny_player"), dtype="float32")
    seconds = edits_step.measure(player, ((8, 4), (6, 2)), games=2)
    assert set(seconds) == {"generation", "update"} and min(seconds.values()) > 0


def test_the_parts_of_a_card_that_need_no_run_are_measured_once(tmp_path: Path) -> None:
    asked = ["--size", "tiny", "--parts", "ab", "--output", str(tmp_path / "card.csv")]
    for _ in range(2):
        card.main(asked)
    rows = list(csv.DictReader((tmp_path / "card.csv").open(newline="")))
    assert [row["part"] for row in rows] == ["a", "a", "b", "b", "b"]
    assert all(float(row["seconds"]) > 0 for row in rows)
    assert all(float(row["value"]) < 0.1 for row in rows if row["of"] == "largest error")


def test_a_case_that_would_take_too_long_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card.main(["--size", "tiny", "--minutes", "0.1", "--output", str(tmp_path / "card.csv")])
    assert capsys.readouterr().out.count("no time left for: ") == len(list(card.cases("tiny")))
    assert not (tmp_path / "card.csv").exists()


def test_a_run_of_a_card_finds_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: Mock(poll=lambda: 0))
    card.run("quickstart", "+recipes=quickstart")
    data = compose_run("+recipes=quickstart").data
    assert Path(data.train_files).is_file() and Path(data.val_files).is_file()
