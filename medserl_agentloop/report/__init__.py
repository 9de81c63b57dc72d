"""Looking at runs: a page for the browser, text for the terminal, and here frames for notebooks.

The frames are the games, turns and metrics of a run and the scores of an evaluation, as pandas has them:

    from medserl_agentloop.report import games
    games("runs/quickstart").groupby("step")["assessor_reward"].mean()

Each frame has the columns of its schema (``GAMES``, ``TURNS``, ``SCORES``), in their order and with their dtype.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd

from medserl_agentloop.core.metrics import storable
from medserl_agentloop.core.step_file import GAMES_FILE, METRICS_FILE, StepFile
from medserl_agentloop.games.medical.records import MedicalRecord, read_games
from medserl_agentloop.games.medical.table import GAMES, Column
from medserl_agentloop.games.medical.types import Role

PART = 1000
"""Games that are held at a time where a frame is made, besides those that complete a step."""


TURNS = {
    "game": Column("Int64", "row of the game in `games(run)`"),
    "role": Column("string", "who took the turn"),
    "response": Column("string", "what the model wrote"),
    "reasoning": Column("string", "its reasoning, as the profile's parser reads it"),
    "tokens": Column("Int64", "length"),
    "truncated": Column("boolean", "whether the token budget cut it off"),
    "readable": Column("boolean", "whether it has a note, or a verdict"),
    "violations": Column("string", "departures from the format, joined by commas"),
    "reward": Column("Float64", "the role's reward; of several assessments, each its own"),
    "seconds": Column("Float64", "how long the game waited for it; missing in old records"),
}
"""A row per generated turn."""

SCORES = {
    "system": Column("string", "the system, or the floor"),
    "measure": Column("string", "name of the score"),
    "value": Column("Float64", "the score; missing if not computed"),
    "low": Column("Float64", "lower end of the 95 % interval"),
    "high": Column("Float64", "upper end"),
    "spread": Column("Float64", "standard deviation between seeds"),
    "why": Column("string", "why it was not computed"),
}
"""A row per system and measure of a results file."""


def games(run: str | Path) -> pd.DataFrame:
    """The games of a run: its folder (``selfplay.records``), or a games file. A ValueError names a wrong line."""
    return _with_signal(pd.concat([games_frame(part) for part in parts(read_run(run))], ignore_index=True))


def turns(run: str | Path) -> pd.DataFrame:
    """The turns of the same games."""
    frames, first = [], 0
    for part in parts(read_run(run)):
        frames.append(turns_frame(part, first))
        first += len(part)
    return pd.concat(frames, ignore_index=True)


def turns_frame(records: Sequence[MedicalRecord], first: int = 0) -> pd.DataFrame:
    """The frame of the turns of these games, which are numbered from ``first``; see :data:`TURNS`."""
    rows = []
    for number, game in enumerate(records, start=first):
        seconds = iter(game.seconds)
        assessed = [(Role.ASSESSOR, each, each.assessment) for each in game.by_assessment]
        for role, each, turn in [(Role.ATTACKER, game, game.attack), *assessed]:
            if turn is not None:
                answer = turn.note if role is Role.ATTACKER else turn.verdict  # type: ignore[union-attr]
                row = turn.model_dump(include={"response", "reasoning", "tokens", "truncated"})
                row |= {"game": number, "role": role.value, "readable": answer is not None}
                row |= {"violations": ",".join(turn.violations), "reward": each.reward(role.value)}
                rows.append({**row, "seconds": next(seconds, None)})
    return typed_frame(rows, TURNS)


def metrics(run: str | Path) -> pd.DataFrame:
    """The metrics of a run by step, a column per name as docs/metrics.md has them; a ValueError if it has none."""
    path = Path(run) / METRICS_FILE
    if not path.exists():
        raise ValueError(f"{path} does not exist: give the folder of a run (selfplay.records)")
    rows = list(StepFile(path).read())
    if not rows:
        raise ValueError(f"{path} holds no metrics yet")
    return pd.DataFrame(rows).groupby("step").last().astype("Float64", errors="ignore")


def scores(results: str | Path) -> pd.DataFrame:
    """The scores in a results file of ``medserl score`` or ``medserl evaluate``; a ValueError names another file."""
    try:
        rows = [
            {"system": system, "measure": name, **measure}
            for system, values in json.loads(Path(results).read_text(encoding="utf-8"))["systems"].items()
            for name, measure in values["measures"].items()
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{results} is not a results file of medserl score or evaluate: {error!r}") from None
    return typed_frame(rows, SCORES)


def parts(records: Iterable[MedicalRecord]) -> Iterator[list[MedicalRecord]]:
    """The games in lists of whole steps, and so of whole prompt groups, of :data:`PART` games or a little more."""
    part: list[MedicalRecord] = []
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
        raise ValueError(f"{path} does not exist: give the folder of a run (selfplay.records) that has played games")
    if not path.stat().st_size:
        raise ValueError(f"{path} holds no games yet")
    return path


def read_run(run: str | Path) -> Iterator[MedicalRecord]:
    """The records of a run's games, in order, each read when it is used; raises as :func:`games`."""
    return read_games(games_file(run))


def games_frame(records: Sequence[MedicalRecord]) -> pd.DataFrame:
    """The frame of these games; see :data:`GAMES`."""
    frame = typed_frame([{name: column.value(game) for name, column in GAMES.items()} for game in records], GAMES)
    components = sorted(
        {(role.value, part) for game in records for role, parts in game.rewards.items() for part in parts}
    )
    for role, part in components:
        values = [game.rewards.get(Role(role), {}).get(part) for game in records]
        frame[f"reward/{role}/{storable(part)}"] = pd.array(values, dtype="Float64")
    return _with_signal(frame)


def _with_signal(frame: pd.DataFrame) -> pd.DataFrame:
    rewards = frame[[f"{role.value}_reward" for role in Role]].astype(float).round(9)
    different = rewards.groupby([frame["step"], frame["uid"]], dropna=False).transform("nunique") > 1
    frame["signal"] = different.any(axis=1).astype("boolean")
    return frame


def typed_frame(rows: list[dict[str, Any]], schema: dict[str, Column]) -> pd.DataFrame:
    """A frame with the columns of a schema; what a row does not have is missing."""
    columns = {}
    for name, column in schema.items():
        values = [row.get(name) for row in rows]
        if column.dtype == "string":
            values = [storable(text) for text in values]
        columns[name] = pd.array(values, dtype=column.dtype)
    return pd.DataFrame(columns)
