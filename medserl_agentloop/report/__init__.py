"""Views of runs: frames for notebooks, what a run gained, and games as text.

    from medserl_agentloop.report import games
    games("runs/quickstart").groupby("step")["assessor_reward"].mean()

A game's view adds its own fields (``core.interaction.GameView``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pandas as pd
from omegaconf import OmegaConf
from pydantic import ConfigDict
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from medserl_agentloop import DEFAULT_GAME
from medserl_agentloop.core.config import ConfigError, game_class
from medserl_agentloop.core.interaction import Interaction
from medserl_agentloop.core.metrics import storable
from medserl_agentloop.core.records import Column, GameRecord, read_games
from medserl_agentloop.core.step_file import (
    CONFIG_FILE,
    GAMES_FILE,
    METRICS_FILE,
    StepFile,
    checkpoints,
)
from medserl_agentloop.terminal import plain, table

PART = 1000
"""Games in memory at a time while a frame is made, plus those that complete a step."""

GameClass: TypeAlias = Any  # a ``type[Interaction]``


def games(run: str | Path) -> pd.DataFrame:
    """The games of a run's folder or of a games file; a ValueError names a wrong line."""
    game, records = read_run(run)
    return pd.concat([games_frame(part, game) for part in parts(records)], ignore_index=True)


def metrics(run: str | Path) -> pd.DataFrame:
    """A run's metrics by step, a column per name of docs/metrics.md; ValueError if it has none."""
    path = Path(run) / METRICS_FILE
    if not path.exists():
        raise ValueError(f"{path} does not exist: give the folder of a run (selfplay.records)")
    rows = list(StepFile(path).read())
    if not rows:
        raise ValueError(f"{path} holds no metrics yet")
    for number, row in enumerate(rows, start=1):
        if "step" not in row or not all(isinstance(v, int | float | None) for v in row.values()):
            raise ValueError(f"{path}, line {number} has no step, or something other than numbers")
    by_step = pd.DataFrame(rows).groupby("step").last().astype("Float64", errors="ignore")
    return by_step.drop(columns="steps", errors="ignore")  # for the complete run, not for a step


# --- a run's games ---


def games_file(run: str | Path) -> Path:
    """The file of a run's games; ValueError if it has none yet."""
    path = Path(run)
    path = path / GAMES_FILE if path.is_dir() else path
    if not path.exists():
        raise ValueError(
            f"{path} does not exist: give the folder of a run (selfplay.records) that has played "
            "games"
        )
    if not path.stat().st_size:
        raise ValueError(f"{path} holds no games yet")
    return path


def read_run(run: str | Path) -> tuple[GameClass, Iterator[Any]]:
    """The game of a run, from its config, and its records in order.

    Without a config it is the default game, or, if the records come from another one, any game.
    Raises like :func:`games`, and for a class that cannot be imported.
    """
    file = games_file(run)
    name = _game_of(file.parent)
    try:
        game: GameClass = game_class(name or DEFAULT_GAME)
    except ConfigError as error:
        raise ValueError(f"{file}: {error}; put its module on PYTHONPATH") from None
    first = set(next(StepFile(file).read())) if name is None else set()
    needed = {field for field, info in game.Record.model_fields.items() if info.is_required()}
    if "rewards" in first and not needed <= first:
        game = _AnyGame
    return game, read_games(file, game.Record)


class _AnyRecord(GameRecord):
    model_config = ConfigDict(extra="allow")


class _AnyGame(Interaction[Any, _AnyRecord]):
    roles = ()
    Record = _AnyRecord


def _game_of(run: Path) -> str | None:
    """The name of a run's game; None without a config."""
    config = run / CONFIG_FILE
    try:
        loaded = OmegaConf.load(config) if config.is_file() else OmegaConf.create()
        name: str | None = OmegaConf.select(loaded, "selfplay.game")
    except Exception as error:  # YAML and OmegaConf raise their own errors
        raise ValueError(f"{config} is not the config of a run: {error}") from None
    return name


def parts(records: Iterable[GameRecord]) -> Iterator[list[GameRecord]]:
    """The games in parts of whole steps, so of whole prompt groups, from :data:`PART` games on."""
    part: list[GameRecord] = []
    for _, step in groupby(records, key=lambda game: game.step):
        part += step
        if len(part) >= PART:
            yield part
            part = []
    if part:
        yield part


