"""The judge that is a language model: any OpenAI-compatible server, or verl's own reward-model server."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import time
from pathlib import Path
from typing import Literal

from jinja2 import Environment, StrictUndefined
from pydantic import BaseModel, ConfigDict

from medserl_agentloop.core.chat import PATH, ChatAnswer, ChatClient
from medserl_agentloop.core.client import BadAnswer, NoAnswer, Refused, read_json
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.games.medical.judges.cache import JudgementCache, recall
from medserl_agentloop.games.medical.judges.marking import mark_changes
from medserl_agentloop.games.medical.judges.options import JudgeServer
from medserl_agentloop.games.medical.judges.votes import combine
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import REASON_CHARACTERS, GameRecord, Judgement, Vote
from medserl_agentloop.games.medical.types import Label
from medserl_agentloop.paths import resource

logger = logging.getLogger(__name__)

TEMPLATE = Path("judge") / "judge.jinja"
# Some chat templates open the reasoning themselves, so that a response only closes it.
_REASONING = re.compile(r"\A.*</think>", re.DOTALL)
_CODE_FENCE = re.compile(r"\A```(?:json)?\s*\n(.*)\n\s*```\Z", re.DOTALL)
_LABELS: dict[str, Label | None] = {"present": Label.HARMFUL, "absent": Label.SAFE, "abstain": None}


class Verdict(BaseModel):
    """All that the model is asked to write. The reason comes first: it is written before the verdict."""

    model_config = ConfigDict(strict=True, extra="forbid")

    reason: str
    error: Literal["present", "absent", "abstain"]
    realistic: bool | None


_SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "verdict", "strict": True, "schema": Verdict.model_json_schema()},
}


class _Model:
    """One of the models that vote.

    Args:
        server: Its address, name and limits.
        wording: The template's text; together with the options it makes the version of what is asked.
    """

    def __init__(self, server: JudgeServer, wording: str) -> None:
        if server.model is None:
            raise ValueError(f"{server.node}.model is not set")
        self.name = server.model
        self.chat = ChatClient(server.client(PATH))
        self._json_schema = server.json_schema
        self._fields = {"temperature": server.temperature, "max_tokens": server.max_tokens}
        version = json.dumps([wording, _SCHEMA, server.temperature, server.extra_body], sort_keys=True)
        self.version = hashlib.sha256(version.encode()).hexdigest()

    async def verdict(self, prompt: str) -> Verdict:
        """The model's answer.

        Raises:
            NoAnswer: There is none, it was cut off, or it is not what was asked for.
        """
        try:
            answer = await self._complete(prompt)
        except Refused as error:
            if error.status not in (400, 422) or not self._json_schema:
                raise
            answer = await self._complete(prompt, json_schema=False)
            logger.warning("the judge's server refuses response_format=json_schema; it is not sent any more")
            self._json_schema = False
        if answer.truncated:
            raise BadAnswer(f"cut off after {self._fields['max_tokens']} tokens (selfplay.judge_server.max_tokens)")
        return parse_verdict(answer.text)

    async def _complete(self, prompt: str, *, json_schema: bool = True) -> ChatAnswer:
        bound = {"response_format": _SCHEMA} if json_schema and self._json_schema else {}
        return await self.chat.complete([{"role": "user", "content": prompt}], {**bound, **self._fields})


class LlmJudge:
    """Shows a model the note before and after the edit, the change marked, and nothing else of the game.

    Args:
        server: The options of the run's ``selfplay.judge_server``; ``url`` and ``model`` are needed.
        template: Text of the Jinja template that words the question.

    Raises:
        ValueError: A server has no address or model, or its API key is not in the environment.
    """

    name = "llm"

    def __init__(self, server: JudgeServer, template: str) -> None:
        self._template = Environment(undefined=StrictUndefined, autoescape=False).from_string(template)
        self._models = [_Model(member, template) for member in server.members()]
        self._ballots = [(model, number) for model in self._models for number in range(server.votes)]
        self._agreement = server.agreement
        self._cache = JudgementCache(server.cache) if server.cache else None

    @classmethod
    def from_config(cls, config: MedicalConfig) -> LlmJudge:
        """The judge of a run, worded by its prompt profile or, where that has no judge, by ``medserl``."""
        return cls(config.judge_server, judge_template(config.profile))

    @property
    def is_down(self) -> bool:
        """Whether no model answers any more."""
        return all(model.chat.http.is_down for model in self._models)

    def prompt(self, original: str | None, presented: str, *, edited_first: bool = False) -> str:
        """The question about ``presented``; an original that does not differ is left out.

        Args:
            original: The note before the edit.
            presented: The note to judge.
            edited_first: Which of the two comes first; it should make no difference to the answer.
        """
        before, after = mark_changes(presented if original is None else original, presented)
        changed = any(line.changed for line in (*before, *after))
        return self._template.render(original=before if changed else [], presented=after, edited_first=edited_first)

    async def judge(self, record: GameRecord) -> Judgement:
        """Judge ``record.presented_note``.

        Raises:
            NoAnswer: There is no usable answer.
        """
        started = time.monotonic()
        if len(self._ballots) == 1:
            judgement = await self._vote(record, *self._ballots[0])
        else:
            votes = await asyncio.gather(*(self._ballot(record, *ballot) for ballot in self._ballots))
            judgement = combine(self.name, votes, self._agreement)
        return judgement.model_copy(update={"seconds": time.monotonic() - started})

    async def _ballot(self, record: GameRecord, model: _Model, number: int) -> Vote:
        """One of several votes; one that is lost must not take the others with it."""
        vote = Vote(model=model.name, edited_first=_edited_first(number), label=None)
        try:
            said = await self._vote(record, model, number)
        except NoAnswer as error:
            return vote.model_copy(update={"failed": f"{type(error).__name__}: {error}"})
        return vote.model_copy(
            update={name: getattr(said, name) for name in ("label", "realistic", "reason", "cached")}
        )

    async def _vote(self, record: GameRecord, model: _Model, number: int) -> Judgement:
        original, presented = record.spec.seed_note, record.presented_note or ""
        prompt = self.prompt(original, presented, edited_first=_edited_first(number))

        async def ask() -> Judgement:
            said = await model.verdict(prompt)
            reason = said.reason[:REASON_CHARACTERS]
            return Judgement(judge=self.name, label=_LABELS[said.error], realistic=said.realistic, reason=reason)

        content = (self.name, model.name, model.version, original, presented, str(number))
        return await recall(self._cache, content, ask)


def _edited_first(number: int) -> bool:
    """Of a model's votes every second one, so that a preference for either place cancels out and can be measured."""
    return number % 2 == 1


def judge_template(profile: str) -> str:
    """Text of the template that words a profile's question to the judge."""
    own = load_profile(profile).folder / TEMPLATE
    return (own if own.exists() else resource("prompts") / "medserl" / TEMPLATE).read_text(encoding="utf-8")


def parse_verdict(text: str) -> Verdict:
    """Read a response: one JSON object, after reasoning in ``<think>`` and inside a code fence if need be.

    Raises:
        BadAnswer: It holds anything else.
    """
    answer = _REASONING.sub("", text).strip()
    if fenced := _CODE_FENCE.match(answer):
        answer = fenced.group(1)
    try:
        # In two steps: pydantic's own reader takes the last of two values for one key.
        return Verdict.model_validate(read_json(answer))
    except ValueError:  # a ValidationError is one
        raise BadAnswer(f"not the JSON that was asked for: {one_line(answer)[:100]!r}") from None
