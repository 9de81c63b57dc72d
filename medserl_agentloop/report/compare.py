"""``medserl compare``: two sides next to each other, each one run or several seeds.

A run of any game and a log of the OpenRLHF system (JSON lines) are read into the same frames, so
every number has one definition. What a side did not record is "not measured", never 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from glob import glob
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from medserl_agentloop import report
from medserl_agentloop.core.step_file import GAMES_FILE, METRICS_FILE
from medserl_agentloop.paths import regular_file
from medserl_agentloop.scoring.metrics import share_difference, student_quantile, wilson_interval

NOT_MEASURED = "not measured"
NO_DIFFERENCE = "no difference shown"
SECONDS = "timing_s/step"
_READ_LOG = "medserl_agentloop.medical_team.openrlhf_files:read_log"
_PLACES = {"step", "session", "policy_version"}  # numbers whose mean says nothing
_OF_STEPS = {
    SECONDS: "seconds per step",
    "actor/perf/max_memory_allocated_gb": "device memory, GB",
    "actor/perf/cpu_memory_used_gb": "CPU memory, GB",
}
_HEADLINES = ("error found", "note cleared")  # for a medical game; for others, the rewards


class _Run(NamedTuple):
    """One run, or one log of the OpenRLHF system, which does not record everything."""

    name: str  # its path
    schemes: str  # names of its reward schemes; empty if it does not say
    games: pd.DataFrame
    metrics: pd.DataFrame  # by step; without columns if it has none

    @property
    def steps(self) -> tuple[int, int] | None:
        """The first and last step of its games, if they are recorded."""
        steps = self.games["step"].dropna()
        return None if steps.empty else (int(steps.min()), int(steps.max()))


Side = Sequence[_Run]


class _Section(NamedTuple):
    """A table of the comparison and notes on it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str


def read_side(side: str, steps: tuple[int, int] | None = None) -> Side:
    """The runs of one side: a run's folder, a folder of such folders, a log, or a pattern of these.

    ``steps`` are the first and last step to compare. ValueError names what is not a run.
    """
    runs: list[Path] = []
    for path in map(Path, sorted(glob(side)) or [side]):
        if not path.exists():
            raise ValueError(
                f"{path} does not exist: give the folder of a run, a log (.jsonl), or a pattern in "
                "quotes"
            )
        found = {file.parent for file in path.rglob(GAMES_FILE)} if path.is_dir() else {path}
        if not found:
            raise ValueError(f"{path} is not a run: neither it nor its folders hold {GAMES_FILE}")
        # A run's folder also holds games of medserl tournament and progress, which are not runs.
        runs += sorted(folder for folder in found if found.isdisjoint(folder.parents))
    return [_within(_read(run), steps) for run in runs]


def _within(run: _Run, steps: tuple[int, int] | None) -> _Run:
    """The run with the games and metrics of these steps only."""
    if steps is None:
        return run
    games = run.games[run.games["step"].between(*steps).fillna(False)]
    if games.empty:
        raise ValueError(
            f"{run.name} has no games of steps {steps[0]} to {steps[1]}: give --steps that both "
            "sides have"
        )
    return run._replace(games=games, metrics=run.metrics.loc[steps[0] : steps[1]])


def _read(path: Path) -> _Run:
    if path.is_file() and path.name != GAMES_FILE:
        with regular_file(path).open("rb") as file:
            if b'"rewards"' not in file.readline():  # every game record has them
                return _Run(str(path), "", *resolve_name(_READ_LOG)(path))
    games, schemes = [], set()
    game, records = report.read_run(path)
    for part in report.parts(records):
        frame = report.games_frame(part, game)
        # Without texts: a run may have a million games.
        kept = ("boolean", "Int64", "Float64")
        games.append(frame[[n for n in frame if n == "outcome" or frame[n].dtype in kept]])
        schemes |= {getattr(record, "scheme", "") for record in part}
    metrics = report.metrics(path) if (path / METRICS_FILE).exists() else pd.DataFrame()
    whole = pd.concat(games, ignore_index=True)
    return _Run(str(path), "; ".join(sorted(schemes - {""})), whole, metrics)


Runs = Sequence["pd.Series[Any]"]
"""One number of a side's games, for each of its runs that has it."""

Difference = tuple[float, float, float]
"""B minus A, and the ends of its 95 % interval."""


