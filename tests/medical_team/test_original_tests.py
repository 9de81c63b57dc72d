"""The original's own tests against ``medical_team``: as docs/migration.md says, with the import
changed alone.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from note_files import SAMPLE

CHECKOUT = "MEDSERL_ORIGINAL"  # names a folder with a checkout of the OpenRLHF system
pytestmark = pytest.mark.skipif(CHECKOUT not in os.environ, reason=f"{CHECKOUT} names no checkout")
REPOSITORY = Path(__file__).parents[2]
MEDEC = "data_copy/MEDEC/MEDEC-MS/MEDEC-MS-ValidationSet-with-GroundTruth-and-ErrorType.csv"


def run(name: str, folder: Path) -> str:
    """Run the original's test file in ``folder`` with the import changed; return its output."""
    original = Path(os.environ[CHECKOUT])
    text = (original / "tests" / name).read_text(encoding="utf-8")
    (folder / name).write_text(
        re.sub(r"(?m)^from medical_team\b", "from medserl_agentloop.medical_team", text)
    )
    path = f"{REPOSITORY}{os.pathsep}{original / 'scripts'}"  # the latter holds their data.py
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"}
    options = {"cwd": folder, "env": environment, "text": True, "timeout": 300}
    ran = subprocess.run([sys.executable, name], capture_output=True, check=False, **options)
    return ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("name", "tests"), [("test_medical_utils.py", 10), ("test_medical_game_manager.py", 7)]
)
def test_every_unit_test_passes(name: str, tests: int, tmp_path: Path) -> None:
    said = run(name, tmp_path)
    assert f"Ran {tests} tests" in said and said.rstrip().endswith("OK"), said


def test_integration_file_passes_on_notes_in_the_form_of_medec(tmp_path: Path) -> None:
    (tmp_path / MEDEC).parent.mkdir(parents=True)
    (tmp_path / MEDEC).write_bytes(SAMPLE.read_bytes())
    said = run("test_integration.py", tmp_path)
    assert said.count(" test passed") == 5 and "ALL INTEGRATION TESTS PASSED" in said, said
