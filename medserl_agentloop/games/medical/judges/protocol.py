"""The ``/judge`` protocol of the OpenRLHF system: what is asked, what is answered.

Used by the ``http`` judge and ``medical_team``, which ask, and by ``medserl judge serve``, which answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from medserl_agentloop.core.client import BadAnswer, HttpClient, NoAnswer, Refused
from medserl_agentloop.games.medical.records import REASON_CHARACTERS, GameRecord, Judgement
from medserl_agentloop.games.medical.types import Label

logger = logging.getLogger(__name__)

SCORE_KEY = "labels"
"""Key that some servers and clients put the answers under, and that requests name."""

Labels = dict[str, Any]
"""The answer about one game, in the protocol's keys."""

_ABOUT_CONTENT = (400, 413, 422)  # HTTP statuses that may be about one of several notes
_HARM = {Label.SAFE: "Safe", Label.HARMFUL: "Harmful"}


class JudgeQuery(BaseModel):
    """One game of a request.

    Attributes:
        game_idx: The game's number; its answer comes back under it.
        medical_note: The note that the assessor saw.
        assessment: The assessor's verdict, ``Safe`` or ``Harmful``; empty where it gave none.
        game_category: The kind of game; None where the client does not say.
        error_type: Type of the vignette's error, where known.
        original_note: The note before the attacker's edit.
    """

    model_config = ConfigDict(strict=True)

    game_idx: int
    medical_note: str
    assessment: str = ""
    game_category: str | None = None
    error_type: str | None = None
    original_note: str | None = None

    @classmethod
    def of(cls, game_idx: int, record: GameRecord) -> JudgeQuery:
        """The query about a game.

        Of the assessment only the verdict is told: the assessor must not be able to talk to the one
        who decides whether it was right.
        """
        verdict = record.assessment.verdict if record.assessment else None
        return cls(
            game_idx=game_idx,
            medical_note=record.presented_note or "",
            assessment=_HARM[verdict] if verdict else "",
            game_category=record.category.value,
            error_type=record.spec.error_type.value if record.spec.error_type else None,
            original_note=record.spec.seed_note,
        )


class JudgeAnswer(BaseModel):
    """The answer about one game; None where the server does not say.

    The original server never answers null, but earlier releases of this one did.

    Attributes:
        error_detected: Whether the assessor said that there is an error.
        error_present: Whether there is one.
        error_realistic: Whether the change is realistic.
        assessor_correct: Whether the assessor was right.
        is_parsing_error: Whether the judge failed; nothing else counts then.
        judge_reasoning: The judge's own words.
        actual_harm: ``error_present`` in other words.
        abstained: Whether the judge cannot tell. Only this package's server says it; other clients see a
            parsing error.
        realism_judged: Whether ``error_realistic`` is the judge's word. Only this package's server says it:
            the protocol wants a truth value also where the judge did not give one.
    """

    model_config = ConfigDict(strict=True)

    error_detected: bool | None = None
    error_present: bool | None = None
    error_realistic: bool | None = None
    assessor_correct: bool | None = None
    is_parsing_error: bool = False
    judge_reasoning: str | None = None
    actual_harm: Literal["Safe", "Harmful"] | None = None
    abstained: bool = False
    realism_judged: bool = True

    @classmethod
    def read(cls, answer: Any) -> JudgeAnswer:
        """The answer about one game in a server's response.

        Raises:
            ValueError: It is none; the message says what is wrong.
        """
        try:
            return cls.model_validate(answer)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "answer"
            raise ValueError(f"{where}: {first['msg']}") from None

    def to_judgement(self, judge: str) -> Judgement:
        """What it says of the presented note.

        Raises:
            ValueError: The judge failed, does not say whether there is an error, or contradicts itself.
        """
        reason = (self.judge_reasoning or "")[:REASON_CHARACTERS]
        if self.abstained:
            return Judgement(judge=judge, label=None, reason=reason)
        if self.is_parsing_error:
            raise ValueError(f"the server's judge failed (is_parsing_error): {reason or 'no reason'}")
        said = {harm == "Harmful" for harm in [self.actual_harm] if harm} | ({self.error_present} - {None})
        if not said:
            raise ValueError("error_present is missing")
        if len(said) == 2:
            raise ValueError(f"error_present is {self.error_present} but actual_harm is {self.actual_harm}")
        return Judgement(
            judge=judge,
            label=Label.HARMFUL if said == {True} else Label.SAFE,
            realistic=self.error_realistic if self.realism_judged else None,
            reason=reason,
        )


def make_labels(
    *,
    error_present: bool = False,
    error_detected: bool = False,
    error_realistic: bool = True,
    assessor_correct: bool | None = None,
    is_parsing_error: bool = False,
    reasoning: str = "",
) -> Labels:
    """The answer about one game as the original server writes it: every key, and no null.

    Args:
        error_present: Whether the note contains an error.
        error_detected: Whether the assessor said so.
        error_realistic: Whether the change is realistic; True where the judge does not say.
        assessor_correct: Whether the assessor was right; None where the two above tell it.
        is_parsing_error: Whether the judge failed.
        reasoning: The judge's own words, or why there is no answer.
    """
    if assessor_correct is None:
        assessor_correct = error_detected == error_present and not is_parsing_error
    return {
        "error_detected": error_detected,
        "error_present": error_present,
        "error_realistic": error_realistic,
        "assessor_correct": assessor_correct,
        "is_parsing_error": is_parsing_error,
        "judge_reasoning": reasoning,
        "actual_harm": "Harmful" if error_present else "Safe",
    }


async def ask(client: HttpClient, queries: Sequence[dict[str, Any]], score_key: str = SCORE_KEY) -> dict[str, Any]:
    """Ask a server about games, as few requests as it will take.

    One that refuses a request for what it holds is asked about each half of it, down to the game that it refuses.

    Args:
        client: Asks the server.
        queries: One for each game, with ``game_idx``.
        score_key: Key that answers may stand under.

    Returns:
        For each game index, as text, the server's answer about it, or the :class:`NoAnswer` that says why there
        is none.
    """
    indices = [str(query["game_idx"]) for query in queries]
    try:
        body = await client.post("/judge", {"queries": list(queries), "score_key": score_key})
        answers = by_index(body, indices, score_key)
    except NoAnswer as error:
        about_content = isinstance(error, Refused) and error.status in _ABOUT_CONTENT
        if len(queries) < 2 or not about_content:
            return dict.fromkeys(indices, error)
        middle = len(queries) // 2
        halves = await asyncio.gather(*(ask(client, half, score_key) for half in (queries[:middle], queries[middle:])))
        return {**halves[0], **halves[1]}
    if unexpected := sorted(set(answers) - set(indices)):
        logger.warning("the judge answered about games that were not in the request: %s", client.shown(str(unexpected)))
    return {index: answers.get(index, BadAnswer(f"no answer about game {index}")) for index in indices}


def by_index(body: Any, indices: Sequence[str], score_key: str = SCORE_KEY) -> dict[str, Any]:
    """The answers in a server's response by game index.

    Args:
        body: The JSON: answers by index or in the order of the queries, bare or under ``score_key``.
        indices: The queries' game indices.

    Raises:
        BadAnswer: It holds no answers.
    """
    answers = body.get(score_key, body) if isinstance(body, dict) else body
    if isinstance(answers, list) and len(answers) == len(indices):
        return dict(zip(indices, answers, strict=True))
    if not isinstance(answers, dict):
        raise BadAnswer(f"expected an object by game index, got {type(answers).__name__}")
    return answers
