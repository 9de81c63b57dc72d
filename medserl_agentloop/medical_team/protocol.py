"""The ``/judge`` protocol of the OpenRLHF system: what is asked and answered, the judge that asks,
and a server.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from hmac import compare_digest
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from medserl_agentloop.core.client import BadAnswer, HttpClient, NoAnswer, Refused
from medserl_agentloop.games.medical.case import Category, GameSpec, Label
from medserl_agentloop.games.medical.config import JudgeServer, MedicalConfig
from medserl_agentloop.games.medical.judges import GatedJudge, Judge, LabelJudge
from medserl_agentloop.games.medical.judges.cache import AnswerCache
from medserl_agentloop.games.medical.parsing import MEDSERL, verdict_of
from medserl_agentloop.games.medical.records import Judgement
from medserl_agentloop.paths import LONGEST_NOTE
from medserl_agentloop.terminal import visible

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger(__name__)

SCORE_KEY = "labels"  # that some servers and clients put the answers under; requests name it
Labels = dict[str, Any]  # the answer about one game, in the protocol's keys
# The protocol wants an assessment. Notes alone decide the label, so that no assessor can talk to
# the judge.
_ANY_VERDICT = Label.SAFE.value.capitalize()
MAX_BYTES = 8 * 2**20  # longest request that the server reads. A thousand games fit
# seconds from a connection to the last byte of its request, after which the server hangs up
REQUEST_S = 20.0
_WAIT_S = 0.02  # how long a game waits for others to join its request
_ABOUT_CONTENT = (400, 413, 422)  # HTTP statuses that may be about one of several notes


class JudgeAnswer(BaseModel):
    """The answer about one game; None where the server does not say."""

    model_config = ConfigDict(strict=True)

    error_detected: bool | None = None  # whether the assessor said that there is an error
    # whether there is one; ``actual_harm`` says the same in other words
    error_present: bool | None = None
    error_realistic: bool | None = None
    assessor_correct: bool | None = None
    is_parsing_error: bool = False  # the judge failed; nothing else counts then
    judge_reasoning: str | None = None
    actual_harm: Literal["Safe", "Harmful"] | None = None
    abstained: bool = False  # the judge cannot tell; only this package's server says it
    # ``error_realistic`` is the judge's word; the protocol wants a truth value anyway
    realism_judged: bool = True

    def to_judgement(self, judge: str) -> Judgement:
        """Return the judgement of the presented note; ValueError if there is none, or it
        contradicts itself.
        """
        reason = self.judge_reasoning or ""
        if self.abstained:
            return Judgement(judge=judge, label=None, reason=reason)
        if self.is_parsing_error:
            raise ValueError(
                f"the server's judge failed (is_parsing_error): {reason or 'no reason'}"
            )
        said = {harm == "Harmful" for harm in [self.actual_harm] if harm} | (
            {self.error_present} - {None}
        )
        if not said:
            raise ValueError("error_present is missing")
        if len(said) == 2:
            raise ValueError(
                f"error_present is {self.error_present} but actual_harm is {self.actual_harm}"
            )
        return Judgement(
            judge=judge,
            label=Label.HARMFUL if said == {True} else Label.SAFE,
            realistic=self.error_realistic if self.realism_judged else None,
            reason=reason,
        )


def make_labels(
    *, error_present: bool = False, error_detected: bool = False, reasoning: str = "", **others: Any
) -> Labels:
    """A :class:`JudgeAnswer` as the original server writes it; ``others`` are added, or replace its
    defaults.
    """
    right = error_detected == error_present and not others.get("is_parsing_error", False)
    labels: Labels = {
        "error_detected": error_detected,
        "error_present": error_present,
        "error_realistic": True,
    }
    labels |= {"assessor_correct": right, "is_parsing_error": False, "judge_reasoning": reasoning}
    labels["actual_harm"] = "Harmful" if error_present else "Safe"
    return labels | {name: value for name, value in others.items() if value is not None}


_labels = partial(make_labels, abstained=False, realism_judged=False)


async def ask(
    client: HttpClient, queries: Sequence[dict[str, Any]], score_key: str = SCORE_KEY
) -> dict[str, Any]:
    """Per game index, the server's answer or a :class:`NoAnswer`; a request that is refused is
    split in halves.
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
        halves = await asyncio.gather(
            *(ask(client, half, score_key) for half in (queries[:middle], queries[middle:]))
        )
        return {**halves[0], **halves[1]}
    return {
        index: answers.get(index, BadAnswer(f"no answer about game {index}")) for index in indices
    }


