"""An opponent behind an OpenAI-compatible server: messages in, text out.

Called by the agent loop for the turns of the role that is not trained. The opponent's tokens are
never part of a trajectory, so text is all that is needed of it.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import httpx
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from medserl_agentloop.opponent_config import OpponentConfig
from medserl_agentloop.prompting import CONTINUE, Message, begun

POOL_VERSION = "global_step_"
"""How the versions of a checkpoint pool begin; verl names its checkpoint folders so."""

_JOINER = "\u2060"  # invisible, and no white space to a tokenizer's pre-splitter


class OpponentError(RuntimeError):
    """The opponent gave no answer; the message says why, in a few words."""


@dataclass(frozen=True)
class OpponentTurn:
    """One turn of the opponent's.

    Attributes:
        text: What it wrote; reasoning that the server split off is put back in front.
        tokens: Its length, as the server counts.
        truncated: Whether the token budget cut it off.
        version: What played: the served model's name, or the checkpoint in a pool.
    """

    text: str
    tokens: int
    truncated: bool
    version: str


class HttpOpponent:
    """Asks the server for turns.

    Args:
        config: The run's ``selfplay.opponent`` node.
        special_tokens: Special tokens of the policy's tokenizer; notes may not smuggle them in.
    """

    def __init__(self, config: OpponentConfig, special_tokens: list[str]) -> None:
        self.config = config
        # The pattern covers the common form of other tokenizers' special tokens.
        self._special = re.compile("|".join([r"<\|[^<>|\s]*\|>", *map(re.escape, filter(None, special_tokens))]))
        # A client belongs to an event loop, and the worker's is not running yet when this is built.
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()

    async def play(self, messages: list[Message], *, max_tokens: int, prefix: str = "") -> OpponentTurn:
        """The opponent's turn, which the prompt begins with ``prefix``.

        Raises:
            OpponentError: No usable answer after all attempts.
        """
        body = {
            "model": self.config.model,
            "messages": begun([{**m, "content": self._as_text(m["content"])} for m in messages], prefix),
            "max_tokens": max_tokens,
            **(CONTINUE if prefix else {}),
            **self.config.sampling.model_dump(),
            **self.config.extra_body,
        }
        try:
            async for attempt in AsyncRetrying(
                stop=stop_after_attempt(self.config.retries + 1),
                wait=wait_random_exponential(multiplier=0.5, max=20),
                retry=retry_if_exception(is_transient),
                reraise=True,
            ):
                with attempt:
                    response = await self._client().post("/v1/chat/completions", json=body)
                    response.raise_for_status()
            return self._read(response.json())
        except httpx.HTTPStatusError as error:
            raise OpponentError(f"HTTP {error.response.status_code}") from error
        except (httpx.HTTPError, ValueError) as error:  # ValueError: not JSON
            raise OpponentError(type(error).__name__) from error

    def _as_text(self, content: str) -> str:
        """The content with its special tokens made harmless.

        A chat server tokenises messages with special tokens switched on. Without this, an attacker
        would learn to end the assessor's turn for it by writing ``<|im_end|>`` into its note.
        """
        return self._special.sub(lambda found: found[0][0] + _JOINER + found[0][1:], content)

    def _read(self, answer: Any) -> OpponentTurn:
        try:
            choice = answer["choices"][0]
            message = choice["message"]
            text = (message.get("content") or "").replace(_JOINER, "")
            reasoning = message.get("reasoning_content")
            tokens = int((answer.get("usage") or {}).get("completion_tokens") or 0)
            weights = (answer.get("metadata") or {}).get("weight_version")
            version = str(answer.get("model") or self.config.model)
            truncated = choice.get("finish_reason") == "length"
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise OpponentError("the answer is no chat completion") from error
        if self.config.kind == "pool":
            # The answer itself names the weights that gave it. Whatever else a worker could look at (a
            # file, the row's step) may be older or newer than what the server played with.
            if not str(weights).startswith(POOL_VERSION):
                raise OpponentError(f"the server played with weights {weights!r}, which are not of the pool")
            version = str(weights)
        if reasoning:
            text = f"<think>{reasoning}</think>\n{text}"
        return OpponentTurn(text, tokens, truncated, version)

    def _client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = httpx.AsyncClient(
                base_url=self.config.server,
                headers=self.config.headers,
                # pool=None: waiting for one of the connections is the concurrency limit, not an outage.
                timeout=httpx.Timeout(self.config.timeout_s, pool=None),
                limits=httpx.Limits(
                    max_connections=self.config.concurrency, max_keepalive_connections=self.config.concurrency
                ),
            )
        return self._clients[loop]


def is_transient(error: BaseException) -> bool:
    """Whether another attempt may succeed: the network, a busy server, a server's own fault."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return isinstance(error, httpx.TransportError)
