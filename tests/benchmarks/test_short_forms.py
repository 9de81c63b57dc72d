"""Every script in ``benchmarks/`` is run by a test to its end, in a short form that takes its whole path."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
RUN_BY = {
    "cpu_step": "tests/benchmarks/test_short_forms.py",
    "adapters": "tests/backends/test_role_adapters.py",
    "gpu": "tests/benchmarks/test_gpu.py",
    "gpu_none": "tests/benchmarks/test_gpu.py",
    "plan_memory": "tests/planning/test_arithmetic.py",
    "prefix_reuse": "tests/sglang_cpu/test_prefix_reuse.py",
    "report_page": "tests/report/test_page.py",
}
# They only time what other tests run anyway; the last one downloads.
NOT_RUN = {"start", "smollm2_step", "gpu_bundle"}


def test_every_benchmark_is_run_by_a_test() -> None:
    scripts = {path.stem for path in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert RUN_BY.keys() | NOT_RUN == scripts
    for script, test in RUN_BY.items():
        assert f"{script}." in (ROOT / test).read_text()


@pytest.mark.slow
def test_the_benchmark_of_a_step_runs_to_its_end() -> None:
    command = [sys.executable, BENCHMARKS / "cpu_step.py", "--games=8", "--rounds=1", "--tokens=8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, "COLUMNS": "130"})
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert all(line in done.stdout for line in ("model: update", "records: write and read", "side by side"))
