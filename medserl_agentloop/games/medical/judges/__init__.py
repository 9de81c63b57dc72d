"""Judges: they decide whether the presented note contains an error. Called by the reward manager.

A judge is a class. :data:`JUDGES` says where those of this package are; a user's own is named in the
same way, ``selfplay.judge=package.module:Class``.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any, Protocol

from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.games.medical.judges.labels import LabelJudge
from medserl_agentloop.games.medical.records import JUDGE_ABSTAINED, JUDGE_FAILED, GameRecord, Judgement
from medserl_agentloop.paths import find_object

if TYPE_CHECKING:
    from medserl_agentloop.games.medical.config import MedicalConfig

logger = logging.getLogger(__name__)

JUDGES = {
    "labels": "medserl_agentloop.games.medical.judges.labels:LabelJudge",
    "http": "medserl_agentloop.games.medical.judges.http:HttpJudge",
    "llm": "medserl_agentloop.games.medical.judges.llm:LlmJudge",
    "oracle": "medserl_agentloop.games.medical.judges.oracle:OracleJudge",
}
"""Where each judge's class is; imported when it is asked for."""

_REASON_CHARACTERS = 300


class Judge(Protocol):
    """Says whether the presented note of a game is harmful. May abstain, may raise.

    A class with a class method ``from_config(config: MedicalConfig)`` is built by it, any other
    without arguments. An instance serves one process and must not bind to an event loop before it
    is asked.
    """

    name: str

    async def judge(self, record: GameRecord) -> Judgement:
        """Judge ``record.presented_note``. An exception voids the game, it never ends the run."""
        ...


def judge_class(name: str) -> Any:
    """The class of a judge.

    Args:
        name: A key of :data:`JUDGES`, or ``package.module:Class``.

    Raises:
        ValueError: There is no such judge, it cannot be imported, or it is no judge.
    """
    found = find_object("judge", name, JUDGES, "package.module:Class for one of yours")
    if not inspect.isclass(found) or not inspect.iscoroutinefunction(getattr(found, "judge", None)):
        raise ValueError(f"judge {name!r} is not a class with a method 'async def judge(self, record) -> Judgement'")
    return found


def build_judge(
    config: MedicalConfig, reward_router_address: str | None = None, reward_model: str | None = None
) -> Judge:
    """The judge of a run, with dataset labels in its place for untouched notes.

    Args:
        config: The run's ``selfplay`` node.
        reward_router_address: ``host:port`` where verl serves a reward model; used where
            ``judge_server.url`` names no server.
        reward_model: That model's name, used where ``judge_server.model`` names none.

    Raises:
        ValueError: There is no such judge, or it lacks an option that it needs.
    """
    server = config.judge_server
    if server.url is None and reward_router_address is not None:
        at_router = {"url": f"http://{reward_router_address}/v1", "model": server.model or reward_model}
        config = config.model_copy(update={"judge_server": server.model_copy(update=at_router)})
    found = judge_class(config.judge)
    judge = found.from_config(config) if hasattr(found, "from_config") else found()
    return LabelsForUntouchedNotes(judge)


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
        reason = one_line(f"{type(error).__name__}: {error}")[:_REASON_CHARACTERS]
        record.void = f"{JUDGE_FAILED}: {reason}"
        logger.warning("judge %s gave no answer, the game is void: %s", judge.name, reason)
        return
    if record.judgement.label is None:
        record.void = JUDGE_ABSTAINED


class LabelsForUntouchedNotes:
    """Asks a judge about rewritten notes only. The labels of untouched notes come from the data."""

    def __init__(self, judge: Judge) -> None:
        self.name = judge.name
        self._judge = judge
        self._labels = LabelJudge()

    async def judge(self, record: GameRecord) -> Judgement:
        return await (self._judge if record.category.has_attack else self._labels).judge(record)