def games_frame(records: Sequence[GameRecord], game: GameClass) -> pd.DataFrame:
    """The frame of whole prompt groups of games: the ``columns`` of their class, and of each role
    its reward, components and tokens.
    """
    rewarded = (str(role) for record in records for role in record.rewards)
    roles = list(dict.fromkeys([*game.roles, *rewarded]))
    own = {"reward": "Float64", "tokens": "Int64", "truncated": "boolean"}
    schema = {f"{role}_{name}": Column(dtype, "") for role in roles for name, dtype in own.items()}
    schema |= game.View.columns
    rows = []
    for record in records:
        row: dict[str, Any] = {f"{role}_reward": record.reward(role) for role in roles}
        for turn in record.turns:
            tokens, truncated = f"{turn.role}_tokens", f"{turn.role}_truncated"
            row[tokens] = row.get(tokens, 0) + turn.tokens
            row[truncated] = row.get(truncated, False) or turn.truncated
        row |= {name: column.value(record) for name, column in game.View.columns.items()}
        rows.append(row)
    frame = typed_frame(rows, schema)
    components = {(str(r), part) for one in records for r in one.rewards for part in one.rewards[r]}
    for role, part in sorted(components):
        values = [record.rewards.get(role, {}).get(part) for record in records]
        frame[f"reward/{role}/{storable(part)}"] = pd.array(values, dtype="Float64")
    rewards = frame[reward_columns(frame)].astype(float).round(9)
    by_group = rewards.groupby([frame["step"], frame["uid"]], dropna=False)
    frame["signal"] = (by_group.transform("nunique") > 1).any(axis=1).astype("boolean")
    return frame


def reward_columns(frame: pd.DataFrame) -> list[str]:
    """The columns ``<role>_reward``; components are ``reward/<role>/<component>``."""
    return [name for name in frame if name.endswith("_reward") and not name.startswith("reward/")]


def typed_frame(rows: list[dict[str, Any]], schema: Mapping[str, Column]) -> pd.DataFrame:
    """A frame with the columns of a schema; absent values of a row are missing."""
    values = {name: [storable(row.get(name)) for row in rows] for name in schema}
    return pd.DataFrame(
        {name: pd.array(values[name], dtype=column.dtype) for name, column in schema.items()}
    )


# --- what was gained, from the validations in metrics.jsonl ---


class Curve(NamedTuple):
    """One measure on one data set, by step; step 0 is before training."""

    data_set: str
    label: str
    values: dict[int, float]  # shares, 0 to 1
    rows: str  # e.g. ``200 held-out notes``

    def __str__(self) -> str:
        """E.g. ``errors found 55 → 89 %``; one number if there is one validation."""
        steps = sorted(self.values)
        ends = dict.fromkeys([steps[0], steps[-1]])
        return f"{self.label} {' → '.join(f'{100 * self.values[step]:.0f}' for step in ends)} %"


def curves(run: str | Path) -> list[Curve]:
    """The curves of a run's validations, by data set and then in the order of its game's gains."""
    run = Path(run)
    try:
        gains = game_class(_game_of(run) or DEFAULT_GAME).View.gains
    except ConfigError:  # from a class that is not available
        gains = ()
    file, found = run / METRICS_FILE, dict[str, dict[str, dict[int, float]]]()
    if gains and file.is_file() and file.stat().st_size:
        for name, values in metrics(run).items():
            if named := re.fullmatch(r"val-(?:core|aux)/([^/]+)/([^/]+)", str(name)):
                known = {int(step): float(value) for step, value in values.dropna().items()}
                found.setdefault(named[1], {})[named[2]] = known
    shown = []
    for data_set, measures in found.items():
        notes = [*measures.get("notes", {}).values()]
        rows = f"{notes[-1]:.0f} held-out notes" if notes else "held-out rows"
        shown += [
            Curve(data_set, label, measures[measure], rows)
            for label, measure in gains
            if measure in measures
        ]
    return shown


def headline(run: str | Path) -> str | None:
    """Say what was gained from the first validation to the last; None without a validation.

    E.g. ``errors found 55 → 89 %, false alarms 15 → 0 %, 200 held-out notes``. Each of several data
    sets has its own part.
    """
    by_set = {name: [*of] for name, of in groupby(curves(run), key=lambda curve: curve.data_set)}
    said = []
    for name, of_set in by_set.items():
        which = f"{name}: " if len(by_set) > 1 else ""
        said.append(f"{which}{', '.join(map(str, of_set))}, {of_set[0].rows}")
    return "; ".join(said) or None


# --- ``medserl show`` ---

_COLOURS = ("red", "blue", "green", "magenta")


