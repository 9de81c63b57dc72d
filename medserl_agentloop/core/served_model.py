"""A model behind an OpenAI-compatible chat server (SGLang, vLLM, ...) as a player: an opponent, or a player of games
outside of a run."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any

from medserl_agentloop.core.chat import ChatAnswer, ChatClient, stop_fields
from medserl_agentloop.core.client import BadAnswer, HttpClient, NoAnswer, Refused
from medserl_agentloop.core.interaction import Message, NoReplyError, Reply, Turn


class ServedModel:
    """Asks the server for turns; ``name`` is that of the model.

    ``fields`` are sampling and other fields of all requests. With a ``seed`` each turn has one of its own, made from
    this seed, its role and its text. Messages may not smuggle in ``special_tokens``, those of the model's tokenizer.
    """

    def __init__(
        self, http: HttpClient, *, special_tokens: Iterable[str] = (), seed: int | None = None, **fields: Any
    ) -> None:
        self.name = str(http.options.model)
        self.url = http.url
        """The API's base, without credentials."""
        self._http, self._seed, self._fields = http, seed, fields
        self._chat = ChatClient(http, special_tokens)
        self._asked: Counter[str] = Counter()

    async def check(self) -> None:
        """Ask the server for its models; a ValueError shows a wrong address or name before the first game."""
        url = f"{self.url}/models"
        try:
            served = [str(model["id"]) for model in (await self._http.get("/models"))["data"]]
        except Refused as refusal:
            if refusal.status not in (401, 403):
                return  # not every server lists its models
            raise ValueError(
                f"{url} answers {refusal.status}; name the environment variable of the API key with --api-key-env"
            ) from None
        except (BadAnswer, KeyError, TypeError):
            return
        except NoAnswer as error:
            raise ValueError(
                f"no server answers at {url} ({error}); give the base of an OpenAI-compatible API"
            ) from None
        model = self._http.options.model
        if served and model not in served:
            raise ValueError(f"{url} does not list the model {model!r}; --model is one of {', '.join(served)}")

    async def answer(self, turn: Turn, messages: Sequence[Message], **fields: Any) -> ChatAnswer:
        """The model's turn after ``messages``; ``fields`` of this request win over the others.

        Raises:
            NoAnswer: No usable answer after all tries.
        """
        request = {"max_tokens": turn.max_tokens, **stop_fields(turn.stop), **self._fields, **fields}
        return await self._chat.complete(list(messages), request, turn.prefix)

    async def reply(self, turn: Turn, messages: Sequence[Message], **fields: Any) -> Reply:
        """Take a turn, or raise :class:`NoReplyError`."""
        if self._seed is not None:
            key = _seed_text(self._seed, turn, messages)
            fields = {"seed": _seed(key, self._asked[key]), **fields}
            self._asked[key] += 1
        try:
            answer = await self.answer(turn, messages, **fields)
        except NoAnswer as error:
            raise NoReplyError(f"{turn.role}: {error}") from None
        return Reply(answer.text, answer.tokens, answer.truncated, turn.prefix)

    async def answers(
        self, turns: Mapping[int, Turn], *, budget: int, temperature: float, seed: int
    ) -> AsyncGenerator[tuple[int, Reply | NoReplyError], None]:
        """Replies by number as they come, or why there is none; turns with one text are samples by their numbers."""

        async def one(number: int, turn: Turn) -> tuple[int, Reply | NoReplyError]:
            messages = turn.prompt.filled()
            own_seed = _seed(_seed_text(seed, turn, messages), number)
            fields = {"max_tokens": budget, "temperature": temperature, "seed": own_seed}
            try:
                return number, await self.reply(turn, messages, **fields)
            except NoReplyError as reason:
                return number, reason

        tasks = [asyncio.create_task(one(*each)) for each in turns.items()]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def count(self, text: str) -> int:
        """About as many tokens as ``text`` takes: two for a word."""
        return 2 * len(text.split())


def _seed_text(seed: int, turn: Turn, messages: Sequence[Message]) -> str:
    """What a turn's own seed follows: not the order of the requests, which differs from run to run."""
    return f"{seed}/{turn.role}/" + ("".join(turn.prompt.data.values()) or str(list(messages)))


def _seed(text: str, sample: int) -> int:
    return zlib.crc32((text + (f"/{sample}" if sample else "")).encode(errors="replace")) >> 1