def compare(a: Side, b: Side) -> tuple[list[_Section], str]:
    """The tables of a comparison, and in a sentence what differs between the two sides."""
    outcomes = sorted({word for run in (*a, *b) for word in run.games["outcome"].dropna()})
    sides = [[_numbers(run, outcomes) for run in side] for side in (a, b)]
    rows, said = [], {}
    for title in dict.fromkeys(name for side in sides for numbers in side for name in numbers):
        first, second = ([run[title] for run in side if title in run] for side in sides)
        difference = _difference(first, second) if first and second else None
        rows.append((title, _cell(first), _cell(second), _moved(difference, first)))
        if difference:
            low, high = difference[1:]
            moved = _moved(difference, first) if low > 0 or high < 0 else NO_DIFFERENCE
            said[title] = f"{title} {_mean(first)} in A, {_mean(second)} in B ({moved})"
    headlines = [said[title] for title in _HEADLINES if title in said]
    if not headlines and len({run.schemes for run in (*a, *b)}) == 1:
        headlines = [words for title, words in said.items() if title.endswith(" reward")]
    note = (
        "Shares are in % with Wilson's 95 % interval, other numbers are means ± standard "
        "deviation; the count of games or steps is in parentheses. If both sides have several "
        "runs, the interval of a difference is over runs (Student's t), otherwise over games, "
        "assumed to be independent. Games of one prompt group are not, so such intervals are too "
        "narrow. Compare seconds and memory on one machine only."
    )
    numbers = _Section("Numbers", ["", "A", "B", "B - A [95 % interval]"], rows, note)
    verdict = "; ".join(headlines) or "no number in common from which to say who is better"
    return [_runs(a, b), numbers], verdict


def _numbers(run: _Run, outcomes: Sequence[str]) -> dict[str, pd.Series[Any]]:
    """The numbers of a run's games and steps by title; yes and no are of the type ``boolean``."""
    numbers = {}
    for name in run.games:
        known = run.games[name].dropna()
        if not len(known) or name in _PLACES:
            continue
        if name == "outcome":
            for word in outcomes:
                title = f"outcome: {report.outcome_words(word)}"
                numbers[title] = (known == word).astype("boolean")
        else:
            title = name.removeprefix("reward/").replace("/", ": ").replace("_", " ")
            numbers[title] = known
    of_steps = {
        title: run.metrics[n].dropna() for n, title in _OF_STEPS.items() if n in run.metrics
    }
    return numbers | {title: known for title, known in of_steps.items() if len(known)}


def _difference(first: Runs, second: Runs) -> Difference | None:
    """B minus A with its interval, over runs where both sides have several, else over games."""
    pooled = [pd.concat(runs) for runs in (first, second)]
    samples: Any = [games.astype(float) for games in pooled]
    if len(first) > 1 and len(second) > 1:
        samples = [np.array([float(run.mean()) for run in runs]) for runs in (first, second)]
    elif _is_share(first):
        a, b = ((int(games.sum()), len(games)) for games in pooled)
        return share_difference(a, b)
    x, y = samples
    if min(len(x), len(y)) < 2:
        return None
    error = (x.var(ddof=1) / len(x) + y.var(ddof=1) / len(y)) ** 0.5
    half = float(error * student_quantile(len(x) + len(y) - 2))
    difference = float(y.mean() - x.mean())
    return difference, difference - half, difference + half


def _is_share(runs: Runs) -> bool:
    return bool(runs[0].dtype == "boolean")


def _mean(runs: Runs) -> str:
    value = float(pd.concat(runs).mean())
    return f"{100 * value:.1f} %" if _is_share(runs) else f"{value:.4g}"


def _cell(runs: Runs) -> str:
    if not runs:
        return NOT_MEASURED
    pooled = pd.concat(runs)
    spread = f"± {float(pooled.astype(float).std(ddof=0)):.4g}"
    if _is_share(runs):
        low, high = wilson_interval(int(pooled.sum()), len(pooled))
        spread = f"[{100 * low:.1f}, {100 * high:.1f}]"
    return f"{_mean(runs)} {spread} ({len(pooled)})"


def _moved(difference: Difference | None, runs: Runs) -> str:
    if difference is None:
        return ""
    unit, form = (100, "+.1f") if _is_share(runs) else (1, "+.4g")
    value, low, high = (f"{unit * number:{form}}" for number in difference)
    return f"{value} [{low}, {high}]"


def _runs(a: Side, b: Side) -> _Section:
    rows = []
    for side, run in (*(("A", run) for run in a), *(("B", run) for run in b)):
        played = " to ".join(map(str, run.steps or ["?"]))
        rows.append((side, run.name, played, str(len(run.games)), run.schemes or "not recorded"))
    notes = []
    if len({run.schemes for run in (*a, *b)}) > 1:
        notes.append("The reward schemes differ or are not recorded: rewards cannot be compared.")
    if len(steps := {run.steps for run in (*a, *b) if run.steps}) > 1:
        first, last = max(first for first, _ in steps), min(last for _, last in steps)
        same = f": --steps {first} {last} compares the same ones" if first <= last else ""
        notes.append(
            f"Warning: their games are from different steps, maybe the only difference{same}."
        )
    return _Section("Runs", ["side", "run", "steps", "games", "rewards"], rows, " ".join(notes))
