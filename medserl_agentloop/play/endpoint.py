"""A model behind an OpenAI-compatible chat server (SGLang, vLLM, ...) as a player."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from pydantic import Field, field_validator

from medserl_agentloop.core.chat import PATH, ChatClient, stop_fields
from medserl_agentloop.core.client import BadAnswer, NoAnswer, Refused, ServerOptions
from medserl_agentloop.core.interaction import Message, NoReplyError, Reply, Turn


class EndpointOptions(ServerOptions):
    """How a server is asked for turns. The address may hold a user name and a password."""

    url: str = Field(repr=False, description="Base of the API; /v1 is added where it has no path.")
    model: str = Field(description="Name of the served model.")
    max_tokens: int = Field(default=4096, description="Most tokens of one turn.")
    temperature: float = Field(default=1.0, description="Sampling temperature.")
    seed: int = Field(default=0, description="Makes every turn's sampling seed, together with role and note.")
    template_kwargs: dict[str, Any] = Field(default={}, description="Arguments of the server's chat template.")

    @field_validator("url")
    @classmethod
    def _with_a_path(cls, url: str) -> str:
        base = url.strip().rstrip("/")
        return base if "/" in base.partition("://")[2] else f"{base}/v1"


class EndpointPlayer:
    """Asks a served model for its turns."""

    def __init__(self, options: EndpointOptions) -> None:
        self.name = options.model
        self.options = options
        self._http = options.client(PATH)
        self._chat = ChatClient(self._http)
        self._asked: Counter[str] = Counter()
        self.url = self._http.url
        """The API's base, without credentials."""

    async def check(self) -> None:
        """Ask the server for its models; a ValueError shows a wrong address or name before the first game."""
        url = f"{self._http.url}/models"
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
        if served and self.options.model not in served:
            raise ValueError(
                f"{url} does not list the model {self.options.model!r}; --model is one of {', '.join(served)}"
            )

    async def reply(
        self, turn: Turn, messages: Sequence[Message], sample: int | None = None, budget: int | None = None
    ) -> Reply:
        """Take a turn within the options' budget: without a tokenizer no game knows how long its texts are.

        ``sample`` says which of several replies to the same prompt this is; None counts them. ``budget`` is the most
        tokens of this turn, if it has its own.
        """
        # The seed is of role and text and not of the order of the requests, which differs from run to run.
        of = f"{self.options.seed}/{turn.role}/" + ("".join(turn.prompt.data.values()) or str(messages))
        if sample is None:
            sample = self._asked[of]
            self._asked[of] += 1
        fields = {
            "max_tokens": budget or self.options.max_tokens,
            "temperature": self.options.temperature,
            "seed": zlib.crc32((of + (f"/{sample}" if sample else "")).encode(errors="replace")) >> 1,
            "chat_template_kwargs": self.options.template_kwargs or None,
            **stop_fields(turn.stop),
        }
        try:
            answer = await self._chat.complete(list(messages), fields, turn.prefix)
        except NoAnswer as error:
            raise NoReplyError(f"{turn.role}: {error}") from None
        return Reply(answer.text, tokens=answer.tokens, truncated=answer.truncated, prefill=turn.prefix)

    def count(self, text: str) -> int:
        """About as many tokens as ``text`` takes: two for a word."""
        return 2 * len(text.split())

    async def answers(
        self, turns: Mapping[int, Turn], *, budget: int, temperature: float, seed: int
    ) -> AsyncGenerator[tuple[int, Reply | NoReplyError], None]:
        """Replies by number as they come, or why there is none; temperature and seed are those of the options."""

        async def one(number: int, turn: Turn) -> tuple[int, Reply | NoReplyError]:
            try:
                return number, await self.reply(turn, turn.prompt.filled(), number, budget)
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

    async def aclose(self) -> None:
        """Close the connections; of use to ``contextlib.aclosing``."""
        await self._http.aclose()
