"""Every script in ``benchmarks/`` runs to its end, in the shortest form that takes its whole path."""

import random
import runpy
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support import extra_info

from medserl_agentloop.games.medical.clinic.notes import sample_clean_note

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
SHORT_FORMS = {
    "advantages": "--rows 16 --tokens 64 --repeats 1",
    "agent_loop": "--games 4 --repeats 1 --slots 4,2 --median 0.01",
    "context_leak": "--data {notes}",
    "data_prep": "--rows 100,200",
    "game_core": "--labels 8 --http 8",
    "learning_pictures": "--results {results}",
}
RUN_ELSEWHERE = {  # they need a training run or SGLang, which other tests have anyway
    "learning": "tests/learning/test_experiments.py",
    "prefix_reuse": "tests/sglang_cpu/test_prefix_reuse.py",
}


def test_every_benchmark_is_run_by_a_test() -> None:
    scripts = {path.stem for path in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert SHORT_FORMS.keys() | RUN_ELSEWHERE.keys() == scripts
    for script, test in RUN_ELSEWHERE.items():
        assert f"{script}.__file__" in (ROOT / test).read_text()


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Toy notes with an attack, as a parquet file."""
    rng = random.Random(7)
    rows = [extra_info("adversarial_benign", seed_note=sample_clean_note(rng).text) for _ in range(4)]
    path = tmp_path_factory.mktemp("notes") / "notes.parquet"
    pq.write_table(pa.Table.from_pylist([{"extra_info": row} for row in rows]), path)
    return path


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """The learning runs' figures, away from the committed pictures."""
    for file in (ROOT / "docs" / "learning").glob("*.csv"):
        shutil.copy(file, tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("script", SHORT_FORMS)
def test_a_benchmark_runs_to_its_end(
    script: str, notes: Path, results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = SHORT_FORMS[script].format(notes=notes, results=results).split()
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / f"{script}.py"), *arguments])
    threads = torch.get_num_threads()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        assert not end.code
    finally:
        torch.set_num_threads(threads)
    assert capsys.readouterr().out
