"""Every script in ``benchmarks/`` runs to its end, in the shortest form that takes its whole path."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
SHORT_FORMS = {
    "cpu_step": ("--games 8 --rounds 1 --tokens 8", ("model: update", "records: write and read", "side by side")),
}
RUN_ELSEWHERE = {  # they need a process, a training run, SGLang or a browser, which other tests have anyway
    "adapters": "tests/backends/test_role_adapters.py",
    "gpu": "tests/benchmarks/test_gpu.py",
    "gpu_none": "tests/benchmarks/test_gpu.py",
    "plan_memory": "tests/planning/test_arithmetic.py",
    "prefix_reuse": "tests/sglang_cpu/test_prefix_reuse.py",
    "report_page": "tests/report/test_page.py",
}
# They only time real runs, which other tests have anyway; the last one downloads.
NOT_RUN = {"start", "smollm2_step", "gpu_bundle"}


def test_every_benchmark_is_run_by_a_test() -> None:
    scripts = {path.stem for path in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert SHORT_FORMS.keys() | RUN_ELSEWHERE.keys() | NOT_RUN == scripts
    for script, test in RUN_ELSEWHERE.items():
        assert f"{script}." in (ROOT / test).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("script", SHORT_FORMS)
def test_a_benchmark_runs_to_its_end(script: str) -> None:
    options, lines = SHORT_FORMS[script]
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, "COLUMNS": "130"})
    assert done.returncode == 0 and all(line in done.stdout for line in lines), done.stdout + done.stderr[-3000:]
