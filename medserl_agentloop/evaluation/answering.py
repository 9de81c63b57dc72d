"""Asking a model for the assessor's turn on many notes: a served one, or one in memory. No answer is asked for twice.

Called by ``evaluate``.
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

from medserl_agentloop.backends.cpu_sampling import SamplingSettings
from medserl_agentloop.evaluation.tournament import Player
from medserl_agentloop.game.types import Category, Role
from medserl_agentloop.play.driver import NoReplyError, Reply
from medserl_agentloop.play.endpoint import EndpointPlayer

_ANY = Category.VANILLA_BENIGN  # the assessor's prompt does not depend on the category


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
    """

    def __init__(self, player: EndpointPlayer) -> None:
        self._player = player
        self.identity = f"{player.url} {player.name}"

    def prompt(self, note: str) -> Any:
        """The messages, and how they begin the answer."""
        profile = self._player.profile
        return [*profile.messages(Role.ASSESSOR, _ANY, note), profile.settings.assistant_prefix]

    async def answers(self, questions: Sequence[Question]) -> Answers:
        """The answers as they come; as many requests are in flight as the player's options say."""

        async def one(question: Question) -> tuple[Question, Reply | NoReplyError]:
            try:
                return question, await self._player.reply(Role.ASSESSOR, _ANY, question.note, question.sample)
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


class LocalAssessor:
    """A model in this process.

    Args:
        player: The model.
        identity: Hash of its weights.
        sampling: How answers are drawn.
        batch: Notes answered at a time.
    """

    def __init__(self, player: Player, identity: str, sampling: Sampling, batch: int) -> None:
        self.identity = identity
        self._player, self._sampling, self._batch = player, sampling, batch

    def prompt(self, note: str) -> Any:
        """Token ids."""
        return self._player.encoder.opening(Role.ASSESSOR, _ANY, note).ids

    async def answers(self, questions: Sequence[Question]) -> Answers:
        """The answers, batch by batch, the shortest notes first: a batch is padded to its longest prompt."""
        waiting = sorted(questions, key=lambda question: len(question.note))
        settings = SamplingSettings(temperature=self._sampling.temperature)
        for start in range(0, len(waiting), self._batch):
            part = waiting[start : start + self._batch]
            replies = self._player.replies(
                Role.ASSESSOR,
                [self._player.encoder.opening(Role.ASSESSOR, _ANY, question.note) for question in part],
                [int(_hash([self._sampling.seed, question.note, question.sample])[:15], 16) for question in part],
                settings,
                budget=self._sampling.max_tokens,
            )
            for question, reply in zip(part, replies, strict=True):
                yield question, reply


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
                self._replies[values.pop("key")] = Reply(**values)
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
        question: _hash(
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


def _hash(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
