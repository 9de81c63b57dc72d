"""A live run in the terminal: its step, the time left, its main curves, alarms and the last game. ``medserl watch``.

Reads nothing but the run's files, so it works beside the run, or on a copy of its folder, and costs the run nothing.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from medserl_agentloop.command_line import visible
from medserl_agentloop.core.alarms import METRIC_PREFIX
from medserl_agentloop.core.records import GameRecord as AnyGame
from medserl_agentloop.core.step_file import GAMES_FILE, METRICS_FILE
from medserl_agentloop.games.medical.records import GameRecord

CURVES = (
    r"selfplay/[^/]+/reward",
    r"selfplay/assessor/accuracy",
    r"selfplay/attacker/valid_rate",
    r"selfplay/shortcut/index",
    r"actor/grad_norm",
)
"""Metrics that are drawn, those that the run has."""
WIDTH = 40
_BARS = "▁▂▃▄▅▆▇█"
_RECENT = 10
"""Steps that the time left follows."""
_TAIL = 1 << 20
"""Bytes at the end of the games file that hold at least one game."""


def watch_run(run: Path, console: Console, *, every: float, once: bool = False) -> None:
    """Show a run until its last step is done or the person presses Ctrl-C; what is not there yet is waited for.

    Args:
        run: The run's ``selfplay.records`` folder.
        console: Where to show it; one that is no terminal gets the state of now, as ``once``.
        every: Seconds between two looks.
        once: Print the state of now and return.
    """
    if once or not console.is_terminal:
        console.print(frame(run, steps_of(run)))
        return
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                rows = steps_of(run)
                live.update(frame(run, rows), refresh=True)
                if rows and rows[-1]["step"] == rows[-1].get("steps"):
                    return
                time.sleep(every)
    except KeyboardInterrupt:
        return


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The metrics of each step, in order. A line that is not whole yet is left out; lines of one step are one."""
    rows = [row for line in _lines(run / METRICS_FILE) if isinstance((row := _parsed(line)), dict)]
    by_step: dict[int, dict[str, Any]] = {}
    for row in rows:
        if isinstance(row.get("step"), int):
            by_step.setdefault(row["step"], {}).update(row)
    return [by_step[step] for step in sorted(by_step)]


def frame(run: Path, rows: Sequence[dict[str, Any]]) -> RenderableType:
    """The state of the run as one picture."""
    if not rows:
        return Text(visible(f"{run}: waiting for the first step ({METRICS_FILE})"))
    last = rows[-1]
    step, steps = last["step"], last.get("steps")
    progress = f"step {step}" + (f" of {steps}" if steps else "")
    took = [row["timing_s/step"] for row in rows[-_RECENT:] if _is_number(row.get("timing_s/step"))]
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
            curves.add_row(Text(visible(name)), sparkline(values), *numbers)
    fired = [(row["step"], name.removeprefix(METRIC_PREFIX)) for row in rows for name in row if METRIC_PREFIX in name]
    alarms = ", ".join(f"{name} (step {at})" for at, name in fired[-3:]) or "none"
    lines = (f"alarms: {alarms}", f"last game: {_last_game(run / GAMES_FILE)}")
    return Group(
        Text(visible(f"{run}"), style="dim"),
        Text(progress, style="bold"),
        curves,
        *(Text(visible(line)) for line in lines),
    )


def sparkline(values: Sequence[float]) -> str:
    """The values as bars between the lowest and the highest; each bar is the mean of as many as fit the width."""
    per_bar = math.ceil(len(values) / WIDTH)
    parts = [values[start : start + per_bar] for start in range(0, len(values), per_bar)]
    means = [sum(part) / len(part) for part in parts]
    low, span = min(means), max(means) - min(means)
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1)) if span else 0] for mean in means)


def _last_game(path: Path) -> str:
    """The last whole line of a games file in one line."""
    for line in reversed(_lines(path, _TAIL)):
        values = _parsed(line)
        for kind in (GameRecord, AnyGame):  # a game of a user's own has no outcome
            try:
                game = kind.model_validate(values)
            except ValueError:
                continue
            how = game.outcome.value if isinstance(game, GameRecord) else game.void or ""
            facts = [f"step {game.step}", game.kind, how]
            facts += [f"{getattr(role, 'value', role)} {game.reward(role):+.2f}" for role in game.rewards]
            facts += [f"{game.finished:%H:%M:%S} UTC"] if game.finished else []
            return ", ".join(filter(None, facts))
    return "none yet"


def _lines(path: Path, most: int | None = None) -> list[bytes]:
    """The lines of a file in its last ``most`` bytes; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            if most is not None:
                file.seek(max(0, path.stat().st_size - most))
            return file.read().splitlines()
    except OSError:
        return []


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):  # half-written
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
