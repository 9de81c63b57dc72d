"""Looking at runs: a page for the browser, and here frames for notebooks and text for the terminal.

    from medserl_agentloop.report import games
    games("runs/quickstart").groupby("step")["assessor_reward"].mean()

What a game adds to the fields of every record, its own class says: ``columns`` and ``sections`` of
:class:`medserl_agentloop.core.interaction.Interaction`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd
from omegaconf import OmegaConf
from pydantic import ConfigDict
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from medserl_agentloop import DEFAULT_GAME
from medserl_agentloop.core.checkpoints import checkpoints
from medserl_agentloop.core.config import ConfigError, game_class
from medserl_agentloop.core.interaction import Interaction
from medserl_agentloop.core.metrics import storable
from medserl_agentloop.core.records import LARGEST_REWARD, Column, GameRecord, Rewards, read_games
from medserl_agentloop.core.step_file import CONFIG_FILE, GAMES_FILE, METRICS_FILE, StepFile
from medserl_agentloop.terminal import plain, table, visible

# games that are held at a time where a frame is made, besides those that complete a step
PART = 1000

GameClass: TypeAlias = Any  # a class of games, which is not made here: a ``type[Interaction]``


def games(run: str | Path) -> pd.DataFrame:
    """The games of a run: its folder (``selfplay.records``), or a games file.

    A ValueError names a wrong line.
    """
    game, records = read_run(run)
    return with_signal(
        pd.concat([games_frame(part, game) for part in parts(records)], ignore_index=True)
    )


def metrics(run: str | Path) -> pd.DataFrame:
    """The metrics of a run by step, a column per name as docs/metrics.md has them; a ValueError if
    it has none.
    """
    path = Path(run) / METRICS_FILE
    if not path.exists():
        raise ValueError(f"{path} does not exist: give the folder of a run (selfplay.records)")
    rows = list(StepFile(path).read())
    if not rows:
        raise ValueError(f"{path} holds no metrics yet")
    for number, row in enumerate(rows, start=1):
        if "step" not in row or not all(
            isinstance(value, int | float | None) for value in row.values()
        ):
            raise ValueError(f"{path}, line {number} has no step, or something else than numbers")
    by_step = pd.DataFrame(rows).groupby("step").last().astype("Float64", errors="ignore")
    return by_step.drop(columns="steps", errors="ignore")  # of the whole run, not of a step


def parts(records: Iterable[GameRecord]) -> Iterator[list[GameRecord]]:
    """The games in lists of whole steps, and so of whole prompt groups, of :data:`PART` games or a
    little more.
    """
    part: list[GameRecord] = []
    for _, step in groupby(records, key=lambda game: game.step):
        part += step
        if len(part) >= PART:
            yield part
            part = []
    if part:
        yield part


def games_file(run: str | Path) -> Path:
    """The file of a run's games; a ValueError says that it has none yet."""
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


class _AnyRecord(GameRecord):
    """A record of a game whose class is not here."""

    model_config = ConfigDict(extra="allow")

    rewards: Rewards


class _AnyGame(Interaction[Any, _AnyRecord]):
    roles = ()
    Record = _AnyRecord


def read_run(run: str | Path) -> tuple[GameClass, Iterator[Any]]:
    """The game of a run, from its config or its records, and the records in order; raises as
    :func:`games`.
    """
    file = games_file(run)
    config = file.with_name(CONFIG_FILE)
    try:
        name = (
            OmegaConf.select(OmegaConf.load(config), "selfplay.game") if config.is_file() else None
        )
    except Exception as error:  # YAML and OmegaConf have errors of their own
        raise ValueError(f"{config} is no config of a run: {error}") from None
    try:
        game: GameClass = game_class(name or DEFAULT_GAME)
    except ConfigError as error:
        why = f"{file} is read without the class of its game ({error}): is it on PYTHONPATH?"
        print(visible(why), file=sys.stderr)
        game = _AnyGame
    needed = {field for field, info in game.Record.model_fields.items() if info.is_required()}
    if name is None and not needed <= next(StepFile(file).read()).keys():
        game = _AnyGame
    return game, _addable(file, read_games(file, game.Record))


