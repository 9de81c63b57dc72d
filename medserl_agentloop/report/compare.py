"""``medserl compare``: two sides next to each other, each one run or several seeds.

A run of any game and a log of the OpenRLHF system (JSON lines) are read into the same frames, so
every number has one definition. What a side did not write down is "not measured", never 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from pkgutil import resolve_name
from statistics import mean, stdev
from typing import Any, NamedTuple

import pandas as pd
from scipy.stats import ks_2samp

from medserl_agentloop import report
from medserl_agentloop.core.step_file import GAMES_FILE, METRICS_FILE
from medserl_agentloop.paths import regular_file
from medserl_agentloop.scoring.metrics import wilson_interval

NOT_MEASURED = "not measured"
SECONDS = "timing_s/step"
_READ_LOG = "medserl_agentloop.medical_team.logs:read_log"
_PLACES = ("session", "policy_version")  # numbers of which no mean says anything, beside the step
CLOSE = 0.1  # means of rewards that differ by no more than this share count as the same
MEMORY = {
    "device memory, peak GB": "actor/perf/max_memory_allocated_gb",
    "CPU memory, peak GB": "actor/perf/cpu_memory_used_gb",
}


@dataclass(frozen=True)
class _MeasuredRun:
    """One run, or one log of the OpenRLHF system, which does not know all."""

    name: str  # its path
    schemes: str  # names of its reward schemes; empty if it does not say
    games: pd.DataFrame
    metrics: pd.DataFrame  # by step; without columns if it has none

    @property
    def roles(self) -> list[str]:
        return [name.removesuffix("_reward") for name in report.reward_columns(self.games)]

    @property
    def steps(self) -> tuple[int, int] | None:
        """The first and the last one of its games; None if they have none."""
        steps = self.games["step"].dropna()
        return None if steps.empty else (int(steps.min()), int(steps.max()))

    def within(self, first: int, last: int) -> _MeasuredRun:
        """The run without its games and metrics of other steps."""
        games = self.games[self.games["step"].between(first, last).fillna(False)]
        if games.empty:
            raise ValueError(
                f"{self.name} has no games of steps {first} to {last}: give --steps that both "
                "sides have"
            )
        return replace(self, games=games, metrics=self.metrics.loc[first:last])


Side = Sequence[_MeasuredRun]


class _Section(NamedTuple):
    """A table of the comparison, and notes that its reader needs."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str


def read_side(side: str, steps: tuple[int, int] | None = None) -> Side:
    """The runs of one side: a run's folder, a folder of such folders, a log, or a pattern of these;
    or a ValueError.

    ``steps``, the first and the last, leave out the others.
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
            raise ValueError(f"{path} is no run: neither it nor a folder in it holds {GAMES_FILE}")
        # In the folder of a run are the games that its players played outside of it: medserl
        # tournament and progress.
        runs += sorted(folder for folder in found if found.isdisjoint(folder.parents))
    measured = (_read(run) for run in runs)
    return [run.within(*steps) if steps else run for run in measured]


def _read(path: Path) -> _MeasuredRun:
    if path.is_file() and path.name != GAMES_FILE:
        with regular_file(path).open("rb") as file:
            if b'"rewards"' not in file.readline():  # every game record has them
                return _MeasuredRun(str(path), "", *resolve_name(_READ_LOG)(path))
    games, schemes = [], set()
    game, records = report.read_run(path)
    for part in report.parts(records):
        frame = report.games_frame(part, game)
        games.append(frame[[name for name in frame if _is_compared(name, frame[name])]])
        schemes |= {getattr(record, "scheme", "") for record in part}
    return _MeasuredRun(
        str(path),
        "; ".join(sorted(schemes - {""})),
        pd.concat(games, ignore_index=True),
        report.metrics(path) if (path / METRICS_FILE).exists() else pd.DataFrame(),
    )


def _is_compared(name: str, values: pd.Series) -> bool:
    """Return whether a column of the games is kept; a run may have a million games, so texts are
    not.
    """
    return name == "outcome" or (
        values.dtype in ("boolean", "Int64", "Float64") and name not in _PLACES
    )


def compare(a: Side, b: Side) -> list[_Section]:
    return [_runs(a, b), _numbers(a, b), _rates(a, b), _speed(a, b)]


def _runs(a: Side, b: Side) -> _Section:
    rows = [
        (
            side,
            run.name,
            " to ".join(map(str, run.steps or ["?"])),
            str(len(run.games)),
            run.schemes or "not recorded",
        )
        for side, runs in (("A", a), ("B", b))
        for run in runs
    ]
    note = (
        "Several runs of a side are its seeds: their games are pooled, and ± is the deviation "
        "between them."
    )
    if len({run.schemes for run in (*a, *b)}) > 1:
        note += " The reward schemes differ or are not recorded: rewards compare only under one."
    if len(steps := {run.steps for run in (*a, *b) if run.steps}) > 1:
        first, last = max(first for first, _ in steps), min(last for _, last in steps)
        same = f": --steps {first} {last} compares the same ones" if first <= last else ""
        note += (
            f" Warning: their games are of different steps, which may be all that differs{same}."
        )
    return _Section("Runs", ["side", "run", "steps", "games", "reward scheme"], rows, note)


def _numbers(a: Side, b: Side) -> _Section:
    """Rewards of the roles, their components, then every other number of a game."""
    rows = []
    every = pd.concat([run.games.head(0) for run in (*a, *b)])
    named = {role: f"{role}_reward" for run in (*a, *b) for role in run.roles}
    named |= {
        ": ".join(name.split("/", 2)[1:]): name
        for name in sorted(every)
        if name.startswith("reward/")
    }
    others = every.select_dtypes("number").columns.difference([*named.values(), "step"])
    for title, column in (named | {name.replace("_", " "): name for name in others}).items():
        none = pd.Series(dtype=float)
        sides = [
            [run.games.get(column, none).dropna().astype(float) for run in runs] for runs in (a, b)
        ]
        x, y = (pd.concat(rewards) for rewards in sides)
        if x.empty and y.empty:
            continue
        row = [title]
        for rewards, pooled in zip(sides, (x, y), strict=True):
            seeds = (
                f"; seeds {_spread([each.mean() for each in rewards if len(each)])}"
                if len(rewards) > 1
                else ""
            )
            cell = f"{pooled.mean():.4f}, {pooled.std(ddof=0):.4f} ({len(pooled)}{seeds})"
            row.append(NOT_MEASURED if pooled.empty else cell)
        if x.empty or y.empty:
            rows.append([*row, *[NOT_MEASURED] * 4])
            continue
        difference = float(y.mean() - x.mean())
        share = abs(difference / x.mean()) if x.mean() else None
        close = (
            ["mean of A is 0", ""]
            if share is None
            else [f"{share:.1%}", "yes" if share <= CLOSE else "no"]
        )
        test = "{:.3f}, {:.2g}".format(*ks_2samp(x, y)[:2])
        rows.append([*row, f"{difference:+.4f}", *close, test])
    columns = [
        "mean of",
        "A: mean, sd (games)",
        "B",
        "B - A",
        "relative",
        f"within {CLOSE:.0%}",
        "KS test: D, p",
    ]
    note = (
        "Over the games that reward the role, or have the number; the relative difference is that "
        "of the means, over "
        "the mean of A. The Kolmogorov-Smirnov test takes games for independent. Those of one "
        "prompt group are not: "
        "its p is too small."
    )
    return _Section("Rewards and other numbers", columns, rows, note)


def _counts(side: Side, outcomes: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Count each of the ``outcomes`` and each column of yes and no: how often it was true, of how
    many games.
    """
    games = pd.concat([run.games for run in side])
    flags = {
        name.replace("_", " "): games[name] for name in games if games[name].dtype == "boolean"
    }
    ended = games["outcome"].dropna()
    flags |= {f"outcome: {report.outcome_words(word)}": ended == word for word in outcomes}
    return {name: (int(values.sum()), int(values.count())) for name, values in flags.items()}


