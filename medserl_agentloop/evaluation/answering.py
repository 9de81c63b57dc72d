"""Asking a model for the assessor's turn on many notes. No answer is asked for twice.

A model on this machine is in ``local_models``.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

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
    """A model that assesses notes."""

    identity: str  # two assessors with one identity are one model
    facts: dict[str, Any]  # what the results file says of the model; ``name`` is for the tables
    stop: list[str]  # what ends an answer besides the model's own end

    def prompt(self, note: str) -> Any:
        """What the model reads, JSON-able."""
        ...

    def answers(self, questions: Sequence[Question]) -> Answers:
        """The answers as they come, in any order."""
        ...


class ServedAssessor:
    """A model behind an OpenAI-compatible server."""

    def __init__(self, player: EndpointPlayer, profile: PromptProfile) -> None:
        self._player, self._profile = player, profile
        self.identity = f"{player.url} {player.name}"
        self.facts = {"name": player.name, "server": player.url}
        self.stop = profile.settings.stop.get(Role.ASSESSOR, [])

    def prompt(self, note: str) -> Any:
        """The messages, how they begin the answer, and the arguments of the chat template."""
        turn = self._profile.turn(Role.ASSESSOR, ANY_CATEGORY, note)
        return [turn.prompt.filled(), turn.prefix, self._player.options.template_kwargs]

    async def answers(self, questions: Sequence[Question]) -> Answers:
        """The answers as they come; as many requests are in flight as the player's options say.

        Raises:
            ValueError: The server does not answer, or serves other models.
        """

        async def one(question: Question) -> tuple[Question, Reply | NoReplyError]:
            turn = self._profile.turn(Role.ASSESSOR, ANY_CATEGORY, question.note)
            try:
                return question, await self._player.reply(turn, turn.prompt.filled(), question.sample)
            except NoReplyError as reason:
                return question, reason

        async with aclosing(self._player):
            await self._player.check()
            tasks = [asyncio.create_task(one(question)) for question in questions]
            try:
                for task in asyncio.as_completed(tasks):
                    yield await task
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


class AnswerCache:
    """Answers given before, in a file of JSON lines, by the hash of their request."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.replies: dict[str, Reply] = {}
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        if lines and not lines[-1].endswith(b"\n"):  # a killed process left it half-written
            os.truncate(path, path.stat().st_size - len(lines.pop()))
        for line in lines:
            values = json.loads(line)
            key = values.pop("key")
            self.replies[key] = Reply(**values)

    def put(self, key: str, reply: Reply) -> None:
        """Keep an answer, on disk before the next one is asked for."""
        self.replies[key] = reply
        with self._path.open("ab") as file:
            file.write(json.dumps({"key": key, **asdict(reply)}).encode() + b"\n")


def ask(
    assessor: Assessor, questions: Sequence[Question], sampling: Sampling, cache: Path, console: Console
) -> tuple[dict[Question, Reply], dict[Question, str]]:
    """Answer all questions under a progress bar, from the file of the cache where it can be done.

    Returns:
        The answers, and for every question without one the reason.
    """
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress("answers", *columns, console=console) as progress:
        return asyncio.run(_ask(assessor, questions, sampling, AnswerCache(cache), progress))


async def _ask(
    assessor: Assessor, questions: Sequence[Question], sampling: Sampling, cache: AnswerCache, progress: Progress
) -> tuple[dict[Question, Reply], dict[Question, str]]:
    def key(question: Question) -> str:
        request = [assessor.identity, assessor.prompt(question.note), sampling.temperature, sampling.max_tokens]
        request += [sampling.seed, question.sample] if sampling.temperature else []
        return hash_of(request + ([assessor.stop] if assessor.stop else []))

    keys = {question: key(question) for question in dict.fromkeys(questions)}
    replies = {question: cache.replies[key] for question, key in keys.items() if key in cache.replies}
    failed: dict[Question, str] = {}
    bar = progress.add_task("", total=len(keys), completed=len(replies))
    # Closed here rather than by the garbage collector: a Ctrl-C must end the requests in flight.
    async with aclosing(assessor.answers([question for question in keys if question not in replies])) as answers:
        async for question, reply in answers:
            if isinstance(reply, Reply):
                replies[question] = reply
                cache.put(keys[question], reply)
            else:
                failed[question] = str(reply)
            progress.advance(bar)
    return replies, failed


def hash_of(values: list[Any]) -> str:
    """Hash of JSON-able values."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