def _addable(file: Path, records: Iterable[GameRecord]) -> Iterator[GameRecord]:
    """The records; a ValueError names the line where rewards add up to no number."""
    for number, record in enumerate(records, start=1):
        if not all(
            abs(part) <= LARGEST_REWARD
            for parts in record.rewards.values()
            for part in parts.values()
        ):
            raise ValueError(
                f"{file}, line {number} holds a reward that is no number within {LARGEST_REWARD:g}"
            )
        yield record


def games_frame(records: Sequence[GameRecord], game: GameClass) -> pd.DataFrame:
    """The frame of these games: the ``columns`` of their class, and of each role its reward,
    components and tokens.
    """
    roles = dict.fromkeys(
        [*game.roles, *(str(role) for record in records for role in record.rewards)]
    )
    own = {"reward": "Float64", "tokens": "Int64", "truncated": "boolean"}
    of_roles = {
        f"{role}_{name}": Column(dtype, "") for role in roles for name, dtype in own.items()
    }
    rows = []
    for record in records:
        row: dict[str, Any] = {f"{role}_reward": record.reward(role) for role in roles}
        for turn in record.turns:
            tokens, truncated = f"{turn.role}_tokens", f"{turn.role}_truncated"
            row |= {
                tokens: row.get(tokens, 0) + turn.tokens,
                truncated: row.get(truncated, False) or turn.truncated,
            }
        rows.append(
            row | {name: column.value(record) for name, column in game.View.columns.items()}
        )
    frame = typed_frame(rows, {**of_roles, **game.View.columns})
    components = {
        (str(role), part)
        for record in records
        for role in record.rewards
        for part in record.rewards[role]
    }
    for role, part in sorted(components):
        values = [record.rewards.get(role, {}).get(part) for record in records]
        frame[f"reward/{role}/{storable(part)}"] = pd.array(values, dtype="Float64")
    return with_signal(frame)


def reward_columns(frame: pd.DataFrame) -> list[str]:
    """The columns with the roles' rewards, ``<role>_reward``; components are
    ``reward/<role>/<component>``.
    """
    return [name for name in frame if name.endswith("_reward") and not name.startswith("reward/")]


