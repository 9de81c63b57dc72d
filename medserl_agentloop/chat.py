"""A chat model behind an OpenAI-compatible server (SGLang, vLLM, ...): messages in, a turn's text out.

Used by ``rollout.opponent`` and ``play.endpoint``. The judges' client is ``judges.transport``, which has
a circuit breaker besides.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import httpx
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from medserl_agentloop.game.edits import one_line
from medserl_agentloop.game.injections import CONTROL_TOKEN
from medserl_agentloop.prompting import Message

_CONTINUE = {"add_generation_prompt": False, "continue_final_message": True}
"""Request fields, by SGLang's and vLLM's names, that let a server go on with a turn that is begun."""

_JOINER = "\u2060"  # invisible, and no white space to a tokenizer's pre-splitter
_SHOWN = 200  # characters of a server's words in a message


class ChatError(Exception):
    """There is no usable answer; the message says why.

    Attributes:
        reason: The same in a few words, without the server's own.
    """

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason


@dataclass(frozen=True)
class ChatAnswer:
    """A turn.

    Attributes:
        text: What the model wrote; reasoning that the server split off is put back in front.
        tokens: Its length, as the server counts; 0 where it does not say.
        truncated: Whether the token budget cut it off.
        model: The model's name, as the server has it; empty where it does not say.
        weights: The version of the weights, where the server says it (SGLang does).
    """

    text: str
    tokens: int
    truncated: bool
    model: str = ""
    weights: str | None = None


@dataclass(frozen=True)
class _Connections:
    """What belongs to one event loop."""

    http: httpx.AsyncClient
    slots: asyncio.Semaphore


class ChatClient:
    """Asks one server.

    Args:
        base: Base of the API, e.g. ``http://host:30000/v1``.
        model: Name of the served model.
        headers: Headers of every request.
        timeout_s: Seconds that one request may take in all.
        tries: Requests for one turn. Lost connections, time-outs, HTTP 429 and 5xx are tried again.
        concurrency: Most requests in flight; the wait for a place does not count as time of a request.
        backoff_s: Longest first pause between two tries; it doubles up to 20 seconds.
        special_tokens: Special tokens of the model's tokenizer, where they are known; messages may not
            smuggle them in, nor those of common chat templates.
    """

    def __init__(
        self,
        base: str,
        model: str,
        *,
        headers: Mapping[str, str],
        timeout_s: float,
        tries: int,
        concurrency: int,
        backoff_s: float = 0.5,
        special_tokens: Iterable[str] = (),
    ) -> None:
        self.base, self.model = base, model
        self._headers = {**headers, "content-type": "application/json"}
        self._timeout_s, self._tries, self._backoff_s = timeout_s, tries, backoff_s
        self._concurrency = concurrency
        known = map(re.escape, filter(None, special_tokens))
        self._special = re.compile("|".join([r"<\|[^<>|\s]*\|>", CONTROL_TOKEN, *known]), re.IGNORECASE)
        # A client belongs to an event loop, and a worker's is not running yet when this is built.
        self._connections: WeakKeyDictionary[asyncio.AbstractEventLoop, _Connections] = WeakKeyDictionary()

    async def complete(self, messages: list[Message], fields: Mapping[str, Any], prefix: str = "") -> ChatAnswer:
        """The model's turn after ``messages``, which the prompt begins with ``prefix``.

        Args:
            messages: The chat so far.
            fields: More fields of the request; they win over those made here.
            prefix: Begins the turn and is no part of the answer.

        Raises:
            ChatError: No usable answer after all tries.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{**m, "content": self._as_text(m["content"])} for m in messages],
        }
        if prefix:
            body["messages"].append({"role": "assistant", "content": prefix})
            body |= _CONTINUE
        # Not httpx's json=, which cannot send the lone surrogates that a note may hold.
        content = json.dumps({**body, **fields}).encode()
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self._tries),
            wait=wait_random_exponential(multiplier=self._backoff_s, max=20.0),
            retry=retry_if_exception(is_transient),
            reraise=True,
        )
        try:
            response: httpx.Response = await retrying(self._post, content)
        except httpx.HTTPError as error:
            raise self._failure(error) from error
        return _read(response, prefix)

    async def get(self, path: str) -> httpx.Response:
        """What the server answers at ``path`` of the API, whatever the status.

        Raises:
            httpx.HTTPError: There is no answer.
        """
        return await self._request("GET", path)

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        if connections := self._connections.pop(asyncio.get_running_loop(), None):
            await connections.http.aclose()

    async def _post(self, content: bytes) -> httpx.Response:
        return (await self._request("POST", "/chat/completions", content)).raise_for_status()

    async def _request(self, method: str, path: str, content: bytes | None = None) -> httpx.Response:
        connections = self._of_this_loop()
        async with connections.slots:
            # httpx limits the wait for each part of an answer; a server may drip for ever.
            request = connections.http.request(method, self.base + path, content=content)
            try:
                return await asyncio.wait_for(request, self._timeout_s)
            except asyncio.TimeoutError:
                raise httpx.ReadTimeout(f"no answer within {self._timeout_s:g} s") from None

    def _of_this_loop(self) -> _Connections:
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._concurrency)
            self._connections[loop] = _Connections(
                httpx.AsyncClient(headers=self._headers, timeout=None, limits=limits),
                asyncio.Semaphore(self._concurrency),
            )
        return self._connections[loop]

    def _as_text(self, content: str) -> str:
        """The content with its special tokens made harmless.

        A chat server tokenises messages with special tokens switched on. Without this, an attacker
        would learn to end the assessor's turn for it by writing ``<|im_end|>`` into its note.
        """
        return self._special.sub(lambda found: found[0][0] + _JOINER + found[0][1:], content)

    def _failure(self, error: httpx.HTTPError) -> ChatError:
        tries = f" ({self._tries} tries)" if is_transient(error) else ""
        if isinstance(error, httpx.HTTPStatusError):
            reason, words = f"HTTP {error.response.status_code}", "" if tries else error.response.text
        else:
            reason, words = type(error).__name__, str(error)
        return ChatError(reason, f"{reason}: {_short(words)}".rstrip(": ") + tries)


