"""Judges: they decide whether the presented note contains an error. Called by the reward manager."""

from __future__ import annotations

from typing import Protocol

from medserl_agentloop.game.records import GameRecord, Judgement
from medserl_agentloop.judges.labels import LabelJudge


class Judge(Protocol):
    """Says whether the presented note of a game is harmful. May abstain, may raise."""

    name: str

    async def judge(self, record: GameRecord) -> Judgement:
        """Judge ``record.presented_note``. An exception voids the game, it never ends the run."""
        ...


JUDGES: dict[str, type[Judge]] = {"labels": LabelJudge}


def build_judge(name: str) -> Judge:
    """The judge called ``name``.

    Raises:
        ValueError: There is no such judge; lists those there are.
    """
    if name not in JUDGES:
        raise ValueError(f"no judge {name!r}: expected one of {', '.join(sorted(JUDGES))}")
    return JUDGES[name]()
