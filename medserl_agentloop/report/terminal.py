"""A run in the terminal: its games as readable text, the role metrics of its first and last step.

Called by ``medserl show``. Model text is untrusted: its control characters are spelt out, and markup in it is text.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from medserl_agentloop.command_line import plain, visible
from medserl_agentloop.core.step_file import GAMES_FILE, METRICS_FILE, StepFile
from medserl_agentloop.games.medical.metrics import role_metrics
from medserl_agentloop.games.medical.records import Games, MedicalRecord, Outcome
from medserl_agentloop.games.medical.table import marked_changes
from medserl_agentloop.games.medical.types import Category, Role
from medserl_agentloop.report.frames import read_run

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
KEYS = "Enter next, p previous, NUMBER that game, f WORDS filter, f no filter, q quit"
FILTERS = (
    "A game must have every word of a filter: an outcome, a category, step=4, "
    "attacker=heparin or assessor=heparin for what a role wrote, or a word of any text of the game"
)


def show_run(run: Path, console: Console, *, game: int | None = None) -> None:
    """Print a game and the metrics of a run: its ``selfplay.records`` folder, or a file of game records.

    ``game`` is its line number, from 1; None picks a telling one of the last step. A ValueError says that the run holds
    no games, or no game of that number.
    """
    games, number, steps = _games(run, game)
    console.print(render_game(games[number - 1], title=f"game {number} of {len(games)}"))
    _print_metrics(run, games, steps, console)


def walk(run: Path, console: Console, *, game: int | None = None) -> None:
    """Show one game after the other, as the person at ``console`` asks for them; arguments as in :func:`show_run`."""
    games, number, steps = _games(run, game)
    words: list[str] = []
    found: Sequence[int] = range(1, len(games) + 1)
    _print_metrics(run, games, steps, console)
    while True:
        of = f", {found.index(number) + 1} of {len(found)} with {' '.join(words)}" if words else ""
        console.print(render_game(games[number - 1], title=f"game {number} of {len(games)}{of}"))
        try:
            said = console.input(Text(f"{KEYS}: ", style="dim")).split()
        except (EOFError, KeyboardInterrupt):
            return
        match said:
            case ["q" | "quit"]:
                return
            case [] | ["n"]:
                number = next((n for n in found if n > number), found[0])
            case ["p"]:
                number = next((n for n in reversed(found) if n < number), found[-1])
            case [digits] if digits.isdecimal():
                if 1 <= int(digits) <= len(games):
                    number, words, found = int(digits), [], range(1, len(games) + 1)
                else:
                    console.print(Text(f"there are games 1 to {len(games)}"))
            case ["f", *asked]:
                if hits := [n for n, record in enumerate(games, start=1) if matches(record, asked)]:
                    words, found = asked, hits
                    number = number if number in hits else hits[0]
                else:
                    console.print(plain(f"no game has {' '.join(asked)}. {FILTERS}"))
            case _:
                console.print(Text(f"{KEYS}\n{FILTERS}"))


def matches(record: MedicalRecord, words: Sequence[str]) -> bool:
    """Whether a game has every word of a filter, in any case; see :data:`FILTERS`."""
    assessments = [each.assessment for each in record.by_assessment]
    wrote = {
        Role.ATTACKER.value: record.attack.response.lower() if record.attack else "",
        Role.ASSESSOR.value: "\n".join(turn.response.lower() for turn in assessments if turn),
    }
    texts = "\n".join((record.spec.seed_note.lower(), *wrote.values()))
    names = {name.value for name in (*Outcome, *Category)}
    for word in map(str.lower, words):
        key, equals, value = word.partition("=")
        if equals and key == "step":
            fits = value == str(record.step)
        elif equals and key in wrote:
            fits = value in wrote[key]
        else:
            fits = word in (record.outcome, record.category) if word in names else word in texts
        if not fits:
            return False
    return True


def _games(run: Path, game: int | None) -> tuple[Games, int, np.ndarray]:
    """The games of a run, the number of the one to show (the latest with an attack and a verdict), and their steps."""
    games = read_run(run)
    if game is not None and not 1 <= game <= len(games):
        raise ValueError(f"{run} holds games 1 to {len(games)}, there is no game {game}")
    decided = (Outcome.MISSED_ERROR, Outcome.CORRECT_DETECTION)
    telling, steps = len(games), array("q")
    for number, each in enumerate(games, start=1):
        telling = number if each.attack and each.outcome in decided else telling
        steps.append(each.step)
    return games, game or telling, np.asarray(steps)


def _print_metrics(run: Path, games: Games, step_of: np.ndarray, console: Console) -> None:
    """The headline metrics of the first and the last step, side by side; of the only one, once.

    ``step_of`` has the step of each game.
    """
    file = run / METRICS_FILE
    rows = list(StepFile(file).read()) if file.exists() else []
    steps = sorted({*np.unique(step_of).tolist(), *(int(row["step"]) for row in rows)})
    shown = list(dict.fromkeys((steps[0], steps[-1])))
    numbers = {step: role_metrics(games[n] for n in np.flatnonzero(step_of == step).tolist()) for step in shown}
    for row in rows:
        numbers.get(int(row["step"]), {}).update({name: value for name, value in row.items() if name != "step"})
    table = Table("metric", *(f"step {step}" for step in shown), title="role metrics")
    for name in HEADLINE_METRICS:
        values = [numbers[step].get(name) for step in shown]
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
