"""Looking at runs: a page for the browser, and here frames for notebooks and text for the terminal.

The frames are the games, turns and metrics of a run and the scores of an evaluation, as pandas has them:

    from medserl_agentloop.report import games
    games("runs/quickstart").groupby("step")["assessor_reward"].mean()

Each frame has the columns of its schema (``GAMES``, ``TURNS``, ``SCORES``), in their order and with their dtype.

What a model wrote is untrusted: in the terminal its control characters are spelt out, and markup in it is text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from medserl_agentloop.command_line import plain, visible
from medserl_agentloop.core.metrics import storable
from medserl_agentloop.core.step_file import GAMES_FILE, METRICS_FILE, StepFile
from medserl_agentloop.games.medical.metrics import role_metrics
from medserl_agentloop.games.medical.records import GAMES, Column, MedicalRecord, Outcome, marked_changes, read_games
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


# -- `medserl show` ------------------------------------------------------------------------------------------------

_OF_BOTH = ("reward", "reward_std", "parse_rate")
HEADLINE_METRICS = (
    "selfplay/games",
    *(f"selfplay/attacker/{name}" for name in (*_OF_BOTH, "valid_rate", "success_rate")),
    *(f"selfplay/assessor/{name}" for name in (*_OF_BOTH, "accuracy", "recall", "false_positive_rate", "f1")),
    "selfplay/shortcut/index",
    "actor/grad_norm",
    "training/rollout_probs_diff_max",
    "timing_s/step",
)


def show_run(run: Path, console: Console, *, game: int | None = None) -> None:
    """Print a game and the metrics of a run: its ``selfplay.records`` folder, or a file of game records.

    ``game`` is its line number, from 1; None picks the latest that an attack and a verdict decided. A ValueError says
    that the run holds no games, or no game of that number.
    """
    decided = (Outcome.MISSED_ERROR, Outcome.CORRECT_DETECTION)
    shown, decisive, total = None, False, 0
    by_step: dict[int, list[MedicalRecord]] = {}  # of the first and the last step: memory may not hold all games
    for total, record in enumerate(read_run(run), start=1):
        by_step.setdefault(record.step, []).append(record)
        for step in sorted(by_step)[1:-1]:
            del by_step[step]
        tells = record.attack is not None and record.outcome in decided
        if total == game or (game is None and tells >= decisive):
            shown, number, decisive = record, total, tells
    if shown is None:
        raise ValueError(f"{run} holds games 1 to {total}, there is no game {game}")
    console.print(render_game(shown, title=f"game {number} of {total}"))
    _print_metrics(run, by_step, console)


def _print_metrics(run: Path, by_step: Mapping[int, Sequence[MedicalRecord]], console: Console) -> None:
    """The headline metrics of the first and the last step, side by side; of the only one, once."""
    file = run / METRICS_FILE
    rows = list(StepFile(file).read()) if file.exists() else []
    steps = sorted({*by_step, *(int(row["step"]) for row in rows)})
    numbers = {step: role_metrics(by_step.get(step, ())) for step in (steps[0], steps[-1])}
    for row in rows:
        numbers.get(int(row["step"]), {}).update({name: value for name, value in row.items() if name != "step"})
    table = Table("metric", *(f"step {step}" for step in numbers), title="role metrics")
    for name in HEADLINE_METRICS:
        values = [metrics.get(name) for metrics in numbers.values()]
        if any(value is not None for value in values):
            table.add_row(name, *("" if value is None else f"{value:.4g}" for value in values))
    console.print(table)
    console.print(plain(f"all games: {run / GAMES_FILE}\nall metrics: {file}" if run.is_dir() else f"all games: {run}"))


def render_game(record: MedicalRecord, title: str) -> RenderableType:
    """One game from seed note to rewards."""
    label = record.judgement.label.value if record.judgement and record.judgement.label else "not judged"
    why = f" ({record.void})" if record.void else ""
    facts = f"{record.category.value}; presented note: {label}; outcome: {record.outcome.value}{why}"
    parts: list[RenderableType] = [plain(facts, style="bold")]
    others = [f"{role}: {name}" for role, name in record.players.items()]
    if record.opponent is not None:
        others.append(f"{record.opponent.role}: {record.opponent.version or 'no answer'} ({record.opponent.kind})")
    if others:
        parts.append(plain(f"played by {', '.join(others)}"))
    attack = record.attack
    if attack is not None:
        head = "attacker"
        if attack.invalid is not None:
            head += f" (invalid: {attack.invalid.value})"
        wrote = marked_changes(record.spec.seed_note, attack.note) if attack.note else plain(attack.response)
        lines = Text.assemble((visible(attack.reasoning) or "no reasoning", "italic"), "\n\n", wrote)
        parts.append(_panel(head, lines, "red"))
    elif record.presented_note is not None:
        parts.append(_panel("note, as it is in the data", plain(record.presented_note)))
    for assessment in (each.assessment for each in record.by_assessment if each.assessment is not None):
        verdict = assessment.verdict.value if assessment.verdict else "unreadable"
        parts.append(_panel(f"assessor: {verdict}", plain(assessment.response), "blue"))
    for role in Role:
        components = record.rewards.get(role)
        if components is not None:
            terms = "  ".join(f"{name} {value:+.2f}" for name, value in components.items())
            parts.append(plain(f"{role.value} {sum(components.values()):+.2f} = {terms}"))
    played = f", {record.finished:%Y-%m-%d %H:%M:%S} UTC" if record.finished else ""
    return _panel(f"{title}, step {record.step}{played}", Group(*parts))


def _panel(title: str, content: RenderableType, colour: str = "none") -> Panel:
    return Panel(content, title=plain(title), title_align="left", border_style=colour)