def headline_metrics(game: GameClass, roles: Iterable[str]) -> list[str]:
    """The metrics that ``medserl show`` prints."""
    rewards = (f"selfplay/{role}/{name}" for role in roles for name in ("reward", "reward_std"))
    own = (*rewards, *(name for _, name in game.View.shown), *game.View.headline)
    last = ("actor/grad_norm", "training/rollout_probs_diff_max", "timing_s/step")
    return list(dict.fromkeys(["selfplay/games", "selfplay/void_rate", *own, *last]))


def show_run(run: Path, console: Console, *, number: int | None = None) -> None:
    """Print a run's metrics and one game: ``number``, from 1, or the highest ranked one."""
    game, records = read_run(run)
    shown, total, most = None, 0, -1
    for total, record in enumerate(records, start=1):
        if total == number or (number is None and record.reading_rank >= most):
            shown, place, most = record, total, record.reading_rank
    if shown is None:
        raise ValueError(f"{run} holds games 1 to {total}; there is no game {number}")
    console.print(render_game(shown, game, title=f"game {place} of {total}"))
    if marked := [saved for saved in checkpoints(run) if saved.newest or saved.best]:
        console.print(plain(f"checkpoints: {', '.join(map(str, marked))}"))
    if (run / METRICS_FILE).exists():
        by_step = metrics(run)
        words = {metric: f" ({label})" for label, metric in game.View.shown}
        # Names with three parts are about a complete set; verl's own are by category.
        scores = list(by_step.filter(regex="^val-core/[^/]+/[^/]+$"))
        trained = headline_metrics(game, game.roles or shown.rewards)
        for title, names in (("metrics", trained), ("validation", scores)):
            known = by_step.filter(names).dropna(how="all").dropna(axis="columns", how="all")
            ends = known.iloc[[0, -1] if len(known) > 1 else [0] * len(known)]
            rows = [
                [n + words.get(n, ""), *("" if pd.isna(v) else f"{v:.4g}" for v in ends[n])]
                for n in ends
            ]
            if rows:
                steps = (f"step {step}" for step in ends.index)
                console.print(table(title, ["metric", *steps], rows))
        console.print(plain(f"all metrics: {run / METRICS_FILE}"))
    console.print(plain(f"all games: {games_file(run)}"))


def list_runs(folder: Path, console: Console) -> None:
    """Print the runs at most three folders below ``folder``, the newest first; ValueError if none.

    A run is a folder with a config and metrics.
    """
    files = [file for depth in (1, 2, 3) for file in folder.glob("*/" * depth + METRICS_FILE)]
    found = {f.parent: f.stat().st_mtime for f in files if f.with_name(CONFIG_FILE).is_file()}
    if not found:
        raise ValueError(f"{folder}/ holds no run; give the folder of a run, or start one")
    rows = []
    for run in sorted(found, key=lambda run: found[run], reverse=True):
        written = f"{datetime.fromtimestamp(found[run]):%Y-%m-%d %H:%M}"
        steps = max((int(row["step"]) for row in StepFile(run / METRICS_FILE).read()), default=0)
        rows.append([run, written, steps, headline(run) or "-"])
    console.print(table("", ["run", "date", "steps", "gained"], rows))


def outcome_words(outcome: str) -> str:
    """An outcome in the words of step lines and tables."""
    return outcome.replace("_", " ").replace("missed error", "undetected error")


def render_game(record: GameRecord, game: GameClass, title: str) -> RenderableType:
    """A game's turns, judge and rewards as panels."""
    why = f" ({record.void})" if record.void else ""
    outcome = f"outcome: {outcome_words(game.View.columns['outcome'].value(record))}{why}"
    ended = f"{record.kind}; {outcome}" if record.kind else outcome
    lines: list[RenderableType] = [plain(ended, style="bold")]
    others = [f"{role}: {name}" for role, name in record.players.items()]
    if (opponent := record.opponent) is not None:
        others.append(f"{opponent.role}: {opponent.version or 'no answer'} ({opponent.kind})")
    if others:
        lines.append(plain(f"played by {', '.join(others)}"))
    colours = dict(zip(game.roles, _COLOURS, strict=False))
    for section in game.View.sections(record):
        style, text = colours.get(section.owner, "none"), Text(section.as_text())
        heading = plain(section.title)
        lines.append(Panel(text, title=heading, title_align="left", border_style=style))
    for role, components in record.rewards.items():
        terms = "  ".join(f"{name} {value:+.2f}" for name, value in components.items())
        lines.append(plain(f"{role} {sum(components.values()):+.2f} = {terms}"))
    played = f", {record.finished:%Y-%m-%d %H:%M:%S} UTC" if record.finished else ""
    heading = plain(f"{title}, step {record.step}{played}")
    return Panel(Group(*lines), title=heading, title_align="left")