def is_transient(error: BaseException) -> bool:
    """Whether another try may succeed: the network, a time-out, a busy server, a server's own fault."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return isinstance(error, httpx.TransportError)


def _read(response: httpx.Response, prefix: str) -> ChatAnswer:
    """The turn in a chat completion. A server that parses reasoning sends it apart; it is part of the turn."""
    try:
        answer: Any = response.json()
    except (ValueError, RecursionError):
        reason = "the answer is not JSON"
        raise ChatError(reason, f"{reason}: {_short(response.text)!r}") from None
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        content = message.get("content") or ""
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        tokens = int((answer.get("usage") or {}).get("completion_tokens") or 0)
        weights = (answer.get("metadata") or {}).get("weight_version")
        finish = choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError):
        reason = "the answer is no chat completion"
        raise ChatError(reason, f"{reason}: {_short(str(answer))}") from None
    if not isinstance(content, str) or not isinstance(reasoning, str):
        raise ChatError("the answer's content is not text")
    if finish not in ("stop", "length", None):
        raise ChatError(f"generation ended with {_short(repr(finish))}")
    if reasoning:
        opening = "" if prefix.rstrip().endswith("<think>") else "<think>"
        # Cut off while it reasoned: nothing closed the reasoning.
        closing = "</think>\n" if content or finish != "length" else ""
        content = f"{opening}{reasoning}{closing}{content}"
    if not content:
        raise ChatError("the answer is empty")
    # JSON can hold lone surrogates; a tokenizer that gets one raises.
    text = content.replace(_JOINER, "").encode(errors="replace").decode()
    return ChatAnswer(
        text=text,
        tokens=tokens,
        truncated=finish == "length",
        model=str(answer.get("model") or ""),
        weights=None if weights is None else str(weights),
    )


def _short(words: str) -> str:
    return one_line(words)[:_SHOWN]
