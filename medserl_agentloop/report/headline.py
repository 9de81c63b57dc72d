"""The gain of a run on held-out rows: a sentence, and the curve behind it.

A game names the measures (``GameView.gains``). They are read from the validations in the run's
``metrics.jsonl``, so the terminal, ``medserl show`` and the page say the same numbers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from omegaconf import OmegaConf

from medserl_agentloop import DEFAULT_GAME
from medserl_agentloop.core.config import ConfigError, game_class
from medserl_agentloop.core.step_file import CONFIG_FILE, METRICS_FILE, StepFile

ROWS = "notes"
"""The measure that counts the rows of a data set."""


class Curve(NamedTuple):
    """One measure on one data set, by step; step 0 is before training."""

    data_set: str
    label: str
    values: dict[int, float]  # shares, 0 to 1

    def __str__(self) -> str:
        """E.g. ``errors found 55 → 89 %``; one number if there is one validation."""
        steps = sorted(self.values)
        ends = dict.fromkeys([steps[0], steps[-1]])
        return f"{self.label} {' → '.join(f'{100 * self.values[step]:.0f}' for step in ends)} %"


def gains_of(run: str | Path) -> Sequence[tuple[str, str]]:
    """The labels and validation measures of the run's game; empty if its class is not here."""
    config = Path(run) / CONFIG_FILE
    name = OmegaConf.select(OmegaConf.load(config), "selfplay.game") if config.is_file() else None
    try:
        return tuple(game_class(name or DEFAULT_GAME).View.gains)
    except ConfigError:
        return ()


def curves(run: str | Path) -> list[Curve]:
    """The curves of a run's validations, by data set and then in the order of the game's gains.

    ValueError for a line that is no JSON.
    """
    return _curves(run)[0]


def headline(run: str | Path) -> str | None:
    """Say what was gained from the first validation to the last; None without a validation.

    E.g. ``errors found 55 → 89 %, false alarms 15 → 0 %, 200 held-out notes``. Each of several data
    sets has its own part.
    """
    found, rows = _curves(run)
    by_set: dict[str, list[Curve]] = defaultdict(list)
    for curve in found:
        by_set[curve.data_set].append(curve)
    parts = []
    for name, of_set in by_set.items():
        counted = f"{rows[name]:.0f} held-out {ROWS}" if name in rows else "held-out rows"
        which = f"{name}: " if len(by_set) > 1 else ""
        parts.append(f"{which}{', '.join(map(str, of_set))}, {counted}")
    return "; ".join(parts) or None


def _curves(run: str | Path) -> tuple[list[Curve], dict[str, float]]:
    file = StepFile(Path(run) / METRICS_FILE)
    gains = gains_of(run)
    points: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    rows: dict[str, float] = {}
    for row in file.read() if gains and file.path.is_file() else ():
        for name, value in row.items():
            named = re.fullmatch(r"val-(?:core|aux)/([^/]+)/([^/]+)", name)
            if named is None or not isinstance(value, int | float):
                continue
            points[named[1], named[2]][int(row["step"])] = float(value)
            if named[2] == ROWS:
                rows[named[1]] = float(value)
    data_sets = dict.fromkeys(data_set for data_set, _ in points)
    return [
        Curve(data_set, label, points[data_set, measure])
        for data_set in data_sets
        for label, measure in gains
        if (data_set, measure) in points
    ], rows
