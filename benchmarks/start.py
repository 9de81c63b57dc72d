"""Measure a run's cost before its first step, and this package's share of it, in one or several
checkouts.

    python benchmarks/start.py [.=own_notes ...] [--rounds 3]

Each argument is a checkout and its recipe, for example a ``git worktree`` of an older revision
beside ``.``; they take turns. Printed are medians, and their ratios to the last argument's: the CPU
seconds that a process of a run takes to import this package when it has verl already; the seconds
of the certificate; those from the command to the first step of a run on the sample's notes, and the
CPU seconds of all processes until then.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil

SMALL = (
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.rollout.n=2",
)
IMPORTS = """
import time, ray, verl.trainer.main_ppo, verl.experimental.agent_loop.agent_loop, \
verl.workers.engine_workers
began = time.process_time()
import medserl_agentloop.core.trainer, medserl_agentloop.core.agent_loop, \
medserl_agentloop.games.medical.interaction
print(time.process_time() - began)
"""
MEASURES = (
    "own imports, CPU s",
    "certificate, s",
    "command to first step, s",
    "all processes till then, CPU s",
)


def measure(checkout: Path, recipe: str, folder: Path) -> tuple[float, ...]:
    """The values of MEASURES for a run of one step in an empty folder."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "RAY_ADDRESS": "local"}
    imports = subprocess.run(
        [sys.executable, "-c", IMPORTS], env=environment, check=True, capture_output=True
    )
    sample = checkout / "data_prep" / "sample" / "medserl_sample.csv"
    convert = [
        sys.executable,
        checkout / "data_prep" / "medec_to_parquet.py",
        "--input",
        sample,
        "--output",
        folder,
    ]
    subprocess.run(convert, env=environment, check=True, capture_output=True)
    files = [f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/val.parquet"]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", f"+recipes={recipe}", *SMALL, *files]
    command += [
        f"trainer.default_local_dir={folder}/run",
        "trainer.total_training_steps=1",
        "trainer.save_freq=-1",
    ]
    log, metrics = folder / "log", folder / "run" / "metrics.jsonl"
    used, history = dict[int, float](), list[tuple[float, float]]()
    began = time.monotonic()
    with log.open("w") as output:
        run = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        while run.poll() is None and not (metrics.exists() and metrics.read_text().endswith("\n")):
            for process in [
                psutil.Process(run.pid),
                *psutil.Process(run.pid).children(recursive=True),
            ]:
                with suppress(
                    psutil.NoSuchProcess
                ):  # a process that has ended keeps its last figure
                    used[process.pid] = sum(process.cpu_times()[:2])
            history.append((time.monotonic() - began, sum(used.values())))
            time.sleep(0.1)
        run.wait()
    if run.returncode:
        raise SystemExit(log.read_text()[-3000:])
    # The metrics are written when the step ends.
    first = history[-1][0] - json.loads(metrics.read_text().splitlines()[0])["timing_s/step"]
    certificate = re.search(r"certificate: .* ([\d.]+) s", log.read_text())
    return (
        float(imports.stdout),
        float(certificate[1]) if certificate else 0.0,
        *min(history, key=lambda moment: abs(moment[0] - first)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", default=[".=own_notes"], metavar="CHECKOUT=RECIPE")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    found: dict[str, list[tuple[float, ...]]] = {named: [] for named in arguments.runs}
    for number in range(arguments.rounds):
        for named in arguments.runs:
            checkout, _, recipe = named.partition("=")
            with tempfile.TemporaryDirectory() as folder:
                found[named].append(measure(Path(checkout).resolve(), recipe, Path(folder)))
            print(
                f"round {number + 1}, {named}: "
                f"{', '.join(f'{value:.2f}' for value in found[named][-1])}",
                flush=True,
            )
    for at, measured in enumerate(MEASURES):
        values = {named: median(row[at] for row in rows) for named, rows in found.items()}
        base = values[arguments.runs[-1]]
        print(
            f"{measured}: "
            + "; ".join(
                f"{named} {value:.2f} ({value / base:.2f})" for named, value in values.items()
            )
        )


if __name__ == "__main__":
    main()