def by_index(body: Any, indices: Sequence[str], score_key: str = SCORE_KEY) -> dict[str, Any]:
    """The answers in a response, which come by index or in the order asked, bare or under
    ``score_key``.
    """
    answers = body.get(score_key, body) if isinstance(body, dict) else body
    if isinstance(answers, list) and len(answers) == len(indices):
        return dict(zip(indices, answers, strict=True))
    if not isinstance(answers, dict):
        raise BadAnswer(f"expected an object by game index, got {type(answers).__name__}")
    return answers


class HttpJudge:
    """Asks a server that speaks the ``/judge`` protocol: the games of a moment in one request, each
    answered alone.
    """

    name = "http"

    def __init__(self, server: JudgeServer) -> None:
        self._server = server
        self._client = server.client("/judge")
        self._cache = AnswerCache(server.cache, Judgement)
        self._numbers = (
            itertools.count()
        )  # never used twice, so that no answer can pass for another's
        # Of each event loop, the games that wait for others to join them, and the answers to come.
        self._open: dict[
            asyncio.AbstractEventLoop, tuple[list[Any], asyncio.Task[dict[str, Any]]]
        ] = {}

    @classmethod
    def from_config(cls, config: MedicalConfig) -> HttpJudge:
        return cls(config.judge_server)

    async def judge(self, presented: str, original: str, spec: GameSpec) -> Judgement:
        started = time.monotonic()
        about = {
            "medical_note": presented,
            "original_note": original,
            "game_category": spec.category.value,
        }
        if spec.error_type:
            about["error_type"] = spec.error_type
        query = {"game_idx": next(self._numbers), "assessment": _ANY_VERDICT, **about}
        content = (self.name, self._client.url, *about.values())
        answer, cached = await self._cache.recall(content, partial(self._ask, query))
        return answer.model_copy(update={"cached": cached, "seconds": time.monotonic() - started})

    async def _ask(self, query: dict[str, Any]) -> Judgement:
        loop = asyncio.get_running_loop()
        if loop not in self._open:
            self._open[loop] = [], loop.create_task(self._answers())
        queries, answers = self._open[loop]
        queries.append(query)
        # A cancelled game must not take the others with it.
        answer = (await asyncio.shield(answers))[str(query["game_idx"])]
        if isinstance(answer, NoAnswer):
            raise answer
        try:
            return JudgeAnswer.model_validate(answer).to_judgement(self.name)
        except ValueError as error:
            raise BadAnswer(str(error)) from None

    async def _answers(self) -> dict[str, Any]:
        """The server's answers by game number, about the games that arrive while it waits."""
        await asyncio.sleep(_WAIT_S)
        queries, _ = self._open.pop(asyncio.get_running_loop())
        most = self._server.batch_size
        batches = [queries[start : start + most] for start in range(0, len(queries), most)]
        answered = await asyncio.gather(*(ask(self._client, batch) for batch in batches))
        return {index: answer for answers in answered for index, answer in answers.items()}


class _Query(BaseModel):
    """One game of a request; its answer goes back under ``game_idx``."""

    model_config = ConfigDict(strict=True)

    game_idx: int
    medical_note: str
    assessment: str = ""
    game_category: str | None = None
    original_note: str | None = None


class _Request(BaseModel):
    """The body of ``POST /judge``.

    A query that cannot be read costs its game, so each is read on its own.
    """

    queries: list[dict[str, Any]]


