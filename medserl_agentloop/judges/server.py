"""A server for the ``/judge`` protocol, with labels or a language model behind it.

Started by ``medserl judge serve``; asked by the ``http`` judge and by clients of the OpenRLHF system.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Literal

from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse

from medserl_agentloop.game.parsing.medserl import parse_assessment
from medserl_agentloop.game.records import GameRecord
from medserl_agentloop.game.types import Category, GameSpec, Label
from medserl_agentloop.judges import Judge, LabelsForUntouchedNotes
from medserl_agentloop.judges.llm import LlmJudge
from medserl_agentloop.judges.protocol import JudgeAnswer, JudgeQuery, JudgeRequest

logger = logging.getLogger(__name__)

Shape = Literal["labels", "bare"]


def create_app(backend: Judge, shape: Shape = "labels") -> FastAPI:
    """The server.

    Args:
        backend: Who judges rewritten notes; of untouched ones the category's label is the answer.
        shape: ``labels`` puts the answers under the request's ``score_key``, as the OpenRLHF client
            wants them; ``bare`` does not.
    """
    app = FastAPI(title="medserl judge")
    by_labels_first = LabelsForUntouchedNotes(backend)

    async def answer(query: JudgeQuery) -> JudgeAnswer:
        verdict = _verdict(query.assessment)
        try:
            return JudgeAnswer.of(await by_labels_first.judge(_record(query)), verdict)
        except Exception as error:  # one game's failure must not cost the others their answers
            logger.warning("game %s is not judged: %s", query.game_idx, error)
            return JudgeAnswer(is_parsing_error=True, judge_reasoning=f"{type(error).__name__}: {error}")

    @app.post("/judge")
    async def judge(request: JudgeRequest) -> dict[str, Any]:
        indices = [query.game_idx for query in request.queries]
        if len(set(indices)) < len(indices):
            raise HTTPException(422, "a game_idx occurs twice: give every game of a request its own")
        answers = await asyncio.gather(*map(answer, request.queries))
        by_index = {str(index): a.model_dump() for index, a in zip(indices, answers, strict=True)}
        return {request.score_key: by_index} if shape == "labels" else by_index

    @app.get("/health")
    async def health() -> JSONResponse:
        ready = not (isinstance(backend, LlmJudge) and backend.client.is_down)
        return JSONResponse({"status": "ok" if ready else "down", "backend": backend.name}, 200 if ready else 503)

    return app


def _record(query: JudgeQuery) -> GameRecord:
    """The game of a query, as far as a judge needs to know it.

    Raises:
        ValueError: The query names no category of the game.
    """
    category = Category(query.game_category)
    spec = GameSpec(
        category=category,
        target_label=category.default_target_label,
        # Without an original nothing counts as changed, and the note is judged as it stands.
        seed_note=query.medical_note if query.original_note is None else query.original_note,
    )
    return GameRecord(spec=spec, presented_note=query.medical_note)


def _verdict(assessment: str) -> Label | None:
    """What the assessor said: the verdict alone, or a whole response."""
    words = {label.value: label for label in Label}
    return words.get(assessment.strip().casefold()) or parse_assessment(assessment).verdict
