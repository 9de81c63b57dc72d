"""The ``/judge`` protocol: a run's judge ``http``, the OpenRLHF system's calls, and a server.

A failing judge labels its games ``is_parsing_error``, which leaves them out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from medserl_agentloop.core.client import BadAnswer, HttpClient, NoAnswer, ServerOptions, blocking
from medserl_agentloop.core.config import selfplay_config
from medserl_agentloop.games.medical.case import Category, GameSpec, Label
from medserl_agentloop.games.medical.config import JudgeServer, MedicalConfig
from medserl_agentloop.games.medical.edit import one_line
from medserl_agentloop.games.medical.judges import GatedJudge, Judge, LabelJudge
from medserl_agentloop.games.medical.judges.llm import AnswerCache, LlmJudge
from medserl_agentloop.games.medical.parsing import MEDSERL, verdict_of
from medserl_agentloop.games.medical.records import Judgement
from medserl_agentloop.paths import LONGEST_NOTE
from medserl_agentloop.terminal import errors_in_one_line, visible

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger(__name__)

SCORE_KEY = "labels"  # that some servers put the answers under; requests name it
# The protocol wants an assessment. Notes alone decide the label, so that no assessor can talk to
# the judge.
_ANY_VERDICT = Label.SAFE.value.capitalize()

Query = dict[str, Any]
Labels = dict[str, Any]
"""The answer about one game, in the protocol's keys."""
JudgeFunction = Callable[..., dict[int, Labels]]
"""Called ``(url, batch_queries, score_key="labels")``, answers with labels by game index."""


class JudgeAnswer(BaseModel):
    """The answer about one game; fields that a server omits get defaults."""

    model_config = ConfigDict(strict=True)

    error_detected: bool  # whether the assessor said that there is an error
    error_present: bool  # whether there is one; ``actual_harm`` says the same in other words
    error_realistic: bool | None = None  # True if not judged, see ``realism_judged``
    assessor_correct: bool | None = None
    is_parsing_error: bool = False  # the judge failed; nothing else counts then
    judge_reasoning: str = ""
    actual_harm: Literal["Safe", "Harmful"] | None = None
    # Only this package's server says these two.
    abstained: bool = False  # the judge cannot tell
    realism_judged: bool = True  # ``error_realistic`` is the judge's word

    @model_validator(mode="after")
    def _complete(self) -> Self:
        harm: Literal["Safe", "Harmful"] = "Harmful" if self.error_present else "Safe"
        if self.actual_harm not in (None, harm):
            raise ValueError(
                f"error_present is {self.error_present} but actual_harm is {self.actual_harm}"
            )
        self.actual_harm = harm
        if self.error_realistic is None:
            self.error_realistic, self.realism_judged = True, False
        if self.assessor_correct is None:
            right = self.error_detected == self.error_present
            self.assessor_correct = right and not self.is_parsing_error
        return self

    def to_judgement(self, judge: str) -> Judgement:
        """Return the judgement of the presented note; BadAnswer if there is none."""
        if self.abstained:
            return Judgement(judge=judge, label=None, reason=self.judge_reasoning)
        if self.is_parsing_error:
            why = self.judge_reasoning or "no reason"
            raise BadAnswer(f"the server's judge failed (is_parsing_error): {why}")
        return Judgement(
            judge=judge,
            label=Label.HARMFUL if self.error_present else Label.SAFE,
            realistic=self.error_realistic if self.realism_judged else None,
            reason=self.judge_reasoning,
        )


def no_labels(reason: str, **changes: Any) -> JudgeAnswer:
    """The answer about a game that the judge could not judge."""
    nothing = {"error_detected": False, "error_present": False, "is_parsing_error": True}
    return JudgeAnswer(**{**nothing, "judge_reasoning": reason, **changes})


async def ask(
    client: HttpClient, queries: Sequence[Query], score_key: str = SCORE_KEY
) -> list[JudgeAnswer | NoAnswer]:
    """Ask about all ``queries`` in one request; return each answer, or why there is none."""
    try:
        body = await client.post("/judge", {"queries": list(queries), "score_key": score_key})
    except NoAnswer as error:
        return [error] * len(queries)
    return [read_answer(body, str(query["game_idx"]), score_key) for query in queries]


def read_answer(body: Any, index: str, score_key: str = SCORE_KEY) -> JudgeAnswer | NoAnswer:
    """The answer about a game in a response, which has answers by index, bare or under the key."""
    answers = body.get(score_key, body) if isinstance(body, dict) else body
    if not isinstance(answers, dict):
        return BadAnswer(f"expected an object by game index, got {type(answers).__name__}")
    if index not in answers:
        return BadAnswer(f"no answer about game {index}")
    try:
        return JudgeAnswer.model_validate(answers[index])
    except ValidationError as error:
        return BadAnswer(one_line(str(error)))


class HttpJudge:
    """Asks a server that speaks the ``/judge`` protocol, one game in a request."""

    name = "http"

    def __init__(self, server: JudgeServer) -> None:
        self._client = server.client("/judge")
        self._cache = AnswerCache(server.cache, Judgement)

    @classmethod
    def from_config(cls, config: MedicalConfig) -> HttpJudge:
        return cls(config.judge_server)

    async def judge(self, presented: str, original: str, spec: GameSpec) -> Judgement:
        about = {"medical_note": presented, "original_note": original}
        about["game_category"] = spec.category.value
        if spec.error_type:
            about["error_type"] = spec.error_type
        content = (self.name, self._client.url, *about.values())
        query = {"game_idx": 0, "assessment": _ANY_VERDICT, **about}
        answer, cached = await self._cache.recall(content, partial(self._ask, query))
        return answer.model_copy(update={"cached": cached})

    async def _ask(self, query: Query) -> Judgement:
        (answer,) = await ask(self._client, [query])
        if isinstance(answer, NoAnswer):
            raise answer
        return answer.to_judgement(self.name)


