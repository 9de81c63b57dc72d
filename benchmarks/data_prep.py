"""Rows per second and peak memory of ``medec_to_parquet.py`` on synthetic MEDEC files of growing size.

Run by hand: ``python benchmarks/data_prep.py`` (``--rows 1000`` for less). A row is a record of the CSV, and
as many rows are written. MEDEC has a few thousand.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq  # type: ignore[import-untyped, unused-ignore]

from medserl_agentloop.data.reader import COLUMNS

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "data_prep" / "medec_to_parquet.py"
TYPES = ("diagnosis", "management", "treatment", "pharmacotherapy", "causalOrganism")
SENTENCES = 10
WORDS_PER_SENTENCE = 12  # with ten sentences the length of MEDEC's median note
VOCABULARY = 5000
SEED = 7


@dataclass(frozen=True)
class Measurement:
    """One run: records read, rows written, seconds of wall time, peak resident memory in MiB."""

    records: int
    written: int
    seconds: float
    peak_mib: float


def write_synthetic(path: Path, records: int, seed: int) -> None:
    """Write a CSV of ``records`` rows: error notes and their clean twins; the same seed, the same bytes."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 10))) for _ in range(VOCABULARY)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for number in range(0, records, 2):
            drawn = rng.choices(words, k=SENTENCES * WORDS_PER_SENTENCE)
            sentences = [" ".join(drawn[at::SENTENCES]) + "." for at in range(SENTENCES)]
            at = rng.randrange(SENTENCES)
            wrong = sentences[at].replace(drawn[at], "wrongword", 1)
            right_note = " ".join(sentences)
            listed = [*sentences[:at], wrong, *sentences[at + 1 :]]
            error_type = rng.choice(TYPES)
            writer.writerow(
                [
                    f"toy-{number}",
                    " ".join(listed),
                    _numbered(listed),
                    1,
                    error_type,
                    at,
                    wrong,
                    sentences[at],
                    right_note,
                ]
            )
            if number + 1 < records:
                writer.writerow([f"toy-{number + 1}", right_note, _numbered(sentences), 0, "NA", -1, "NA", "NA", "NA"])


def measure(records: int, folder: Path) -> Measurement:
    """Convert a synthetic file in a process of its own."""
    source, output = folder / f"{records}.csv", folder / f"out-{records}"
    write_synthetic(source, records, SEED)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--input", str(source), "--output", str(output)],
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)  # the memory of this child alone, not the largest of all
    seconds = time.perf_counter() - started
    if status != 0:
        sys.exit(f"{SCRIPT.name} failed on {records} records; its message is above.")
    written = sum(pq.read_metadata(output / f"{name}.parquet").num_rows for name in ("train", "val"))
    source.unlink()
    for path in output.iterdir():
        path.unlink()
    return Measurement(records, written, seconds, usage.ru_maxrss / 1024)


def _numbered(sentences: list[str]) -> str:
    return "\n".join(f"{number} {sentence}" for number, sentence in enumerate(sentences))


def main() -> None:
    """Print a line per size, and how peak memory grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1000,10000,100000", help="sizes to measure, with commas between")
    parser.add_argument("--folder", type=Path, help="where the temporary files go; default: the system's folder")
    options = parser.parse_args()
    sizes = [int(size) for size in options.rows.split(",")]
    print(
        f"{'records':>10} {'written':>10} {'seconds':>9} {'rows/s':>9} {'peak MiB':>9} {'of previous':>12}", flush=True
    )
    previous: Measurement | None = None
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for size in sizes:
            found = measure(size, Path(folder))
            ratio = f"{found.peak_mib / previous.peak_mib:.2f}" if previous else ""
            print(
                f"{found.records:>10} {found.written:>10} {found.seconds:>9.1f} "
                f"{found.written / found.seconds:>9.0f} {found.peak_mib:>9.0f} {ratio:>12}",
                flush=True,
            )
            previous = found


if __name__ == "__main__":
    main()
