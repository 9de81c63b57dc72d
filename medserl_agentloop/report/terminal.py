"""A run in the terminal: its games as readable text, the role metrics of its first and last step.

Called by ``medserl show``. Model text is untrusted: its control characters are spelt out, and markup in it is text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from medserl_agentloop.command_line import plain, visible
from medserl_agentloop.core.step_file import GAMES_FILE, METRICS_FILE, StepFile
from medserl_agentloop.games.medical.metrics import role_metrics
from medserl_agentloop.games.medical.records import MedicalRecord, Outcome
from medserl_agentloop.games.medical.table import marked_changes
from medserl_agentloop.games.medical.types import Role
from medserl_agentloop.report import read_run

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
