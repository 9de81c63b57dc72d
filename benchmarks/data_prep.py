"""Rows per second and peak memory of ``medec_to_parquet.py`` on synthetic MEDEC files of growing size.

Run by hand: ``python benchmarks/data_prep.py`` (``--rows 1000`` for less). A row is a record of the CSV, and
as many rows are written. MEDEC has a few thousand.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd

from medserl_agentloop.data.reader import COLUMNS
from medserl_agentloop.data.sentences import with_numbers

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "data_prep" / "medec_to_parquet.py"
TYPES = ("diagnosis", "management", "treatment", "pharmacotherapy", "causalOrganism")
SENTENCES = 10
WORDS_PER_SENTENCE = 12  # with ten sentences the length of MEDEC's median note
VOCABULARY = 5000
SEED = 7


def synthetic_rows(records: int) -> list[list[str]]:
    """MEDEC rows: error notes and their clean twins; always the same."""
    rng = random.Random(SEED)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 10))) for _ in range(VOCABULARY)]
    rows: list[list[str]] = []
    for number in range(0, records, 2):
        drawn = rng.choices(words, k=SENTENCES * WORDS_PER_SENTENCE)
        sentences = [" ".join(drawn[at::SENTENCES]) + "." for at in range(SENTENCES)]
        at = rng.randrange(SENTENCES)
        wrong = sentences[at].replace(drawn[at], "wrongword", 1)
        clean, listed = " ".join(sentences), [*sentences[:at], wrong, *sentences[at + 1 :]]
        error = [" ".join(listed), with_numbers(listed), "1", rng.choice(TYPES), str(at), wrong, sentences[at], clean]
        rows.append([f"toy-{number}", *error])
        rows.append([f"toy-{number + 1}", clean, with_numbers(sentences), "0", "NA", "-1", "NA", "NA", "NA"])
    return rows[:records]


def measure(records: int, folder: Path) -> tuple[float, float]:
    """Seconds of wall time and peak resident memory in MiB of converting a synthetic file in its own process."""
    source, output = folder / f"{records}.csv", folder / f"out-{records}"
    pd.DataFrame(synthetic_rows(records), columns=list(COLUMNS)).to_csv(source, index=False)
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--input", str(source), "--output", str(output)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)  # the memory of this child alone, not the largest of all
    if status != 0:
        sys.exit(f"{SCRIPT.name} failed on {records} records; its message is above.")
    return time.perf_counter() - started, usage.ru_maxrss / 1024


def main() -> None:
    """Print a line per size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1000,10000,100000", help="sizes to measure, with commas between")
    parser.add_argument("--folder", type=Path, help="where the temporary files go; default: the system's folder")
    options = parser.parse_args()
    print(f"{'records':>10} {'seconds':>9} {'rows/s':>9} {'peak MiB':>9}", flush=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for size in map(int, options.rows.split(",")):
            seconds, peak_mib = measure(size, Path(folder))
            print(f"{size:>10} {seconds:>9.1f} {size / seconds:>9.0f} {peak_mib:>9.0f}", flush=True)


if __name__ == "__main__":
    main()
