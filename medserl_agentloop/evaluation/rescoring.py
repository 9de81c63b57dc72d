"""Old game records under another reward scheme. Called by ``medserl rescore``.

Nothing is judged or played again: a scheme is a function of the record. The file is read and written line by
line, so that its size does not matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from medserl_agentloop.core.step_file import to_line
from medserl_agentloop.games.medical.records import Rewards, read_games
from medserl_agentloop.games.medical.rewards import load_scheme
from medserl_agentloop.games.medical.types import Role
from medserl_agentloop.paths import replacing

_REWARDS = TypeAdapter(Rewards)


@dataclass
class _Mean:
    total: float = 0.0
    count: int = 0

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total += value
            self.count += 1

    def __str__(self) -> str:
        return f"{self.total / self.count:.4f} ({self.count} games)" if self.count else "none"


@dataclass
class Rescored:
    """What came of a file.

    Attributes:
        games: Number of records.
        schemes: Names of the schemes they had.
        old: Mean reward of each role before.
        new: Mean reward of each role now.
    """

    games: int = 0
    schemes: set[str] = field(default_factory=set)
    old: dict[Role, _Mean] = field(default_factory=lambda: {role: _Mean() for role in Role})
    new: dict[Role, _Mean] = field(default_factory=lambda: {role: _Mean() for role in Role})

    def table(self, scheme: str) -> Table:
        """Old and new means side by side."""
        before = ", ".join(sorted(self.schemes)) or "not scored"
        table = Table("role", f"mean reward: {before}", scheme, title=f"{self.games} games")
        for role in Role:
            table.add_row(role.value, str(self.old[role]), str(self.new[role]))
        return table


def rescore(games: Path, scheme: str, output: Path, console: Console) -> Rescored:
    """Write the records of ``games`` to ``output`` with the rewards of another scheme.

    Args:
        games: A games file.
        scheme: Name of the scheme, or ``package.module:function``.
        output: Comes into being as a whole, or not at all; may be ``games`` itself.
        console: Shows the progress if it takes more than a second.

    Raises:
        ValueError: A line is not a record of this version or an older one, the scheme fails, or a file
            cannot be read or written.
    """
    score = load_scheme(scheme)
    result = Rescored()
    try:
        with replacing(output) as file, _progress(console, games.stat().st_size) as advance:
            for number, record in enumerate(read_games(games, advance), start=1):
                result.games += 1
                result.schemes |= {record.scheme} - {""}
                for role in Role:
                    result.old[role].add(record.reward(role))
                try:
                    record.rewards = _REWARDS.validate_python(score(record))
                except Exception as error:  # a user's scheme may raise anything
                    raise ValueError(f"{games}, line {number}: reward scheme {scheme} failed: {error}") from error
                record.scheme = scheme
                for role in Role:
                    result.new[role].add(record.reward(role))
                file.write(to_line(record.to_json()))
    except OSError as error:
        raise ValueError(f"{error.filename or games}: {error.strerror or error}") from error
    return result


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[int], None]]:
    progress = Progress(console=console, transient=True)
    task = progress.add_task("scoring", total=total)
    started = time.monotonic()

    def advance(count: int) -> None:
        progress.advance(task, count)
        if not progress.live.is_started and time.monotonic() - started > 1:
            progress.start()

    try:
        yield advance
    finally:
        if progress.live.is_started:
            progress.stop()
