"""A live run in the terminal: its step, the time left, its main curves and alarms. ``medserl watch``.

Reads nothing but the run's files, so it works beside the run, or on a copy of its folder, and costs the run nothing.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from medserl_agentloop.command_line import plain
from medserl_agentloop.core.alarms import METRIC_PREFIX
from medserl_agentloop.core.step_file import METRICS_FILE, from_line

CURVES = (
    r"selfplay/[^/]+/reward",
    r"selfplay/assessor/accuracy",
    r"selfplay/attacker/valid_rate",
    r"selfplay/shortcut/index",
    r"actor/grad_norm",
)
"""Metrics that are drawn, those that the run has."""
SECONDS = "timing_s/step"
"""The metric that says how many seconds a step took."""
WIDTH = 40
_BARS = "▁▂▃▄▅▆▇█"
_RECENT = 10  # steps that the time left follows


def watch_run(run: Path, console: Console, *, every: float, once: bool = False) -> None:
    """Show a run (its ``selfplay.records``) every so many seconds until its last step is done, or till Ctrl-C.

    What is not there yet is waited for. With ``once``, or on a console that is no terminal, print the state of now.
    """
    if once or not console.is_terminal:
        console.print(frame(run, steps_of(run)))
        return
    try:
        with Live(console=console, auto_refresh=False) as live:
            shown: Any = ""
            while True:
                if (now := _state(run / METRICS_FILE)) != shown:  # a step takes minutes, a long file half a second
                    rows, shown = steps_of(run), now
                    live.update(frame(run, rows), refresh=True)
                    if rows and rows[-1]["step"] == rows[-1].get("steps"):
                        return
                time.sleep(every)
    except KeyboardInterrupt:
        return


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The metrics of each step that are shown, in order.

    A line that is not whole yet is left out; lines of one step are one.
    """
    by_step: dict[int, dict[str, Any]] = defaultdict(dict)
    with suppress(OSError), (run / METRICS_FILE).open("rb") as file:
        for line in file:
            with suppress(ValueError, TypeError, KeyError, OverflowError, AttributeError):
                row = from_line(line)
                by_step[int(row["step"])].update({name: row[name] for name in row if _is_shown(name)})
    return [by_step[step] for step in sorted(by_step)]


def _state(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


@lru_cache(10_000)
def _is_shown(name: str) -> bool:
    return name in ("step", "steps", SECONDS) or METRIC_PREFIX in name or any(re.fullmatch(of, name) for of in CURVES)


def frame(run: Path, rows: Sequence[dict[str, Any]]) -> RenderableType:
    """The state of the run as one picture."""
    if not rows:
        return plain(f"{run}: waiting for the first step ({METRICS_FILE})")
    last = rows[-1]
    step, steps = last["step"], last.get("steps")
    progress = f"step {step}" + (f" of {steps}" if steps else "")
    took = [row[SECONDS] for row in rows[-_RECENT:] if _is_number(row.get(SECONDS))]
    if took:
        seconds = sum(took) / len(took)
        progress += f", {seconds:.3g} s per step"
        if steps:
            progress += f", {timedelta(seconds=round(seconds * (steps - step)))} left"
    curves = Table("metric", "by step", "now", "lowest", "highest", box=None, pad_edge=False)
    names = dict.fromkeys(name for row in rows for name in row)
    for name in (name for curve in CURVES for name in names if re.fullmatch(curve, name)):
        values = [float(row[name]) for row in rows if _is_number(row.get(name))]
        if values:
            numbers = (f"{value:.3g}" for value in (values[-1], min(values), max(values)))
            curves.add_row(plain(name), sparkline(values), *numbers)
    fired = [(row["step"], name.removeprefix(METRIC_PREFIX)) for row in rows for name in row if METRIC_PREFIX in name]
    alarms = ", ".join(f"{name} (step {at})" for at, name in fired[-3:]) or "none"
    return Group(
        plain(f"{run}", style="dim"),
        Text(progress, style="bold"),
        curves,
        plain(f"alarms: {alarms}"),
    )


def sparkline(values: Sequence[float]) -> str:
    """The values as bars between the lowest and the highest; each bar is the mean of as many as fit the width."""
    per_bar = math.ceil(len(values) / WIDTH)
    parts = [values[start : start + per_bar] for start in range(0, len(values), per_bar)]
    means = [sum(part) / len(part) for part in parts]
    low, span = min(means), max(means) - min(means)
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1)) if span else 0] for mean in means)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
