"""The judge that is a language model: any OpenAI-compatible server, or verl's own reward-model server."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, StrictUndefined
from pydantic import BaseModel, ConfigDict, ValidationError

from medserl_agentloop.config import SelfPlayConfig
from medserl_agentloop.game.edits import one_line
from medserl_agentloop.game.records import GameRecord, Judgement
from medserl_agentloop.game.types import Label
from medserl_agentloop.judges.marking import mark_changes
from medserl_agentloop.judges.options import JudgeServer
from medserl_agentloop.judges.remote import RemoteJudge
from medserl_agentloop.judges.transport import BadAnswer, JudgeClient, Refused
from medserl_agentloop.paths import resource
from medserl_agentloop.prompting import load_profile

logger = logging.getLogger(__name__)

TEMPLATE = Path("judge") / "judge.jinja"
# Some chat templates open the reasoning themselves, so that a response only closes it.
_REASONING = re.compile(r"\A.*</think>", re.DOTALL)
_CODE_FENCE = re.compile(r"\A```(?:json)?\s*\n(.*)\n\s*```\Z", re.DOTALL)
_LABELS = {"present": Label.HARMFUL, "absent": Label.SAFE, "abstain": None}


class Verdict(BaseModel):
    """All that the model is asked to write. The reason comes first: it is written before the verdict."""

    model_config = ConfigDict(strict=True, extra="forbid")

    reason: str
    error: Literal["present", "absent", "abstain"]
    realistic: bool | None


class _Message(BaseModel):
    content: str | None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Completion(BaseModel):
    choices: list[_Choice]


class LlmJudge(RemoteJudge):
    """Shows a model the note before and after the edit, the change marked, and nothing else of the game.

    Args:
        server: The options of the run's ``selfplay.judge_server``; ``url`` and ``model`` are needed.
        template: Text of the Jinja template that words the question.

    Raises:
        ValueError: The server has no address or model, or its API key is not in the environment.
    """

    name = "llm"

    def __init__(self, server: JudgeServer, template: str) -> None:
        super().__init__(server)
        if server.model is None:
            raise ValueError("selfplay.judge_server.model is not set")
        self.client = JudgeClient(server, "/chat/completions")
        self._model, self._server = server.model, server
        self._template = Environment(undefined=StrictUndefined, autoescape=False).from_string(template)
        self._json_schema = server.json_schema
        wording = json.dumps([template, Verdict.model_json_schema(), server.extra_body], sort_keys=True)
        self._prompt_version = hashlib.sha256(wording.encode()).hexdigest()

    @classmethod
    def from_config(cls, config: SelfPlayConfig) -> LlmJudge:
        """The judge of a run, worded by its prompt profile or, where that has no judge, by ``medserl``."""
        return cls(config.judge_server, judge_template(config.profile))

    def content(self, record: GameRecord) -> tuple[str, ...]:
        return (self._model, self._prompt_version, record.spec.seed_note, record.presented_note or "")

    def prompt(self, original: str | None, presented: str) -> str:
        """The question about ``presented``; an original that does not differ is left out."""
        before, after = mark_changes(presented if original is None else original, presented)
        changed = any(line.changed for line in (*before, *after))
        return self._template.render(original=before if changed else [], presented=after)

    async def ask(self, record: GameRecord) -> Judgement:
        prompt = self.prompt(record.spec.seed_note, record.presented_note or "")
        verdict = parse_verdict(await self._complete(prompt))
        return Judgement(
            judge=self.name, label=_LABELS[verdict.error], realistic=verdict.realistic, reason=verdict.reason
        )

    async def _complete(self, prompt: str) -> str:
        """The model's response.

        Raises:
            JudgeError: There is none, or it was cut off.
        """
        try:
            answer = await self.client.post(self._request(prompt))
        except Refused as error:
            if error.status not in (400, 422) or not self._json_schema:
                raise
            answer = await self.client.post(self._request(prompt, json_schema=False))
            logger.warning("the judge's server refuses response_format=json_schema; it is not sent any more")
            self._json_schema = False
        try:
            choice = _Completion.model_validate(answer).choices[0]
        except (ValidationError, IndexError):
            raise BadAnswer(f"not a chat completion: {one_line(json.dumps(answer))[:100]}") from None
        if choice.finish_reason == "length":
            raise BadAnswer(f"cut off after {self._server.max_tokens} tokens (selfplay.judge_server.max_tokens)")
        return choice.message.content or ""

    def _request(self, prompt: str, *, json_schema: bool = True) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0.0,
            "max_tokens": self._server.max_tokens,
        }
        if json_schema and self._json_schema:
            schema = {"name": "verdict", "strict": True, "schema": Verdict.model_json_schema()}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return {name: value for name, value in {**body, **self._server.extra_body}.items() if value is not None}


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
        return Verdict.model_validate(json.loads(answer, object_pairs_hook=_unique))
    except (ValueError, RecursionError):  # a ValidationError is a ValueError
        raise BadAnswer(f"not the JSON that was asked for: {one_line(answer)[:100]!r}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)