def with_signal(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with its column ``signal`` filled in, which needs whole prompt groups."""
    rewards = frame[reward_columns(frame)].astype(float).round(9)
    different = (
        rewards.groupby([frame["step"], frame["uid"]], dropna=False).transform("nunique") > 1
    )
    frame["signal"] = different.any(axis=1).astype("boolean")
    return frame


def typed_frame(rows: list[dict[str, Any]], schema: Mapping[str, Column]) -> pd.DataFrame:
    """Return a frame with the columns of a schema; absent values of a row are missing."""
    values = {name: [storable(row.get(name)) for row in rows] for name in schema}
    return pd.DataFrame(
        {name: pd.array(values[name], dtype=column.dtype) for name, column in schema.items()}
    )


# -- `medserl show` --------------------------------------------------------------------------------

_COLOURS = ("red", "blue", "green", "magenta")


def headline_metrics(game: GameClass, roles: Iterable[str]) -> list[str]:
    rewards = (f"selfplay/{role}/{name}" for role in roles for name in ("reward", "reward_std"))
    own = (*rewards, *(name for _, name in game.View.shown), *game.View.headline)
    last = ("actor/grad_norm", "training/rollout_probs_diff_max", "timing_s/step")
    return list(dict.fromkeys(["selfplay/games", "selfplay/void_rate", *own, *last]))


def show_run(run: Path, console: Console, *, number: int | None = None) -> None:
    """Print a run's metrics and one game: ``number``, from 1, or the one that ranks highest.

    ValueError if none.
    """
    game, records = read_run(run)
    shown, total, most = None, 0, -1
    for total, record in enumerate(records, start=1):
        if total == number or (number is None and record.reading_rank >= most):
            shown, place, most = record, total, record.reading_rank
    if shown is None:
        raise ValueError(f"{run} holds games 1 to {total}, there is no game {number}")
    console.print(render_game(shown, game, title=f"game {place} of {total}"))
    if marked := [saved for saved in checkpoints(run) if saved.newest or saved.best]:
        console.print(plain(f"checkpoints: {', '.join(map(str, marked))}"))
    if (run / METRICS_FILE).exists():
        by_step = metrics(run)
        words = {metric: f" ({label})" for label, metric in game.View.shown}
        # Three parts: of a set as a whole; verl's own are by category.
        scores = list(by_step.filter(regex="^val-core/[^/]+/[^/]+$"))
        for title, names in (
            ("metrics", headline_metrics(game, game.roles or shown.rewards)),
            ("validation", scores),
        ):
            known = by_step.filter(names).dropna(how="all").dropna(axis="columns", how="all")
            ends = known.iloc[[0, -1] if len(known) > 1 else [0] * len(known)]
            rows = [
                [
                    name + words.get(name, ""),
                    *("" if pd.isna(value) else f"{value:.4g}" for value in ends[name]),
                ]
                for name in ends
            ]
            if rows:
                console.print(
                    table(title, ["metric", *(f"step {step}" for step in ends.index)], rows)
                )
        console.print(plain(f"all metrics: {run / METRICS_FILE}"))
    console.print(plain(f"all games: {games_file(run)}"))


def list_runs(folder: Path, console: Console) -> None:
    """Print the runs at most three folders below ``folder``, the newest first; ValueError if none.

    A run is a folder with a config and metrics.
    """
    from medserl_agentloop.report.headline import headline

    found = [
        path.parent
        for depth in range(1, 4)
        for path in folder.glob("*/" * depth + METRICS_FILE)
        if (path.parent / CONFIG_FILE).is_file()
    ]
    if not found:
        raise ValueError(f"{folder}/ holds no run; give the folder of a run, or start one")
    rows = []
    for run in sorted(found, key=lambda run: (run / METRICS_FILE).stat().st_mtime, reverse=True):
        written = datetime.fromtimestamp((run / METRICS_FILE).stat().st_mtime)
        steps = max((int(row["step"]) for row in StepFile(run / METRICS_FILE).read()), default=0)
        rows.append([run, f"{written:%Y-%m-%d %H:%M}", steps, headline(run) or "-"])
    console.print(table("", ["run", "date", "steps", "gained"], rows))


def outcome_words(outcome: str) -> str:
    """An outcome for readers, in the word that step lines and tables have for a missed error."""
    return outcome.replace("_", " ").replace("missed error", "undetected error")


def render_game(record: GameRecord, game: GameClass, title: str) -> RenderableType:
    why = f" ({record.void})" if record.void else ""
    outcome = f"outcome: {outcome_words(game.View.columns['outcome'].value(record))}{why}"
    parts: list[RenderableType] = [
        plain("; ".join(filter(None, (record.kind, outcome))), style="bold")
    ]
    others = [f"{role}: {name}" for role, name in record.players.items()]
    if record.opponent is not None:
        others.append(
            f"{record.opponent.role}: {record.opponent.version or 'no answer'} "
            f"({record.opponent.kind})"
        )
    if others:
        parts.append(plain(f"played by {', '.join(others)}"))
    for section in game.View.sections(record):
        colour = (
            _COLOURS[game.roles.index(section.owner) % len(_COLOURS)]
            if section.owner in game.roles
            else "none"
        )
        panel = Panel(
            Text(section.as_text()),
            title=plain(section.title),
            title_align="left",
            border_style=colour,
        )
        parts.append(panel)
    for role, components in record.rewards.items():
        terms = "  ".join(f"{name} {value:+.2f}" for name, value in components.items())
        parts.append(plain(f"{role} {sum(components.values()):+.2f} = {terms}"))
    played = f", {record.finished:%Y-%m-%d %H:%M:%S} UTC" if record.finished else ""
    return Panel(
        Group(*parts), title=plain(f"{title}, step {record.step}{played}"), title_align="left"
    )
