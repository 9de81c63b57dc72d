"""Judges: they decide whether the presented note contains an error. Called by the reward manager."""

from __future__ import annotations

import logging
from typing import Protocol

from medserl_agentloop.game.records import GameRecord, Judgement
from medserl_agentloop.judges.labels import LabelJudge

logger = logging.getLogger(__name__)


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


async def judge_game(judge: Judge, record: GameRecord) -> None:
    """Put the judge's word into ``record``; a failure or an abstention makes the game void.

    A game that has nothing to judge (void, or an invalid attack) is left alone.
    """
    if record.void is not None or record.assessment is None:
        return
    try:
        record.judgement = await judge.judge(record)
    except Exception as error:
        # An outage of the judge must cost its games, not the run, and must not invent a result.
        logger.warning("judge %s failed, game is void: %s", judge.name, error)
        record.void = f"judge failed: {type(error).__name__}"
        return
    if record.judgement.label is None:
        record.void = "judge abstained"
