"""Records of a training step: games and metrics on disk, a row on the screen, W&B, alarms.

The trainer gives it the games of a step and verl's numbers, and asks it whether to stop.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from medserl_agentloop.core.metrics import (
    HealthMonitor,
    finite,
    lost_games_metrics,
    opponent_metrics,
    stop_message,
    storable,
    turn_metrics,
)
from medserl_agentloop.core.records import GameRecord
from medserl_agentloop.terminal import announce

if TYPE_CHECKING:
    import torch

    from medserl_agentloop.core.interaction import Interaction
    from medserl_agentloop.core.step_file import RunFiles

TABLE_NAME = "selfplay/games_table"
WANDB_RUN_FILE = "wandb_run_id"
WANDB_GAMES = 8  # in the table of each step
NO_UPDATE = "selfplay/no_update"
"""Metric: 1 if a step changed no weights; verl skips an update with a non-finite gradient."""
LOST_METRICS = "selfplay/lost_metrics"
"""Metric: how many of verl's metrics from the first step are missing in this one."""

_WATCHED = ("actor/", "critic/", "training/")
_ROWS = 20  # of the table of steps, below one line with the names of its columns
# Of rollout and actor; 5e-7 in fp32.
_MISMATCH = ("mismatch", "training/rollout_probs_diff_mean", ".1e")
_UNUSUAL = (("lost games", "selfplay/lost_games"), ("void", "selfplay/void_rate"))

_announce_once = cache(announce)


