"""The judge that is a language model: its prompt, the reading of its answer, and its clients.

The judged player wrote the note: each line gets a number, two markers that no note can know enclose
it, and control text is made harmless.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sqlite3
import unicodedata
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

from diskcache import Cache
from jinja2 import StrictUndefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import AfterValidator, BaseModel, ConfigDict

from medserl_agentloop.core.chat import BASE, TEMPLATE_KWARGS, BaseModelChat, ChatClient
from medserl_agentloop.core.client import CHAT_PATH, BadAnswer, NoAnswer, Refused
from medserl_agentloop.core.encoding import THINK, as_data
from medserl_agentloop.games.medical.case import GameSpec, Label
from medserl_agentloop.games.medical.config import JudgeServer, MedicalConfig
from medserl_agentloop.games.medical.edit import changed_runs, one_line, split_sentences
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import Judgement, Reading
from medserl_agentloop.paths import each_key_once, hash_of_model, hash_of_values, resource
from medserl_agentloop.scoring.notes import same_sentence

Answer = TypeVar("Answer", bound=BaseModel)
logger = logging.getLogger(__name__)

# control and invisible characters, surrogates, unassigned
_NOT_TEXT = {"Cc", "Cf", "Cs", "Co", "Cn"}
# Some chat templates open the reasoning themselves, so that a response only closes it.
_REASONING = re.compile(r"\A.*</think>", re.DOTALL)
# pydantic's own reader takes the last of two values
_JSON = json.JSONDecoder(object_pairs_hook=each_key_once)
_OBJECT = re.compile(r'\{\s*"')  # prose may have its own braces
_LABELS = {"present": Label.HARMFUL, "absent": Label.SAFE, "abstain": None}

Words = Annotated[str, AfterValidator(lambda text: text.encode(errors="replace").decode())]
"""Text without the lone surrogates that JSON may hold, and no cache."""


class _Said(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    reason: Words  # first, so that it is written before the verdict
    error: Literal["present", "absent", "abstain"]


# Servers get these docstrings with the schema.


class Verdict(_Said):
    """The requested answer.

    The reason comes first, so the model writes it before the verdict.
    """

    realistic: bool | None


class Finding(_Said):
    """A blind reader's whole answer."""

    sentence: int | None


def read_answer(text: str, kind: type[Answer], note: str = "") -> Answer:
    """Read a response's one JSON object, after reasoning or amid prose; not one from ``note``."""
    answer = _REASONING.sub("", text).strip()
    try:
        start = _OBJECT.search(answer).start()  # type: ignore[union-attr]  # caught below
        prose, (value, end) = answer[:start], _JSON.raw_decode(answer, start)
        quoted = one_line(answer[start:end]) in one_line(note)
        if quoted or "{" in answer[end:] or prose.rstrip().endswith("[") or THINK in prose:
            raise ValueError
        return kind.model_validate(value)
    except (ValueError, RecursionError, AttributeError):  # a ValidationError is a ValueError
        raise BadAnswer(f"not the JSON that was asked for: {one_line(answer)[:100]!r}") from None


def shown_notes(presented: str, original: str) -> dict[str, Any]:
    """The notes as the templates show them: numbered lines, and a ``marker`` that no note holds."""
    before, after = split_sentences(original), split_sentences(presented)
    runs = changed_runs(before, after)
    gone = {number for start, end, _, _ in runs for number in range(start, end)}
    come = {number for _, _, start, end in runs for number in range(start, end)}
    return {
        "original": _lines(before, gone) if runs else [],
        "presented": _lines(after, come),
        "marker": hash_of_values(original, presented)[:16],
    }


def plain_text(text: str) -> str:
    """``text`` without invisible characters and without control text."""
    return as_data("".join(c for c in text if unicodedata.category(c) not in _NOT_TEXT))


def _lines(sentences: list[str], changed: set[int]) -> list[dict[str, Any]]:
    return [
        {"number": n + 1, "text": plain_text(text), "changed": n in changed}
        for n, text in enumerate(sentences)
    ]


def judge_template(profile: str, name: str = "judge") -> str:
    """The template of a profile's question, by default ``medserl``'s."""
    own, template = load_profile(profile).folder, Path("judge") / f"{name}.jinja"
    folder = own if (own / template).exists() else resource("prompts") / "medserl"
    return (folder / template).read_text(encoding="utf-8")


class AnswerCache(Generic[Answer]):
    """Answers of one ``kind`` in a folder, or nowhere (None); a ValueError if it cannot be used."""

    def __init__(self, folder: str | None, kind: type[Answer]) -> None:
        self._kind = kind
        try:
            self._kept = None if folder is None else Cache(folder, eviction_policy="none")
        except (sqlite3.Error, OSError) as error:
            raise ValueError(f"{JudgeServer.node}.cache={folder} is no cache: {error}") from None

    async def recall(
        self, content: tuple[str, ...], ask: Callable[[], Awaitable[Answer]]
    ) -> tuple[Answer, bool]:
        """Return the answer, and whether it was cached; ``content`` is all that it depends on."""
        if self._kept is None:
            return await ask(), False
        key = hash_of_values(self._kind.model_json_schema(), *content)
        if (kept := self._kept.get(key)) is not None:
            return self._kind.model_validate_json(kept), True
        answer = await ask()
        self._kept[key] = answer.model_dump_json()
        return answer, False


