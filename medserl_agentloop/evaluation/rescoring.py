"""``medserl rescore``: old game records under another reward scheme.

Nothing is judged or played again: a scheme is a function of the record. The file is read and written line by line, so
that its size does not matter.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from medserl_agentloop.command_line import errors_in_one_line, visible
from medserl_agentloop.core.step_file import GAMES_FILE, to_line
from medserl_agentloop.games.medical.records import Rewards, read_games
from medserl_agentloop.games.medical.rewards import load_scheme
from medserl_agentloop.games.medical.types import Role
from medserl_agentloop.paths import replacing


def rescore(
    games: Annotated[Path, typer.Argument(help="File of game records, or the folder of a run.")],
    reward: Annotated[str, typer.Option(help="Reward scheme, or package.module:function.")],
    output: Annotated[Path, typer.Option(help="File for the records with their new rewards.")],
) -> None:
    """Apply another reward scheme to games that were played before."""
    console = Console()
    games = games / GAMES_FILE if games.is_dir() else games
    with errors_in_one_line():
        table = _rescored(games, reward, output, console)
    console.print(table)
    typer.echo(f"games: {output}")


def _rescored(games: Path, scheme: str, output: Path, console: Console) -> Table:
    """Write the records with their new rewards, all of them or none, and return the mean rewards of both schemes."""
    score = load_scheme(scheme)
    rewards = TypeAdapter(Rewards)
    before: set[str] = set()
    sums: defaultdict[tuple[str, Role], float] = defaultdict(float)
    counts: Counter[tuple[str, Role]] = Counter()
    number = 0
    with replacing(output) as file, Progress(console=console, transient=True) as progress:
        bar = progress.add_task("scoring", total=games.stat().st_size)
        for number, record in enumerate(read_games(games, lambda size: progress.advance(bar, size)), start=1):
            before |= {record.scheme} - {""}
            old = {role: record.reward(role) for role in Role}
            try:
                record.rewards = rewards.validate_python(score(record))
            except Exception as error:  # a user's scheme may raise anything
                raise ValueError(f"{games}, line {number}: reward scheme {scheme} failed: {error}") from error
            record.scheme = scheme
            for role in Role:
                for when, value in (("old", old[role]), ("new", record.reward(role))):
                    if value is not None:
                        sums[when, role] += value
                        counts[when, role] += 1
            file.write(to_line(record.to_json()))

    def mean(when: str, role: Role) -> str:
        count = counts[when, role]
        return f"{sums[when, role] / count:.4f} ({count} games)" if count else "none"

    table = Table("role", title=f"{number} games")
    for heading in (f"mean reward: {', '.join(sorted(before)) or 'not scored'}", scheme):
        table.add_column(Text(visible(heading)))
    for role in Role:
        table.add_row(role.value, mean("old", role), mean("new", role))
    return table
