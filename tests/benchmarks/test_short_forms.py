"""Every script in ``benchmarks/`` runs to its end, in the shortest form that takes its whole path."""

import json
import os
import platform
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from run import SHORT_FORMS

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
RUN_ELSEWHERE = {  # they need a process, a training run, SGLang or a browser, which other tests have anyway
    "adapters": "tests/backends/test_role_adapters.py",
    "gpu": "tests/benchmarks/test_gpu.py",
    "kills": "tests/benchmarks/test_kills.py",
    "plan_memory": "tests/planning/test_arithmetic.py",
    "prefix_reuse": "tests/sglang_cpu/test_prefix_reuse.py",
    "report_page": "tests/report/test_page.py",
}


def test_every_benchmark_is_run_by_a_test() -> None:
    scripts = {path.stem for path in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert SHORT_FORMS.keys() | RUN_ELSEWHERE.keys() | {"run"} == scripts
    for script, test in RUN_ELSEWHERE.items():
        assert f"{script}." in (ROOT / test).read_text()


@pytest.mark.slow
def test_the_parts_of_a_cpu_step_are_measured_in_a_process_of_their_own() -> None:
    command = [sys.executable, str(BENCHMARKS / "cpu_step.py"), *SHORT_FORMS["cpu_step"].split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, "COLUMNS": "130"})
    assert "one row of log-probs" in done.stdout and "all of them" in done.stdout, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(SHORT_FORMS.keys() - RUN_ELSEWHERE - {"cpu_step"}))
def test_a_benchmark_runs_to_its_end(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = SHORT_FORMS[script].split()
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / f"{script}.py"), *arguments])
    threads = torch.get_num_threads()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        assert not end.code
    finally:
        torch.set_num_threads(threads)
    assert capsys.readouterr().out


@pytest.mark.slow
def test_a_soak_says_what_grew_slowed_down_or_was_lost(tmp_path: Path) -> None:
    from game.builders import finished
    from soak import Tenth, faults

    from medserl_agentloop.core.step_file import StepFile
    from medserl_agentloop.games.medical.records import Outcome
    from medserl_agentloop.games.medical.types import Role

    def tenths(memory: float, files: int, connections: int, rate: float) -> list[Tenth]:
        return [Tenth(1, 600.0, 11, 2, 50.0, 100.0)] * 7 + [Tenth(1, memory, files, connections, 50.0, rate)] * 3

    path = tmp_path / "games.jsonl"
    record = finished(Outcome.MISSED_ERROR).model_copy(update={"uid": "0", "rewards": {Role.ATTACKER: {"game": 1.0}}})
    StepFile(path).append([record.to_json()])
    assert faults(tenths(629.0, 11, 18, 76.0), 1, path) == []
    grown = faults(tenths(631.0, 12, 19, 74.0), 10_000, path)
    assert [fault.split(" ")[0] for fault in grown] == ["memory", "open", "open", "games", "of"]
    assert faults(tenths(629.0, 11, 18, 1.0), 1, path) == []  # too few games for a rate
    StepFile(path).append([record.to_json()])
    assert faults(tenths(600.0, 11, 2, 100.0), 1, path) == ["of 1 games, 1 have a whole record, among 2"]


@pytest.mark.slow
def test_scripts_are_run_in_rounds_into_one_table_and_a_file_without_names_of_the_machine(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    command = [sys.executable, str(BENCHMARKS / "run.py"), "--short", "--rounds", "2", "-o", str(file)]
    done = subprocess.run([*command, "--only", "game_core"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "game_core" in done.stdout
    results = json.loads(file.read_text())
    assert results["machine"]["cores"] >= 1 and results["machine"]["verl"] == "0.9.1"
    rounds = results["runs"]["game_core"]
    assert len(rounds) == 2 and all("games/s" in run["printed"] for run in rounds)
    assert str(ROOT) not in file.read_text() and platform.node() not in results["machine"].values()
    wrong = subprocess.run([*command, "--only", "nonesuch"], capture_output=True, text=True, timeout=120)
    assert wrong.returncode == 2
