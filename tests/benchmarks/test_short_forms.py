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
