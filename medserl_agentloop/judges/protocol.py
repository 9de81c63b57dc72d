"""The ``/judge`` protocol of the OpenRLHF system: what is asked, what is answered.

Used by the ``http`` judge, which asks, and by ``medserl judge serve``, which answers.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from medserl_agentloop.game.records import GameRecord, Judgement
from medserl_agentloop.game.types import Label

SCORE_KEY = "labels"
_HARM = {Label.SAFE: "Safe", Label.HARMFUL: "Harmful"}


class JudgeQuery(BaseModel):
    """One game of a request.

    Attributes:
        game_idx: The game's number; its answer comes back under it.
        medical_note: The note that the assessor saw.
        assessment: The assessor's verdict, ``Safe`` or ``Harmful``; empty where it gave none.
        game_category: The kind of game.
        error_type: Type of the vignette's error, where known.
        original_note: The note before the attacker's edit.
    """

    model_config = ConfigDict(strict=True)

    game_idx: int
    medical_note: str
    assessment: str = ""
    game_category: str
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


class JudgeRequest(BaseModel):
    """The body of ``POST /judge``; answers come by game index, under ``score_key`` or bare."""

    queries: list[JudgeQuery]
    score_key: str = SCORE_KEY


class JudgeAnswer(BaseModel):
    """The answer about one game; None where the judge does not know.

    Attributes:
        error_detected: Whether the assessor said that there is an error.
        error_present: Whether there is one.
        error_realistic: Whether the change is realistic.
        assessor_correct: Whether the assessor was right.
        is_parsing_error: Whether the judge failed; nothing else counts then.
        judge_reasoning: The judge's own words.
        actual_harm: ``error_present`` in other words.
        abstained: Whether the judge cannot tell. Not in the OpenRLHF system, whose clients see a
            parsing error.
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

    def to_judgement(self, judge: str) -> Judgement:
        """What it says of the presented note.

        Raises:
            ValueError: The judge failed, does not say whether there is an error, or contradicts itself.
        """
        if self.abstained:
            return Judgement(judge=judge, label=None, reason=self.judge_reasoning or "")
        if self.is_parsing_error:
            raise ValueError(f"the server's judge failed (is_parsing_error): {self.judge_reasoning or 'no reason'}")
        if self.error_present is None:
            raise ValueError("error_present is missing")
        label = Label.HARMFUL if self.error_present else Label.SAFE
        if self.actual_harm not in (None, _HARM[label]):
            raise ValueError(f"error_present is {self.error_present} but actual_harm is {self.actual_harm}")
        return Judgement(judge=judge, label=label, realistic=self.error_realistic, reason=self.judge_reasoning or "")

    @classmethod
    def of(cls, judgement: Judgement, verdict: Label | None) -> JudgeAnswer:
        """A judgement as an answer, to an assessor that said ``verdict``."""
        detected = None if verdict is None else verdict is Label.HARMFUL
        if judgement.label is None:
            return cls(error_detected=detected, is_parsing_error=True, abstained=True, judge_reasoning=judgement.reason)
        return cls(
            error_detected=detected,
            error_present=judgement.label is Label.HARMFUL,
            error_realistic=judgement.realistic,
            assessor_correct=None if verdict is None else verdict is judgement.label,
            judge_reasoning=judgement.reason,
            actual_harm=_HARM[judgement.label],  # type: ignore[arg-type]
        )
