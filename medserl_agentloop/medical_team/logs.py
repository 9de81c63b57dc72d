"""A log of the OpenRLHF system (JSON lines), read for ``medserl compare``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import AliasChoices, BaseModel, Field

from medserl_agentloop import report
from medserl_agentloop.core.step_file import StepFile
from medserl_agentloop.games.medical.case import Role
from medserl_agentloop.games.medical.records import CLEARED, FOUND, GAMES, Outcome
from medserl_agentloop.report.compare import SECONDS

_CLOCK = "_runtime"  # seconds since the start, in every row of W&B's history
_STEPS = ("step", "global_step", "train/global_step", "_step")


class _LoggedTurn(BaseModel):
    game_idx: int
    game_role: Role
    reward: float
    game_outcomes: list[str] = []
    cot_format_violation: bool | None = None
    length_cot_and_answer: tuple[int | None, int | None] = (None, None)
    step: int | None = Field(default=None, validation_alias=AliasChoices(*_STEPS))


def read_log(path: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The games and metrics of a log of the OpenRLHF system, turns or steps; a ValueError names a
    wrong line.
    """
    games: dict[tuple[Any, ...], dict[str, Any]] = {}
    numbers: list[dict[str, Any]] = []
    seen: Counter[tuple[Any, ...]] = Counter()
    for number, row in enumerate(StepFile(path).read(), start=1):
        try:
            if "game_role" not in row:
                numbers.append(
                    {**row, "step": next(int(row[name]) for name in _STEPS if name in row)}
                )
                continue
            turn = _LoggedTurn.model_validate(row)
            columns = _columns_of(turn)
        except (ValueError, TypeError, StopIteration) as error:
            why = str(error) or f"it has neither game_role nor {' nor '.join(_STEPS)}"
            raise ValueError(
                f"{path}, line {number} is neither a turn nor the metrics of a step: {why}"
            ) from None
        game = (turn.step, turn.game_idx)
        seen[*game, turn.game_role] += 1  # without steps, a game's index comes again in every batch
        games.setdefault((*game, seen[*game, turn.game_role]), {}).update(columns)
    by_step = pd.DataFrame(numbers).groupby("step").last() if numbers else pd.DataFrame()
    if SECONDS not in by_step and _CLOCK in by_step:
        by_step[SECONDS] = by_step[_CLOCK].diff()
    return report.typed_frame(list(games.values()), GAMES), by_step


def _columns_of(turn: _LoggedTurn) -> dict[str, Any]:
    """The columns of a turn, and of its game as far as the turn tells."""
    role, (thinking, answer) = turn.game_role.value, turn.length_cot_and_answer
    tokens = None if thinking is None or answer is None else thinking + answer
    columns: dict[str, Any] = {
        "step": turn.step,
        f"{role}_reward": turn.reward,
        f"{role}_tokens": tokens,
    }
    if turn.cot_format_violation is not None:
        columns[f"{role}_format_kept"] = not turn.cot_format_violation
    for name in turn.game_outcomes:
        player, _, outcome = (
            name.rpartition(".")[2].lower().partition("_")
        )  # or MedicalGameOutcome.ASSESSOR_…
        if player == Role.ASSESSOR.value:
            # No outcome: the log leaves out games without a result, so it has no share of all
            # games.
            ended = Outcome(outcome)
            columns |= {
                "right": ended.is_right,
                "error_found": FOUND.get(ended),
                "note_cleared": CLEARED.get(ended),
            }
    return columns
