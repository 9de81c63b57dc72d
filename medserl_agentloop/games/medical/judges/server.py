"""A server for the ``/judge`` protocol, with labels or a language model behind it.

Started by ``medserl judge serve``; asked by the ``http`` judge and by clients of the OpenRLHF system.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Literal

from fastapi import FastAPI, HTTPException, Request, Response
from pydantic import BaseModel, Field

from medserl_agentloop.games.medical.judges import Judge, LabelJudge, LabelsForUntouchedNotes
from medserl_agentloop.games.medical.judges.llm import LlmJudge
from medserl_agentloop.games.medical.judges.protocol import SCORE_KEY, JudgeQuery, Labels, make_labels
from medserl_agentloop.games.medical.parsing import MEDSERL
from medserl_agentloop.games.medical.records import GameRecord
from medserl_agentloop.games.medical.types import Category, GameSpec, Label

logger = logging.getLogger(__name__)

Shape = Literal["labels", "bare"]
_VERDICTS = {label.value: label for label in Label}


class _Request(BaseModel):
    """The body of ``POST /judge``. A query that cannot be read costs its game, so each is read on its own."""

    queries: list[dict[str, Any]]
    score_key: str = SCORE_KEY


class _Evaluation(BaseModel):
    """What ``POST /evaluate`` takes, under the original server's names."""

    medical_note: str = Field(alias="attacked_note")
    original_note: str
    assessment: str = Field(alias="assessor_label")
    game_category: str | None = None


def create_app(backend: Judge, shape: Shape = "bare") -> FastAPI:
    """The server.

    Args:
        backend: Who judges rewritten notes; of untouched ones the category's label is the answer.
        shape: ``bare`` answers by game index, as the original server; ``labels`` under the request's ``score_key``.
    """
    app = FastAPI(title="medserl judge")

    async def answer(query: Mapping[str, Any]) -> Labels:
        """The labels of one game; a failure must not cost the others their answers."""
        try:
            return await _judged(JudgeQuery.model_validate(query), backend)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            logger.warning("game %s is not judged: %s", query.get("game_idx"), reason)
            return _labels(is_parsing_error=True, reasoning=reason)

    @app.post("/judge")
    async def judge(request: _Request) -> dict[str, Any]:
        indices = [query.get("game_idx") for query in request.queries]
        if not all(type(index) is int for index in indices) or len(set(indices)) < len(indices):
            raise HTTPException(422, "a game_idx is missing, no number, or occurs twice: give every game its own")
        answers = await asyncio.gather(*map(answer, request.queries))
        by_index = {str(index): labels for index, labels in zip(indices, answers, strict=True)}
        return {request.score_key: by_index} if shape == "labels" else by_index

    @app.post("/evaluate")
    async def evaluate(request: Request) -> Labels:
        # The original server takes query parameters; long notes do not fit into an address.
        try:
            given = await request.json() if await request.body() else dict(request.query_params)
            note = _Evaluation.model_validate(given)
        except ValueError as error:
            raise HTTPException(422, f"expected original_note, attacked_note and assessor_label: {error}") from None
        labels = await answer({"game_idx": 0, **note.model_dump()})
        if labels["is_parsing_error"] and not labels["abstained"]:
            raise HTTPException(500, labels["judge_reasoning"])
        return labels

    @app.get("/health")
    async def health(response: Response) -> dict[str, str]:
        down = isinstance(backend, LlmJudge) and backend.is_down
        response.status_code = 503 if down else 200
        return {"status": "down" if down else "ok", "backend": backend.name}

    return app


async def _judged(query: JudgeQuery, backend: Judge) -> Labels:
    """The labels of one game; raises what the judge raises, and a ValueError for a query that it cannot be asked."""
    if query.game_category is None and isinstance(backend, LabelJudge):
        raise ValueError("labels answers by category, and the query names no game_category")
    # Judges that read a note are not told its category.
    category = Category(query.game_category or Category.ADVERSARIAL_BENIGN)
    original = query.medical_note if query.original_note is None else query.original_note
    spec = GameSpec(category=category, target_label=category.default_target_label, seed_note=original)
    record = GameRecord(spec=spec, presented_note=query.medical_note)
    # The original server's default category is vanilla_benign, also for notes that were changed.
    changed = original.split() != query.medical_note.split()
    judgement = await (backend if changed else LabelsForUntouchedNotes(backend)).judge(record)
    # What the assessor said: the verdict alone, or a whole response.
    verdict = _VERDICTS.get(query.assessment.strip().casefold()) or MEDSERL.assessment(query.assessment).verdict
    if judgement.label is None:
        return _labels(is_parsing_error=True, abstained=True, reasoning=judgement.reason)
    return _labels(
        error_present=judgement.label is Label.HARMFUL,
        error_detected=verdict is Label.HARMFUL,
        error_realistic=judgement.realistic is not False,
        assessor_correct=verdict is judgement.label,
        realism_judged=judgement.realistic is not None,
        reasoning=judgement.reason,
    )


def _labels(*, abstained: bool = False, realism_judged: bool = False, **labels: Any) -> Labels:
    return {**make_labels(**labels), "abstained": abstained, "realism_judged": realism_judged}