def create_app(backend: Judge, token: str = "") -> FastAPI:
    """The server; untouched notes get their category's label.

    With a ``token``, all but ``/health`` must bring it.
    """
    from fastapi import FastAPI, HTTPException
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse

    app = FastAPI(title="medserl judge")

    @app.middleware("http")
    async def guard(request: Any, answered: Callable[[Any], Awaitable[Any]]) -> Any:
        """Refuse a request without the token, and one that is too long or does not say how long it
        is.
        """
        headers = request.headers
        if (
            token
            and request.url.path != "/health"
            and not _has_token(headers.get("authorization", ""), token)
        ):
            return JSONResponse({"detail": "the token is missing or wrong"}, 401)
        if "transfer-encoding" in headers:
            return JSONResponse(
                {"detail": "send the request in one piece, with its content-length"}, 411
            )
        if int(headers.get("content-length", 0)) > MAX_BYTES:
            return JSONResponse(
                {"detail": f"the request is longer than {MAX_BYTES} bytes: send fewer games"}, 413
            )
        return await answered(request)

    @app.exception_handler(RequestValidationError)
    async def refuse(request: Any, error: RequestValidationError) -> Any:
        # FastAPI's own answer repeats the request, which may be something that JSON cannot hold.
        first = error.errors()[0]
        return JSONResponse({"detail": f"{'.'.join(map(str, first['loc']))}: {first['msg']}"}, 422)

    async def answer(query: Mapping[str, Any]) -> Labels:
        """The labels of one game; a failure must not cost the others their answers."""
        try:
            return await _judged(_Query.model_validate(query), backend)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            logger.warning("game %s is not judged: %s", query.get("game_idx"), visible(reason))
            return _labels(is_parsing_error=True, reasoning=reason)

    @app.post("/judge")
    async def judge(request: _Request) -> dict[str, Any]:
        indices = [query.get("game_idx") for query in request.queries]
        if not all(type(index) is int for index in indices) or len(set(indices)) < len(indices):
            raise HTTPException(
                422, "a game_idx is missing, no number, or occurs twice: give every game its own"
            )
        answers = await asyncio.gather(*map(answer, request.queries))
        return {str(index): labels for index, labels in zip(indices, answers, strict=True)}

    @app.get("/health")
    async def health() -> Any:
        down = getattr(backend, "is_down", False)
        return JSONResponse(
            {"status": "down" if down else "ok", "backend": backend.name}, 503 if down else 200
        )

    return app


def serve(app: FastAPI, host: str, port: int) -> None:
    """Serve until interrupted; open connections that send nothing cannot keep others out for
    long."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Impatient(H11Protocol):
        """Hangs up where no whole request has come in time; uvicorn itself waits for ever."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.loop.call_later(REQUEST_S, self.give_up)

        def give_up(self) -> None:
            if self.cycle is None or self.cycle.more_body:
                self.transport.close()

    uvicorn.run(
        app,
        host=host,
        port=port,
        http=Impatient,
        headers=[
            ("connection", "close")
        ],  # a second request on a connection would have no time limit
        backlog=100,  # asyncio logs as many lines in a second without a free file for a connection
        timeout_graceful_shutdown=3,
    )


def _has_token(authorization: str, token: str) -> bool:
    """Return whether a header holds the token, as such or as a password, which a client can put
    into the address.
    """
    scheme, _, value = authorization.partition(" ")
    given = value.encode()
    if scheme.lower() == "basic":
        try:
            given = b64decode(value).partition(b":")[2]
        except ValueError:
            return False
    return compare_digest(given, token.encode())


async def _judged(query: _Query, backend: Judge) -> Labels:
    """The labels of one game; raises what the judge raises, and a ValueError for what it cannot be
    asked.
    """
    if query.game_category is None and isinstance(backend, LabelJudge):
        raise ValueError("labels answers by category, and the query names no game_category")
    # Judges that read a note are not told its category.
    category = Category(query.game_category or Category.ADVERSARIAL_BENIGN)
    original = query.medical_note if query.original_note is None else query.original_note
    if max(len(original), len(query.medical_note)) > LONGEST_NOTE:
        raise ValueError(f"a note is longer than {LONGEST_NOTE} characters")
    spec = GameSpec(
        category=category, target_label=category.default_target_label, seed_note=original
    )
    # The original server's default category is vanilla_benign, also for notes that were changed.
    changed = original.split() != query.medical_note.split()
    chosen = backend if changed else GatedJudge(backend)
    judgement = Judgement.model_validate(await chosen.judge(query.medical_note, original, spec))
    # What the assessor said: the verdict alone, or a whole response.
    verdict = verdict_of(query.assessment) or MEDSERL.assessment(query.assessment).verdict
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