class _Model(Generic[Answer]):
    """A model that answers a template's question with an object of a ``kind``.

    ``weights`` is the path of a model that the run itself serves.
    """

    def __init__(
        self,
        server: JudgeServer,
        wording: str,
        kind: type[Answer],
        base: BaseModelChat | None,
        weights: str | None,
        temperature: float = 0.0,
    ) -> None:
        self.chat: ChatClient | BaseModelChat
        self._json_schema = server.json_schema
        if server.url == BASE and base is not None:
            weights = base.name
            self.chat = base.with_template(**server.extra_body.get(TEMPLATE_KWARGS, {}))
            self._json_schema = False  # verl's engine cannot constrain answers
        elif server.model is None:
            raise ValueError(f"{server.node}.model is not set")
        else:
            self.chat = ChatClient(server.client(CHAT_PATH))
        jinja = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)
        self._template = jinja.from_string(wording)
        bound = {"name": kind.__name__.lower(), "strict": True, "schema": kind.model_json_schema()}
        self._schema = {"response_format": {"type": "json_schema", "json_schema": bound}}
        self._fields = {"temperature": temperature, "max_tokens": server.max_tokens}
        self._kind, self._server, self._weights = kind, server, weights
        self._asked = [wording, self._schema, temperature, server.extra_body]
        self._cache = AnswerCache(server.cache, kind)

    @cached_property
    def _identity(self) -> str:
        """Everything but the notes that its answers depend on."""
        served = hash_of_values((self._server.url or "").rstrip("/"), self._server.model)
        if self._weights is not None:  # served at an address that differs from run to run
            cached = self._server.cache is not None  # a hash of weights takes seconds
            served = (hash_of_model(self._weights) if cached else None) or self._weights
        return hash_of_values(served, *self._asked)

    async def answer(self, presented: str, original: str, number: int = 0) -> tuple[Answer, bool]:
        """Answer ``number`` about two notes, and whether it was cached; or NoAnswer."""
        content = (self._identity, original, presented, str(number))
        return await self._cache.recall(content, lambda: self._ask(presented, original))

    async def _ask(self, presented: str, original: str) -> Answer:
        question = self._template.render(shown_notes(presented, original))
        messages = [{"role": "user", "content": question}]
        schema = self._schema if self._json_schema else {}
        try:
            answer = await self.chat.complete(messages, self._fields | schema)
        except Refused as error:
            if error.status not in (400, 404, 422) or not schema:
                raise
            answer = await self.chat.complete(messages, self._fields)
            logger.warning(
                "the judge's server refuses response_format=json_schema; it is no longer sent"
            )
            self._json_schema = False
        if answer.truncated:
            key = f"{self._server.node}.max_tokens"
            raise BadAnswer(f"cut off after {self._server.max_tokens} tokens ({key})")
        return read_answer(answer.text, self._kind, presented)


class LlmJudge(_Model[Verdict]):
    """Asks a language model with the run's prompt profile."""

    name = "llm"

    def __init__(
        self, config: MedicalConfig, base: BaseModelChat | None = None, weights: str | None = None
    ) -> None:
        super().__init__(
            config.judge_server, judge_template(config.profile), Verdict, base, weights
        )

    async def judge(self, presented: str, original: str, spec: GameSpec) -> Judgement:
        said, cached = await self.answer(presented, original)
        return Judgement(
            judge=self.name,
            label=_LABELS[said.error],
            realistic=said.realistic,
            reason=said.reason,
            cached=cached,
        )


class BlindReader(_Model[Finding]):
    """Asks the model on the judge's server about the presented note alone, several times."""

    def __init__(
        self, config: MedicalConfig, base: BaseModelChat | None = None, weights: str | None = None
    ) -> None:
        self.needed, self._readings = config.blind.needed, config.blind.readings
        server, wording = config.judge_server, judge_template(config.profile, "blind")
        super().__init__(server, wording, Finding, base, weights, temperature=0.7)

    async def read(self, note: str, wrong: Sequence[str]) -> list[Reading]:
        """Return the readings of ``note``; one finds the error if it names a part of ``wrong``."""
        numbers = range(self._readings)
        return await asyncio.gather(*(self._reading(note, wrong, number) for number in numbers))

    async def _reading(self, note: str, wrong: Sequence[str], number: int) -> Reading:
        try:
            said, cached = await self.answer(note, note, number)
        except NoAnswer as error:  # a lost one must not cost the others
            return Reading(found=None, failed=f"{type(error).__name__}: {error}")
        hit = said.error == "present" and _is_wrong(note, wrong, said.sentence)
        found = None if said.error == "abstain" else hit
        return Reading(found=found, reason=said.reason, cached=cached)


def _is_wrong(note: str, wrong: Sequence[str], number: int | None) -> bool:
    """Return whether the sentence with this number, from 1, is one of ``wrong`` or part of one."""
    named = dict(enumerate(split_sentences(note), start=1)).get(number or 0)
    return named is not None and any(
        named in known or known in named or same_sentence(named, known)
        for known in map(one_line, wrong)
    )
