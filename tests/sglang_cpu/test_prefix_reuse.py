"""The benchmark of SGLang's prefix cache in its shortest form."""

import random
import re
import subprocess
import sys
from pathlib import Path

import prefix_reuse
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import extra_info

from medserl_agentloop.games.clinic import sample_clean_note


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_rows_played_twice_find_their_prompts_in_the_cache(tmp_path: Path) -> None:
    rng, notes = random.Random(7), tmp_path / "notes.parquet"
    rows = [
        extra_info("adversarial_benign", clean_note=sample_clean_note(rng).text) for _ in range(2)
    ]
    pq.write_table(pa.Table.from_pylist([{"extra_info": row} for row in rows]), notes)
    command = [
        sys.executable,
        prefix_reuse.__file__,
        "--rows",
        str(notes),
        "--games",
        "2",
        "--samples",
        "2",
    ]
    printed = subprocess.run(
        command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=400
    ).stdout
    for context in prefix_reuse.CONTEXTS:
        [[prompt, cached]] = re.findall(rf"{context} +│ both +│ +\d+ +│ +(\d+) +│ +(\d+)", printed)
        assert 0 < int(cached) < int(prompt)
