"""Asking a model for the assessor's turn on many notes. No answer is asked for twice.

Called by ``medserl evaluate``. A model on this machine is in ``local_models``.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from medserl_agentloop.core.driver import NoReplyError, Reply
from medserl_agentloop.games.medical.prompting import PromptProfile
from medserl_agentloop.games.medical.types import Category, Role
from medserl_agentloop.play.endpoint import EndpointPlayer

ANY_CATEGORY = Category.VANILLA_BENIGN
"""The assessor's prompt does not depend on it."""


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn; see the options of ``medserl evaluate``."""

    temperature: float
    samples: int
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class Question:
    """A note to assess; of several samples, which one."""

    note: str
    sample: int = 0


Answers = AsyncGenerator[tuple[Question, Reply | NoReplyError], None]


class Assessor(Protocol):
    """A model that assesses notes.

    Attributes:
        identity: Two assessors with one identity are one model.
    """

    identity: str

    def prompt(self, note: str) -> Any:
        """What the model reads, JSON-able."""
        ...

    def answers(self, questions: Sequence[Question]) -> Answers:
        """The answers as they come, in any order."""
        ...


class ServedAssessor:
    """A model behind an OpenAI-compatible server.

    Args:
        player: Asks it.
        profile: Prompt profile of the questions.
    """

    def __init__(self, player: EndpointPlayer, profile: PromptProfile) -> None:
        self._player, self._profile = player, profile
        self.identity = f"{player.url} {player.name}"

    def prompt(self, note: str) -> Any:
        """The messages, how they begin the answer, and the arguments of the chat template."""
        turn = self._profile.turn(Role.ASSESSOR, ANY_CATEGORY, note)
        stop = [list(turn.stop)] if turn.stop else []
        return [turn.prompt.filled(), turn.prefix, self._player.options.template_kwargs, *stop]

    async def answers(self, questions: Sequence[Question]) -> Answers:
        """The answers as they come; as many requests are in flight as the player's options say."""

        async def one(question: Question) -> tuple[Question, Reply | NoReplyError]:
            turn = self._profile.turn(Role.ASSESSOR, ANY_CATEGORY, question.note)
            try:
                return question, await self._player.reply(turn, turn.prompt.filled(), question.sample)
            except NoReplyError as reason:
                return question, reason

        async with aclosing(self._player):
            tasks = [asyncio.create_task(one(question)) for question in questions]
            try:
                for task in asyncio.as_completed(tasks):
                    yield await task
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


class AnswerCache:
    """Answers given before, as JSON lines by a hash of the model, the prompt and the sampling.

    Args:
        path: The file; a line that a killed process left half-written is not read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._replies: dict[str, Reply] = {}
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
            if line.endswith(b"\n"):
                values = json.loads(line)
                key = values.pop("key")
                self._replies[key] = Reply(**values)
            else:
                with path.open("r+b") as file:
                    file.truncate(path.stat().st_size - len(line))

    def get(self, key: str) -> Reply | None:
        """The answer to the request with this key."""
        return self._replies.get(key)

    def put(self, key: str, reply: Reply) -> None:
        """Keep an answer, on disk before the next one is asked for."""
        self._replies[key] = reply
        with self._path.open("ab") as file:
            file.write(json.dumps({"key": key, **asdict(reply)}).encode() + b"\n")


async def ask(
    assessor: Assessor,
    questions: Sequence[Question],
    sampling: Sampling,
    cache: AnswerCache,
    on_answer: Callable[[], None] = lambda: None,
) -> tuple[dict[Question, Reply], dict[Question, str]]:
    """Answer all questions, from the cache where it can be done.

    Args:
        assessor: The model.
        questions: Equal ones are asked once.
        sampling: Part of what the cache goes by.
        cache: Gets every answer at once.
        on_answer: Called for every different question that is done with, answered or not.

    Returns:
        The answers, and for every question without one the reason.
    """
    keys = {
        question: hash_of(
            [assessor.identity, assessor.prompt(question.note), sampling.temperature, sampling.max_tokens]
            + ([sampling.seed, question.sample] if sampling.temperature else [])
        )
        for question in dict.fromkeys(questions)
    }
    replies: dict[Question, Reply] = {}
    failed: dict[Question, str] = {}
    for question, key in keys.items():
        if found := cache.get(key):
            replies[question] = found
            on_answer()
    # Closed here rather than by the garbage collector: a Ctrl-C must end the requests in flight.
    async with aclosing(assessor.answers([q for q in keys if q not in replies])) as answers:
        async for question, reply in answers:
            if isinstance(reply, Reply):
                replies[question] = reply
                cache.put(keys[question], reply)
            else:
                failed[question] = str(reply)
            on_answer()
    return replies, failed


def hash_of(values: list[Any]) -> str:
    """Hash of JSON-able values."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
