"""Logs of the OpenRLHF system as JSON lines, read into the frames of this project's runs. Called by ``compare``.

A line with a ``game_role`` is a turn state of that system's game manager; any other holds the metrics of a step.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import AliasChoices, BaseModel, Field

from medserl_agentloop.games.medical.records import Outcome
from medserl_agentloop.games.medical.types import Role
from medserl_agentloop.report.frames import GAMES, TURNS, typed_frame

SECONDS = "timing_s/step"
"""The metric that says how many seconds a step took."""
_CLOCK = "_runtime"  # seconds since the start, in every row of W&B's history
_STEPS = ("step", "global_step", "train/global_step", "_step")


class _Turn(BaseModel):
    """A turn state, as far as it is compared."""

    game_idx: int
    game_role: Role
    reward: float
    game_outcomes: list[str] = []
    cot_format_violation: bool | None = None
    length_cot_and_answer: tuple[int | None, int | None] = (None, None)
    step: int | None = Field(default=None, validation_alias=AliasChoices(*_STEPS))


def read_log(path: Path) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """The games, turns and metrics of a log; what it does not say is missing. A ValueError names a wrong line."""
    games: dict[tuple[Any, ...], dict[str, Any]] = {}
    turns: list[dict[str, Any]] = []
    numbers: list[dict[str, Any]] = []
    seen: Counter[tuple[Any, ...]] = Counter()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                if "game_role" not in row:
                    numbers.append({**row, "step": next(int(row[name]) for name in _STEPS if name in row)})
                    continue
                turns.append(turn := _turn(_Turn.model_validate(row)))
            except (ValueError, TypeError, StopIteration) as error:
                why = str(error) or f"it has neither game_role nor {' nor '.join(_STEPS)}"
                raise ValueError(f"{path}, line {number} is neither a turn nor the metrics of a step: {why}") from None
            game = (turn["step"], turn["game_idx"])
            seen[(*game, turn["role"])] += 1  # without steps, a game's index comes again in every batch
            games.setdefault((*game, seen[(*game, turn["role"])]), {}).update(turn)
    by_step = pd.DataFrame(numbers).groupby("step").last() if numbers else pd.DataFrame()
    if SECONDS not in by_step and _CLOCK in by_step:
        by_step[SECONDS] = by_step[_CLOCK].diff()
    return typed_frame(list(games.values()), GAMES), typed_frame(turns, TURNS), by_step


def _turn(said: _Turn) -> dict[str, Any]:
    """The columns of a turn, and of its game as far as the turn tells."""
    role, (thinking, answer) = said.game_role.value, said.length_cot_and_answer
    tokens = None if thinking is None or answer is None else thinking + answer
    found: dict[str, Any] = {"step": said.step, "game_idx": said.game_idx, "role": role}
    for of in ("", f"{role}_"):
        found |= {f"{of}tokens": tokens, f"{of}reward": said.reward}
    if said.cot_format_violation is not None:
        found["violations"] = "cot_format_violation" if said.cot_format_violation else ""
    for name in said.game_outcomes:
        player, _, outcome = name.rpartition(".")[2].lower().partition("_")  # or MedicalGameOutcome.ASSESSOR_…
        if player == Role.ASSESSOR.value:
            found |= {"outcome": Outcome(outcome).value, "right": Outcome(outcome).is_right}
    return found