def _rates(a: Side, b: Side) -> _Section:
    outcomes = sorted({word for run in (*a, *b) for word in run.games["outcome"].dropna().unique()})
    sides, rows = [_counts(side, outcomes) for side in (a, b)], []
    for name in dict.fromkeys(name for counts in sides for name in counts):
        cells, intervals = [], []
        for counts in sides:
            successes, trials = counts.get(name, (0, 0))
            low, high = wilson_interval(successes, trials)
            cells.append(
                f"{successes / trials:.3f} [{low:.3f}, {high:.3f}] ({trials})"
                if trials
                else NOT_MEASURED
            )
            intervals.append((low, high))
        (low_a, high_a), (low_b, high_b) = intervals
        overlap = (
            "" if NOT_MEASURED in cells else "yes" if low_a <= high_b and low_b <= high_a else "no"
        )
        if cells != [NOT_MEASURED] * 2:
            rows.append([name, *cells, overlap])
    columns = ["share", "A [95 % interval] (of)", "B", "intervals overlap"]
    note = (
        "Wilson's intervals, over all steps and seeds; they take games for independent. The "
        "columns of the table of "
        "games say of what each is a share; outcomes are shares of all games."
    )
    return _Section("Outcomes and format", columns, rows, note)


def _speeds(run: _MeasuredRun) -> dict[str, float]:
    speeds = {
        title: float(run.metrics[name].max())
        for title, name in MEMORY.items()
        if name in run.metrics
    }
    if SECONDS in run.metrics:
        seconds = run.metrics[SECONDS].dropna().astype(float)
        games = run.games[run.games["step"].isin(seconds.index)]
        # Missing as soon as one turn's length is: a sum of the others would be too small.
        tokens = sum(
            games.loc[games[f"{r}_reward"].notna(), f"{r}_tokens"].sum(skipna=False)
            for r in run.roles
        )
        speeds["seconds per step, median"] = float(seconds.median())
        if len(games):
            speeds["games per second"] = len(games) / seconds.sum()
            speeds["generated tokens per second"] = (
                float("nan" if pd.isna(tokens) else tokens) / seconds.sum()
            )
    return {name: value for name, value in speeds.items() if not pd.isna(value)}


def _speed(a: Side, b: Side) -> _Section:
    sides = [[_speeds(run) for run in runs] for runs in (a, b)]
    rows = []
    for title in (
        "seconds per step, median",
        "games per second",
        "generated tokens per second",
        *MEMORY,
    ):
        first, second = ([speeds[title] for speeds in side if title in speeds] for side in sides)
        ratio = f"{mean(second) / mean(first):.3g}" if first and second and mean(first) else ""
        rows.append([title, _spread(first), _spread(second), ratio])
    note = (
        "Seconds are those of whole steps, updates included; tokens those of rewarded turns. A "
        "ratio says something "
        "only of runs on the same machine with the same model and batch."
    )
    return _Section("Speed and memory", ["", "A", "B", "B / A"], rows, note)


def _spread(values: Sequence[Any]) -> str:
    if not values:
        return NOT_MEASURED
    return f"{mean(values):.4g}" + (f" ± {round(stdev(values), 9):.3g}" if len(values) > 1 else "")