class StepRecorder:
    """Records the steps of one run; the state of ``health``, the alarms, goes into checkpoints.

    ``stop_reason`` says why the run stops before its next step, or None.
    """

    def __init__(self, game: Interaction[Any, Any], files: RunFiles, *, to_wandb: bool = False):
        self._game, self._files, self._to_wandb = game, files, to_wandb
        self.health = HealthMonitor(game.config.alarms, game.View.rules(game.roles))
        self.stop_reason: str | None = None
        self._table = StepTable(game.roles, game.View.shown)
        self._always: set[str] | None = None  # verl's numbers that the first step has

    def games(
        self,
        step: int,
        records: Sequence[GameRecord],
        role_ids: Sequence[torch.Tensor],
        expected: int,
    ) -> dict[str, float]:
        """Write the games of a step and return their metrics; ``role_ids`` are (T,) each.

        ``expected`` is the number of requested games.
        """
        game = self._game
        for record in records:
            record.step = step
        self._files.games.append(record.to_json() for record in records)
        if self._to_wandb:
            log_games(*games_table(game, records, WANDB_GAMES), step)
        return {
            # First, because a game's own metrics may count its turns in another way.
            **turn_metrics(records, role_ids, game.roles),
            **game.metrics(records),
            **opponent_metrics(records, map(game.view.trained_role_won, records)),
            # verl logs a game whose worker crashed and trains on the rest: here it is counted.
            **lost_games_metrics(expected, len(records)),
        }

    def validation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the numbers of a validation."""
        self._files.metrics.append([{"step": step, **step_numbers(metrics, {})}])

    def step(
        self, step: int, total: int, metrics: Mapping[str, Any], timing: Mapping[str, float]
    ) -> dict[str, float]:
        """Write a step's numbers, print its row and its alarms, and return what was added."""
        numbers = step_numbers(metrics, timing)
        added = self._missing(numbers) | update_metrics(metrics)
        health = self.health.observe(numbers | added)
        added |= health.metrics
        self._files.metrics.append([{"step": step, "steps": total, **numbers, **added}])
        for notice in self._game.view.notices(numbers):
            _announce_once(notice)
        alarms = [alarm.rule.name for alarm in health.firing]
        for line in self._table.lines(step, total, numbers, alarms):
            announce(line)
        for line in health.lines:
            announce(f"alarm {line}")
        if health.firing and self._game.config.on_alarm == "stop":
            self.stop_reason = stop_message(health.firing, step)
        return added

    def _missing(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Count verl's metrics that the first step had and this one lacks; name them once."""
        held = {name for name in numbers if name.startswith(_WATCHED)}
        if self._always is None:
            self._always = held
        lost = sorted(self._always - held)
        if lost:
            _announce_once(f"warning: a step lacks {', '.join(lost[:5])}, which the first one had")
        return {LOST_METRICS: float(len(lost))}


def update_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """``NO_UPDATE`` of a step with an actor update: 1 if no weight changed.

    A zero or non-finite gradient, or a zero learning rate, changes no weight.
    """
    if "actor/grad_norm" not in metrics:
        return {}
    gradient, rate = float(metrics["actor/grad_norm"]), float(metrics.get("actor/lr", 1.0))
    return {NO_UPDATE: float(not (math.isfinite(gradient) and gradient > 0 and rate > 0))}


def step_numbers(metrics: Mapping[str, Any], timing: Mapping[str, float]) -> dict[str, float]:
    """The finite numbers of a step; verl returns NaN if no token was trained."""
    numbers = {n: float(v) for n, v in metrics.items() if isinstance(v, (int, float, np.number))}
    return finite(numbers) | {f"timing_s/{name}": seconds for name, seconds in timing.items()}


class StepTable:
    """The table of steps that a run prints: a few aligned numbers."""

    def __init__(self, roles: Sequence[str], of_game: Sequence[tuple[str, str]]) -> None:
        rewards = [(f"{role} reward", f"selfplay/{role}/reward") for role in roles]
        named = [("seconds", "timing_s/step"), *rewards, *of_game]
        self._columns = [*((label, name, ".3f") for label, name in named), _MISMATCH]
        self._printed = 0
        self._began = 0.0

    def lines(
        self, step: int, total: int, numbers: Mapping[str, float], alarms: Sequence[str]
    ) -> list[str]:
        """Return the row of a step; every twentieth has the column names above it."""
        labels = ["left", *(label for label, *_ in self._columns)]
        widths = [max(8, len(label)) for label in labels]

        def row(first: str, cells: Sequence[str], rest: Sequence[str]) -> str:
            first = first.ljust(len(f"step {total}/{total}"))
            return "  ".join([first, *map(str.rjust, cells, widths), ", ".join(rest)]).rstrip()

        now = time.monotonic()
        if not self._printed:
            self._began = now - numbers["timing_s/step"]
        self._printed += 1
        # The clock, not the sum of the steps: checkpoints and validation take time between them.
        left = timedelta(seconds=round((now - self._began) / self._printed * (total - step)))
        cells = [
            format(numbers[name], form) if name in numbers else "-"
            for _, name, form in self._columns
        ]
        unusual = [f"{label} {numbers[name]:.3g}" for label, name in _UNUSUAL if numbers.get(name)]
        names = [row("step", labels, ["alarm"])] if self._printed % _ROWS == 1 else []
        return [*names, row(f"step {step}/{total}", [str(left), *cells], [*unusual, *alarms])]


def games_table(
    game: Interaction[Any, Any], records: Sequence[GameRecord], count: int
) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of up to ``count`` games for W&B, taken from each outcome in turn."""
    columns = {n: c for n, c in game.view.columns.items() if n not in ("signal", "finished")}
    by_outcome: dict[str, list[GameRecord]] = defaultdict(list)
    for record in records:
        by_outcome[columns["outcome"].value(record)].append(record)
    in_turn = zip_longest(*(by_outcome[outcome] for outcome in sorted(by_outcome)))
    rows = []
    for record in [record for games in in_turn for record in games if record is not None][:count]:
        row = {name: column.value(record) for name, column in columns.items()}
        for section in game.view.sections(record):
            name = section.owner or section.title
            row[name] = "\n\n".join(filter(None, (row.get(name), section.title, section.as_text())))
        rows.append({**row, "rewards": json.dumps(record.rewards)})
    names = list(dict.fromkeys(name for row in rows for name in row))
    return names, [[row.get(name) for name in names] for row in rows]


def log_games(columns: Sequence[str], rows: list[list[Any]], step: int) -> None:
    """Log a step's table of games to the W&B run that verl opened, if there is one."""
    import wandb  # slow to import, and only runs that log to it need it

    if wandb.run is not None:
        data = [[storable(cell) for cell in row] for row in rows]
        # A table per step: W&B keeps them all, and a growing one would be rewritten each time.
        # With an explicit step W&B holds the row open, so that verl's metrics of it join it.
        wandb.run.log({TABLE_NAME: wandb.Table(columns=list(columns), data=data)}, step=step)


def resume_wandb_run(folder: Path, *, resumed: bool) -> None:
    """Let ``wandb.init`` continue this folder's run, or start one: verl passes no id."""
    file = folder / WANDB_RUN_FILE
    if not (resumed and file.is_file()):
        file.write_text(secrets.token_hex(4), encoding="utf-8")
    os.environ.setdefault("WANDB_RUN_ID", file.read_text(encoding="utf-8").strip())
    os.environ.setdefault("WANDB_RESUME", "allow")
    os.environ.setdefault("WANDB_DIR", str(folder))  # by default the working directory


def finish_loggers(tracking: Any, exit_code: int) -> None:
    """End verl's ``Tracking``, and W&B's process, which Ray would end too early."""
    if tracking is not None:
        tracking.finish(exit_code)
        if "wandb" in tracking.logger:
            tracking.logger["wandb"].teardown(exit_code)
