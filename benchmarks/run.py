"""Every benchmark, one after the other, in rounds: ``python benchmarks/run.py --short --rounds 3 -o results.json``.

A round runs every script once, so other work on the machine slows all alike; the scripts take turns within themselves
in the same way. The table has, over the rounds, the median time and its range, CPU time and peak memory of each script
with its processes. The JSON has the same, what each script printed, and facts of the machine. ``--short`` is the form
that the tests run. Exits with 1 where a script failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).parent
SHORT_FORMS = {
    "adapters": "--rounds 1 --games 4",
    "advantages": "--rows 16 --tokens 64 --repeats 1",
    "agent_loop": "--games 4 --repeats 1 --slots 4,2 --median 0.01",
    "cpu_step": "--games 2 --rounds 1 --tokens 4",
    "data_prep": "--rows 100,200",
    "game_core": "--labels 8 --http 8",
    "packed_attention": "--sequences 1 2",
    "plan_memory": "",
    "soak": "--games 40",
}
"""Their arguments in the short form. Left out are those that need SGLang (``prefix_reuse``), a browser, or real runs
(``gpu``, ``kills``)."""
PACKAGES = ("medserl-agentloop", "verl", "torch", "transformers", "ray", "numpy", "pandas")


def machine(*more: str) -> dict[str, Any]:
    """What the figures depend on, with the versions of ``more`` packages. No names of machines or folders."""
    cpu = Path("/proc/cpuinfo")
    models = [line.partition(":")[2].strip() for line in cpu.read_text().splitlines() if line.startswith("model name")]
    found: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load": round(os.getloadavg()[0], 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
    }
    for package in (*PACKAGES, *more):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def run(script: str, arguments: str) -> dict[str, Any]:
    """One run of a script. Memory is that of its largest process."""
    paths = [str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "COLUMNS": "120"}
    command = [sys.executable, str(FOLDER / f"{script}.py"), *arguments.split()]
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as said:
        started = time.perf_counter()
        child = subprocess.Popen(command, env=environment, stdout=printed, stderr=said)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        found = {"exit": child.returncode, "seconds": time.perf_counter() - started}
        for file in (printed, said):
            file.seek(0)
        if child.returncode:
            sys.stderr.write(said.read().decode(errors="replace"))
        found |= {"cpu_s": usage.ru_utime + usage.ru_stime, "peak_mb": usage.ru_maxrss * 1024 / 1e6}
        return {**found, "printed": printed.read().decode(errors="replace")}


def main() -> None:
    """Run them, print the table and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="the short form of each script")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=SHORT_FORMS, default=list(SHORT_FORMS), help="these scripts")
    parser.add_argument("--output", "-o", type=Path, help="JSON file for all results")
    options = parser.parse_args()
    facts, runs = machine(), defaultdict[str, list[dict[str, Any]]](list)
    for number in range(options.rounds):
        for script in options.only:
            print(f"round {number + 1} of {options.rounds}: {script}", file=sys.stderr, flush=True)
            runs[script].append(run(script, SHORT_FORMS[script] if options.short else ""))
    table = Table("script", "s, median", "from", "to", "CPU s", "peak MB", "failed")
    for script, each in runs.items():
        seconds, cpu, peak = ([one[name] for one in each] for name in ("seconds", "cpu_s", "peak_mb"))
        numbers = (median(seconds), min(seconds), max(seconds), median(cpu), max(peak))
        table.add_row(script, *(f"{value:.1f}" for value in numbers), str(sum(one["exit"] != 0 for one in each)))
        print(f"--- {script}\n{each[-1]['printed']}")
    Console(width=120).print(table)
    if options.output is not None:
        options.output.write_text(json.dumps({"machine": facts, "short": options.short, "runs": runs}, indent=1) + "\n")
    sys.exit(any(one["exit"] for each in runs.values() for one in each))


if __name__ == "__main__":
    main()
