"""A run of verl's for ``benchmarks/gpu.py``, and what is sampled beside it: memory, and counters of
its servers.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

FOLDER = Path(__file__).resolve().parent
SAMPLED_EVERY_S = 0.5
MAIN_PPO = ("-m", "verl.trainer.main_ppo")
PHASES = (
    *("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"),
    *("save_checkpoint", "update_weights"),
)
"""A step of verl's in its order, by the names of its timings."""
PACKAGES = (
    *("medserl-agentloop", "verl", "torch", "transformers", "ray", "numpy", "pandas"),
    *("sglang", "flash-attn"),
)


def machine() -> dict[str, Any]:
    """Return the facts that the figures depend on. No names of machines or folders."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{
            each.name.lower(): each.version
            for each in distributions()
            if each.name.lower() in PACKAGES
        },
    }


def cards() -> list[dict[str, str]]:
    """Name, driver and memory (MiB) of each GPU, as ``nvidia-smi`` says; empty without one."""
    names = ("name", "driver_version", "memory.total", "memory.used")
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [dict(zip(names, line.split(", "), strict=True)) for line in printed.splitlines()]


def alive(process: psutil.Process) -> bool:
    """Return whether a process runs; in a container, nobody may fetch the exit codes of those that
    do not.
    """
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def used_gib(family: set[psutil.Process], gpu: bool) -> float:
    """Memory in use on the fullest GPU, or the resident memory of a run's processes."""
    if gpu:
        return max((float(card["memory.used"]) for card in cards()), default=0.0) / 1024
    used = 0
    for process in family:
        with suppress(psutil.NoSuchProcess):
            used += process.memory_info().rss
    return used / 2**30


def prefix_cache(file: Path) -> tuple[float, float] | None:
    """Prompt tokens that came out of the prefix cache, and all of them, by the counters of the
    run's servers.
    """
    names = {"sglang:cached_tokens_total": 0, "sglang:prompt_tokens_total": 1}
    counted = [0.0, 0.0]
    try:
        for server in re.findall(r"- (\S+:\d+)$", file.read_text(encoding="utf-8"), re.M):
            for line in httpx.get(
                f"http://{server}/metrics", timeout=5, trust_env=False
            ).text.splitlines():
                if (name := line.partition("{")[0]) in names:
                    counted[names[name]] += float(line.rpartition(" ")[2])
    except (OSError, httpx.HTTPError):  # no server yet, or none any more
        return None
    return (counted[0], counted[1]) if counted[1] else None


@dataclass
class Ran:
    """A run that is over: verl's metrics by step, and what was sampled beside it."""

    log: Path
    code: int = 0
    steps: list[dict[str, Any]] = field(default_factory=list)
    used_gib: list[float] = field(default_factory=list)
    cache: tuple[float, float] | None = None

    def read(self, metrics: Path) -> None:
        """Take in the steps that verl's file logger has written."""
        lines = metrics.read_text(encoding="utf-8").split("\n")[:-1] if metrics.exists() else []
        self.steps = [json.loads(line)["data"] for line in lines]

    def number(self, name: str) -> float | None:
        """The median of a metric over all steps but the first; None if verl did not report it."""
        seconds = [step[name] for step in self.steps[1:] if name in step]
        return float(median(seconds)) if seconds else None

    def at(self, step: int, name: str) -> float | None:
        """A metric of one step, by its place in the list."""
        return self.steps[step].get(name) if self.steps else None


def run(
    output: Path, name: str, command: Sequence[str], *, gpu: bool, kill_after: int = 0, **env: str
) -> Ran:
    """Run Python to its end, or until verl has logged step ``kill_after``, which it does after the
    checkpoint.
    """
    ran, metrics, servers = (
        Ran(output / f"{name}.log"),
        output / f"{name}.jsonl",
        output / "servers.yml",
    )
    servers.unlink(missing_ok=True)
    modules = [
        FOLDER.parent,
        FOLDER,
        FOLDER.parent / "tests" / "training",
        os.environ.get("PYTHONPATH"),
    ]
    env |= {
        "PYTHONPATH": os.pathsep.join(str(folder) for folder in modules if folder),
        "RAY_ADDRESS": "local",
    }
    env |= {"VERL_FILE_LOGGER_PATH": str(metrics), **({} if gpu else {"VERL_PLATFORM": "cpu"})}
    command = [sys.executable, *command]
    with ran.log.open("w", encoding="utf-8") as log:
        process = psutil.Popen(
            command,
            cwd=output,
            env=os.environ | env,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    family = {psutil.Process(process.pid)}
    try:
        while process.poll() is None and not 0 < kill_after <= len(ran.steps):
            time.sleep(SAMPLED_EVERY_S)
            with suppress(psutil.NoSuchProcess):
                family |= set(process.children(recursive=True))
            ran.used_gib.append(used_gib(family, gpu))
            ran.cache = prefix_cache(servers) or ran.cache
            ran.read(metrics)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        ran.code = process.wait()
        if not kill_after:
            ran.read(metrics)
        give_up = time.monotonic() + 30
        while (
            left := [member for member in family if alive(member)]
        ) and time.monotonic() < give_up:
            time.sleep(0.2)
        for member in left:
            with suppress(psutil.NoSuchProcess):
                member.kill()
    return ran
