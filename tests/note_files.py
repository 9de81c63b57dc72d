"""Files of notes that tests read: the sample of the repository, and MEDEC's own where the machine
has them.
"""

import json
import os
from functools import cache
from pathlib import Path

import pytest

from medserl_agentloop.paths import PACKAGE

SAMPLE = PACKAGE.parent / "data_prep" / "sample" / "medserl_sample.csv"
OFFICIAL = "MEDEC-MS-ValidationSet-with-GroundTruth-and-ErrorType.csv"
PAIRS = "medec_ms_train_pairs.jsonl"


def medec_file(name: str) -> Path:
    """A file of MEDEC's, from ``MEDSERL_MEDEC_DIR`` or from beside the checkout; skips the test
    where there is none.
    """
    path = Path(os.environ.get("MEDSERL_MEDEC_DIR", PACKAGE.parents[1] / "shared" / "medec")) / name
    if not path.is_file():
        pytest.skip(f"{path} does not exist; set MEDSERL_MEDEC_DIR to the folder of MEDEC's files")
    return path


@cache
def real_pairs() -> list[dict[str, str]]:
    """MEDEC's pairs of a correct and an incorrect note; the file never comes into the
    repository."""
    return [
        json.loads(line)
        for line in medec_file(PAIRS).read_text(encoding="utf-8").split("\n")
        if line.strip()
    ]
