"""A run in the terminal: one game as readable text, the role metrics of its first and last step.

Called by ``medserl show``. Model text is untrusted: it is shown without its control codes and never
read as markup.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from medserl_agentloop.core.step_file import GAMES_FILE, METRICS_FILE, StepFile
from medserl_agentloop.games.medical.metrics import role_metrics
from medserl_agentloop.games.medical.records import GameRecord, Outcome, read_games
from medserl_agentloop.games.medical.table import marked_changes, plain
from medserl_agentloop.games.medical.types import Role

HEADLINE_METRICS = (
    "selfplay/games",
    "selfplay/attacker/reward",
    "selfplay/attacker/reward_std",
    "selfplay/attacker/parse_rate",
    "selfplay/attacker/valid_rate",
    "selfplay/attacker/success_rate",
    "selfplay/assessor/reward",
    "selfplay/assessor/reward_std",
    "selfplay/assessor/parse_rate",
    "selfplay/assessor/accuracy",
    "selfplay/assessor/recall",
    "selfplay/assessor/false_positive_rate",
    "selfplay/assessor/f1",
    "selfplay/shortcut/index",
    "actor/grad_norm",
    "training/rollout_probs_diff_max",
    "timing_s/step",
)


def show_run(folder: Path, console: Console, *, game: int | None = None) -> None:
    """Print a game and the metrics of a run.

    Args:
        folder: The run's ``selfplay.records`` folder.
        console: Where to print.
        game: Line number of the game to show, from 1; None picks a telling one of the last step.

    Raises:
        ValueError: The folder holds no games, or no game of that number.
    """
    path = folder / GAMES_FILE
    if not path.exists():
        raise ValueError(f"{path} does not exist: give the folder of a run (selfplay.records) that has played games")
    games = list(read_games(path))
    if not games:
        raise ValueError(f"{path} holds no games yet")
    if game is not None and not 1 <= game <= len(games):
        raise ValueError(f"{path} holds games 1 to {len(games)}, there is no game {game}")
    number = game if game is not None else _telling_game(games)
    console.print(render_game(games[number - 1], title=f"game {number} of {len(games)}"))
    console.print(render_metrics(games, folder / METRICS_FILE))
    console.print(Text(f"all games: {path}\nall metrics: {folder / METRICS_FILE}"))


def render_game(record: GameRecord, title: str) -> RenderableType:
    """One game from seed note to rewards."""
    label = record.judgement.label.value if record.judgement and record.judgement.label else "not judged"
    parts: list[RenderableType] = [
        Text(f"{record.category.value}; presented note: {label}; outcome: {record.outcome.value}", style="bold")
    ]
    attack = record.attack
    if attack is not None:
        head = "attacker"
        if attack.invalid is not None:
            head += f" (invalid: {attack.invalid.value})"
        lines = Text.assemble((plain(attack.reasoning) or "no reasoning", "italic"), "\n\n")
        lines.append_text(
            marked_changes(record.spec.seed_note, attack.note) if attack.note else Text(plain(attack.response))
        )
        parts.append(Panel(lines, title=Text(head), title_align="left", border_style="red"))
    elif record.presented_note is not None:
        parts.append(Panel(Text(plain(record.presented_note)), title="note, as it is in the data", title_align="left"))
    for assessment in (each.assessment for each in record.by_assessment if each.assessment is not None):
        verdict = assessment.verdict.value if assessment.verdict else "unreadable"
        parts.append(
            Panel(
                Text(plain(assessment.response)),
                title=Text(f"assessor: {verdict}"),
                title_align="left",
                border_style="blue",
            )
        )
    for role in Role:
        components = record.rewards.get(role)
        if components is not None:
            terms = "  ".join(f"{name} {value:+.2f}" for name, value in components.items())
            parts.append(Text(f"{role.value} {sum(components.values()):+.2f} = {terms}"))
    return Panel(Group(*parts), title=Text(f"{title}, step {record.step}"), title_align="left")


def render_metrics(games: list[GameRecord], metrics_file: Path) -> Table:
    """The headline metrics of the first and the last step, side by side."""
    by_step = {step: role_metrics(group) for step, group in groupby(games, key=lambda g: g.step)}
    if metrics_file.exists():
        for row in StepFile(metrics_file).read():
            by_step.setdefault(int(row["step"]), {}).update({k: v for k, v in row.items() if k != "step"})
    first, last = min(by_step), max(by_step)
    table = Table("metric", f"step {first}", f"step {last}", title="role metrics")
    for name in HEADLINE_METRICS:
        values = [by_step[step].get(name) for step in (first, last)]
        if any(value is not None for value in values):
            table.add_row(name, *("" if value is None else f"{value:.4g}" for value in values))
    return table


def _telling_game(games: list[GameRecord]) -> int:
    """Number of the latest game with a valid attack and a readable answer, else of the last game."""
    for number in range(len(games), 0, -1):
        game = games[number - 1]
        if game.attack is not None and game.outcome in (Outcome.MISSED_ERROR, Outcome.CORRECT_DETECTION):
            return number
    return len(games)