# -- the OpenRLHF system's calls -------------------------------------------------------------------


def create_medical_judge_remote_function(judge_url: str, timeout: float = 30.0) -> JudgeFunction:
    """A function that asks the judge about a batch, in one request of ``timeout`` seconds."""
    client = _client(judge_url, timeout)

    def ask_judge(
        url: str, batch_queries: Sequence[Query], score_key: str = SCORE_KEY
    ) -> dict[int, Labels]:
        """Labels by game index for every query. ``url`` is part of the interface but unused."""
        if not batch_queries:
            return {}
        labels = {}
        answers = blocking(ask(client, batch_queries, score_key))
        for query, answer in zip(batch_queries, answers, strict=True):
            if isinstance(answer, NoAnswer):
                logger.warning("game %s is left out: %s", query["game_idx"], answer)
                answer = no_labels(f"{type(answer).__name__}: {answer}")
            labels[query["game_idx"]] = answer.model_dump()
        return labels

    return ask_judge


def test_judge_connection(judge_url: str) -> bool:
    """Return whether the judge's ``/health`` answers."""
    try:
        blocking(_client(judge_url, 5.0).get("/health"))
    except NoAnswer:
        return False
    return True


# pytest collects anything named test_... in every test module that imports it.
test_judge_connection.__test__ = False  # type: ignore[attr-defined]


def wait_for_judge_server(judge_url: str, max_wait: float = 60, check_interval: float = 2) -> bool:
    """Return whether the judge's ``/health`` answers within ``max_wait`` seconds."""
    until = time.monotonic() + max_wait
    while not (ready := test_judge_connection(judge_url)) and time.monotonic() < until:
        time.sleep(check_interval)
    return ready


def _client(judge_url: str, timeout_s: float) -> HttpClient:
    return ServerOptions(url=judge_url, timeout_s=timeout_s, retries=0).client("/judge")


# -- medserl judge serve ---------------------------------------------------------------------------


class _Query(BaseModel):
    """One game of a request; its answer goes back under ``game_idx``."""

    game_idx: int = Field(strict=True)
    medical_note: str = Field(max_length=LONGEST_NOTE)
    assessment: str = ""
    game_category: Category | None = None
    original_note: str | None = Field(default=None, max_length=LONGEST_NOTE)


class _Request(BaseModel):
    queries: list[_Query]


def create_app(judge: Judge) -> FastAPI:
    """The server; untouched notes get their category's label."""
    from fastapi import FastAPI, HTTPException

    app = FastAPI(title="medserl judge")

    async def answer(query: _Query) -> JudgeAnswer:
        try:
            return await _judged(query, judge)
        except Exception as error:  # must not cost the other games their answers
            reason = f"{type(error).__name__}: {error}"
            logger.warning("game %d is not judged: %s", query.game_idx, visible(reason))
            return no_labels(reason)

    @app.post("/judge")
    async def judge_games(request: _Request) -> dict[int, JudgeAnswer]:
        indices = [query.game_idx for query in request.queries]
        if len(set(indices)) < len(indices):
            raise HTTPException(422, "a game_idx occurs twice: give every game its own")
        answers = await asyncio.gather(*map(answer, request.queries))
        return dict(zip(indices, answers, strict=True))

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok", "backend": judge.name}

    return app


async def _judged(query: _Query, judge: Judge) -> JudgeAnswer:
    """The answer about one game; raises what the judge raises."""
    if query.game_category is None and isinstance(judge, LabelJudge):
        raise ValueError("labels answers by category: name the game_category")
    # Judges that read a note are not told its category.
    category = query.game_category or Category.ADVERSARIAL_BENIGN
    original = query.medical_note if query.original_note is None else query.original_note
    spec = GameSpec(category, category.default_target_label, original)
    # The original server's default category is vanilla_benign, also for notes that were changed.
    changed = original.split() != query.medical_note.split()
    chosen = judge if changed else GatedJudge(judge)
    judgement = Judgement.model_validate(await chosen.judge(query.medical_note, original, spec))
    if judgement.label is None:
        return no_labels(judgement.reason, abstained=True)
    # What the assessor said: only the verdict, or a full response.
    verdict = verdict_of(query.assessment) or MEDSERL.assessment(query.assessment).verdict
    return JudgeAnswer(
        error_present=judgement.label is Label.HARMFUL,
        error_detected=verdict is Label.HARMFUL,
        error_realistic=judgement.realistic,
        assessor_correct=verdict is judgement.label,
        judge_reasoning=judgement.reason,
    )


def serve(
    judge: Annotated[
        Literal["labels", "llm"], typer.Option(help="Labels of the categories, or a model.")
    ],
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A key of the selfplay node: KEY=VALUE.")
    ] = None,
    host: Annotated[str, typer.Option(help="Anyone who reaches this can ask.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")
    ] = 8001,
) -> None:
    """Serve POST /judge and GET /health. Untouched notes always get their category's label."""
    import uvicorn

    with errors_in_one_line():
        config = selfplay_config(MedicalConfig, {"judge": judge}, settings or [])
        asked: Judge = LlmJudge(config) if judge == "llm" else LabelJudge()
    uvicorn.run(create_app(asked), host=host, port=port, timeout_graceful_shutdown=3)
