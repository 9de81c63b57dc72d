"""A model behind an OpenAI-compatible chat server (SGLang, vLLM, ...) as a player."""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass, field
from typing import Any

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from medserl_agentloop.game.edits import one_line
from medserl_agentloop.game.types import Category, Role
from medserl_agentloop.play.driver import NoReplyError, Reply
from medserl_agentloop.prompting import CONTINUE, Message, PromptProfile, begun

_SHOWN = 200  # characters of a server's words in a message


class _TryAgainError(Exception):
    """The server may answer if it is asked again."""


@dataclass(frozen=True)
class EndpointOptions:
    """How a server is asked.

    Attributes:
        url: Base of the API; ``/v1`` is added where it has no path.
        model: Name of the served model.
        api_key: Sent as a bearer token; None sends none.
        max_tokens: Most tokens of one turn.
        temperature: Sampling temperature.
        seed: Makes every turn's sampling seed, together with role and note.
        timeout_s: Seconds that one request may take.
        tries: Requests for one turn before the game is void.
        backoff_s: Longest first pause between two tries; it doubles up to eight seconds.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    max_tokens: int = 4096
    temperature: float = 1.0
    seed: int = 0
    timeout_s: float = 300.0
    tries: int = 4
    backoff_s: float = 0.5

    @property
    def base(self) -> str:
        """The API's base without a slash at its end."""
        url = self.url.rstrip("/")
        return url if httpx.URL(url).path.strip("/") else f"{url}/v1"


class EndpointPlayer:
    """Asks a served model for its turns.

    Args:
        options: The server and the sampling.
        profile: Prompt profile of the turns.
        client: Shared by all games; its owner closes it.
    """

    def __init__(self, options: EndpointOptions, profile: PromptProfile, client: httpx.AsyncClient) -> None:
        self.name = options.model
        self.parser = profile.parser
        self._options = options
        self._profile = profile
        self._client = client
        self._headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}

    async def check(self) -> None:
        """Ask the server for its models, so that a wrong address or name shows before the first game.

        Raises:
            ValueError: The server does not answer, or serves other models.
        """
        url = f"{self._options.base}/models"
        try:
            response = await self._client.get(url, headers=self._headers, timeout=self._options.timeout_s)
        except httpx.HTTPError as error:
            raise ValueError(
                f"no server answers at {url} ({_words(error)}); --endpoint is the base of an OpenAI-compatible API"
            ) from error
        if response.status_code in (401, 403):
            raise ValueError(
                f"{url} answers {response.status_code}; name the environment variable of the API key with --api-key-env"
            )
        try:
            served = [str(model["id"]) for model in response.json()["data"]]
        except (ValueError, KeyError, TypeError):
            return  # not every server lists its models
        if served and self.name not in served:
            raise ValueError(f"{url} does not list the model {self.name!r}; --model is one of {', '.join(served)}")

    async def reply(self, role: Role, category: Category, note: str) -> Reply:
        """Take a turn; see :class:`play.driver.Player`."""
        prefill = self._profile.settings.assistant_prefix
        messages = begun(self._profile.messages(role, category, note), prefill)
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self._options.tries),
            wait=wait_random_exponential(multiplier=self._options.backoff_s, max=8.0),
            retry=retry_if_exception_type(_TryAgainError),
            reraise=True,
        )
        try:
            answer: Any = await retrying(self._ask, self._body(role, note, messages))
        except _TryAgainError as error:
            raise NoReplyError(f"{error} ({self._options.tries} tries)") from error
        return _read(answer, prefill)

    def _body(self, role: Role, note: str, messages: list[Message]) -> dict[str, Any]:
        options = self._options
        body: dict[str, Any] = {
            "model": options.model,
            "messages": messages,
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            # Of role and note and not of the order of the requests, which differs from run to run.
            "seed": zlib.crc32(f"{options.seed}/{role.value}/{note}".encode(errors="replace")) >> 1,
        }
        if messages[-1]["role"] == "assistant":  # a turn that the prompt begins; SGLang's and vLLM's name for it
            body |= CONTINUE
        return body

    async def _ask(self, body: dict[str, Any]) -> Any:
        url = f"{self._options.base}/chat/completions"
        try:
            # httpx limits the wait for each part of an answer; a server may drip for ever.
            response = await asyncio.wait_for(
                self._client.post(url, json=body, headers=self._headers, timeout=self._options.timeout_s),
                self._options.timeout_s,
            )
        except (asyncio.TimeoutError, httpx.TimeoutException):
            raise _TryAgainError(f"no answer within {self._options.timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise _TryAgainError(_words(error)) from error
        if response.status_code == 429 or response.status_code >= 500:
            raise _TryAgainError(f"HTTP {response.status_code}")
        if not response.is_success:
            raise NoReplyError(f"HTTP {response.status_code}: {one_line(response.text)[:_SHOWN]}")
        try:
            return response.json()
        except ValueError:
            raise NoReplyError(f"the answer is not JSON: {one_line(response.text)[:_SHOWN]!r}") from None


def _read(answer: Any, prefill: str) -> Reply:
    """The turn in a chat completion. A server that parses reasoning sends it apart; it is part of the turn."""
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        content = message.get("content") or ""
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        tokens = int((answer.get("usage") or {}).get("completion_tokens") or 0)
        finish = choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise NoReplyError(f"the answer is no chat completion: {one_line(str(answer))[:_SHOWN]}") from None
    if not isinstance(content, str) or not isinstance(reasoning, str):
        raise NoReplyError("the answer's content is not text")
    if finish not in ("stop", "length", None):
        raise NoReplyError(f"generation ended with {finish!r}")
    if reasoning:
        opening = "" if prefill.rstrip().endswith("<think>") else "<think>"
        # Cut off while it reasoned: nothing closed the reasoning.
        closing = "</think>\n" if content or finish != "length" else ""
        content = f"{opening}{reasoning}{closing}{content}"
    if not content:
        raise NoReplyError("the answer is empty")
    return Reply(content, tokens=tokens, truncated=finish == "length", prefill=prefill)


def _words(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}")[:_SHOWN].rstrip(": ")
