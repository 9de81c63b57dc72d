"""Every script in ``benchmarks/`` runs to its end, in the shortest form that takes its whole path."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
SHORT_FORMS = {
    "advantages": "--rows 16 --tokens 64 --repeats 1",
    "agent_loop": "--games 4 --repeats 1 --slots 4,2 --median 0.01",
    "data_prep": "--rows 100,200",
    "game_core": "--labels 8 --http 8",
    "packed_attention": "--sequences 1 2",
    "soak": "--games 40",
}
RUN_ELSEWHERE = {  # they need a process, a training run, SGLang or a browser, which other tests have anyway
    "adapters": "tests/backends/test_role_adapters.py",
    "plan_memory": "tests/planning/test_arithmetic.py",
    "prefix_reuse": "tests/sglang_cpu/test_prefix_reuse.py",
    "report_page": "tests/report/test_page.py",
}


def test_every_benchmark_is_run_by_a_test() -> None:
    scripts = {path.stem for path in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert SHORT_FORMS.keys() | RUN_ELSEWHERE.keys() == scripts
    for script, test in RUN_ELSEWHERE.items():
        assert f"{script}." in (ROOT / test).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("script", SHORT_FORMS)
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

    def tenths(memory: float, files: int, rate: float) -> list[Tenth]:
        return [Tenth(1, 600.0, 13, 50.0, 100.0)] * 7 + [Tenth(1, memory, files, 50.0, rate)] * 3

    path = tmp_path / "games.jsonl"
    record = finished(Outcome.MISSED_ERROR).model_copy(update={"uid": "0", "rewards": {"attacker": {"game": 1.0}}})
    StepFile(path).append([record.to_json()])
    assert faults(tenths(629.0, 13, 76.0), 1, path) == []
    assert [fault.split(" ")[0] for fault in faults(tenths(631.0, 14, 74.0), 2, path)] == [
        "memory",
        "open",
        "games",
        "of",
    ]
    StepFile(path).append([record.to_json()])
    assert faults(tenths(600.0, 13, 100.0), 1, path) == ["of 1 games, 1 have a whole record, among 2"]
