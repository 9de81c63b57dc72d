"""The one client of servers: JSON out, JSON in, with the retries and pauses of ``openai``.

Every failure becomes :class:`NoAnswer`; the API key is removed from the server's text.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from ipaddress import ip_address
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

import httpx
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json

from medserl_agentloop.terminal import visible

T = TypeVar("T")
logger = logging.getLogger(__name__)

for _library in ("openai", "httpx", "httpcore"):  # they log addresses and headers, maybe with a key
    logging.getLogger(_library).setLevel(logging.WARNING)

CHAT_PATH = "/chat/completions"  # of chat requests; the base usually ends with /v1
_MINUTE_S = 60.0  # providers count requests per minute; also the longest Retry-After openai honors
_CONNECT_S, _GET_S = 5.0, 10.0  # a server that is there connects, and lists its models
_TRIAL_S = 30.0  # between requests to a server that counts as down
_NO_CREDIT = re.compile(r"quota|credit|billing|payment|balance", re.I)  # asking again does not help
_AGAIN = "x-should-retry"  # header by which openai is told
_SHORTEST_SECRET = 6  # "none" and "EMPTY" are keys, too, and words that a model may say


class NoAnswer(Exception):
    """There is no usable answer; the message says why."""


class Unreachable(NoAnswer):
    """The server did not answer in any try, or counts as down and was not asked."""


class Refused(NoAnswer):
    """The server refuses this request with an HTTP ``status`` and ``words``."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(f"HTTP {status}: {shown(words)}".removesuffix(": "))
        self.status, self.words = status, words


class BadAnswer(NoAnswer):
    """The server's answer is not what was requested."""


class CircuitBreaker:
    """Stops requests after ``limit`` failures in a row, then tries one from time to time."""

    def __init__(self, limit: float) -> None:
        self._limit, self._lost, self._next_trial = limit, 0, 0.0

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """The context of one request, lost if it raises Unreachable; Unreachable if no request may
        be made now.
        """
        if self._lost >= self._limit:
            if time.monotonic() < self._next_trial:
                raise Unreachable(
                    f"the server did not answer {self._lost} requests in a row and counts as down"
                )
            self._next_trial = time.monotonic() + _TRIAL_S
        try:
            yield
        except Unreachable as error:
            self._lost += 1
            self._next_trial = time.monotonic() + _TRIAL_S
            if self._lost == self._limit:
                logger.warning("a server counts as down: %s", error)
            raise
        self._lost = 0


class ServerOptions(BaseModel):
    """A server's address, API key and request settings. Limits are per process."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    node: ClassVar[str] = ""  # the config's node with these options; empty for a command's options
    lost_in_a_row: ClassVar[float] = math.inf  # requests after which the server counts as down

    url: str | None = Field(
        default=None, repr=False, description="Base of an OpenAI-compatible API."
    )
    model: str | None = Field(default=None, description="Name of the served model.")
    api_key_env: str | None = Field(
        default=None,
        description="Environment variable that holds the API key; never the key itself.",
    )
    timeout_s: float = Field(
        default=300.0, gt=0, description="Seconds that one request may take, answer included."
    )
    retries: int = Field(
        default=3,
        ge=0,
        description="Further tries after a lost connection, a time-out, 429 or 5xx, with pauses.",
    )
    concurrency: int = Field(default=16, ge=1, description="Requests in flight at once.")
    extra_body: dict[str, Any] = Field(
        default={},
        description="More fields of chat requests: {chat_template_kwargs: {enable_thinking: "
        "false}}; null drops one.",
    )

    def option(self, name: str) -> str:
        """How to set one of these options: a config key or a command's option."""
        return f"{self.node}.{name}" if self.node else f"--{name.replace('_', '-')}"

    def api_key(self) -> str:
        """Read the API key from the environment; ValueError if unusable."""
        if not self.api_key_env:
            return ""
        if not (key := os.environ.get(self.api_key_env, "").strip()):
            raise ValueError(  # without the variable's name, which may be a key by mistake
                f"{self.option('api_key_env')} names an environment variable that is not set. Give "
                "the name of a variable, such as MY_API_KEY, not the key."
            )
        if not (key.isascii() and key.isprintable()):
            raise ValueError("the API key has a character that is not allowed in an HTTP header")
        return key

    def address(self) -> httpx.URL:
        """Parse the address; its ValueError does not repeat a password."""
        with suppress(httpx.InvalidURL):
            url = httpx.URL((self.url or "").strip().rstrip("/"))
            if url.scheme in ("http", "https") and url.host and not (url.query or url.fragment):
                return url
        raise ValueError(
            "expected http://host:port or https://host as the address of the server, with percent "
            "codes for signs in a password. Azure's is https://NAME.openai.azure.com/openai/v1"
        )

    def check_address(self) -> None:
        """Raise ValueError for the address of a run that is unusable, or would log a password."""
        if "@" in (self.url or ""):
            raise ValueError(
                f"{self.node}.url holds a password, and verl logs the config. Remove it, and let "
                f"{self.node}.api_key_env name a variable with 'Basic <base64 of user:password>'"
            )
        try:
            self.address()
        except ValueError as error:
            raise ValueError(f"{self.node}.url={self.url}: {error}") from None

    def client(self, path: str = "") -> HttpClient:
        """A client of the server; ``url`` may already end with ``path``; raises like its class."""
        if self.url is None:
            raise ValueError(f"set {self.node}.url to the address, e.g. http://localhost:30000")
        base = self.url.rstrip("/").removesuffix(path)
        if path == CHAT_PATH and "/" not in base.partition("://")[2]:
            base = f"{base}/v1"
        return HttpClient(self.model_copy(update={"url": base}))


class HttpClient:
    """A client of one server for any event loop; ValueError for an unusable address or key."""

    def __init__(self, options: ServerOptions) -> None:
        import openai  # slow, and every process of a run loads this module

        self.options = options
        address, key = options.address(), options.api_key()
        self.url = str(address.copy_with(userinfo=b""))
        secrets = (key.rpartition(" ")[2], address.password)
        self._secrets = [secret for secret in secrets if len(secret) >= _SHORTEST_SECRET]
        self._breaker = CircuitBreaker(options.lost_in_a_row)
        self._places = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()
        # A key with its scheme in front ("Basic ...") is sent unchanged.
        sent = key if " " in key else f"Bearer {key}"
        self._api = openai.AsyncOpenAI(
            base_url=address,
            api_key="",
            default_headers={"Authorization": sent} if key else {},
            timeout=httpx.Timeout(options.timeout_s, connect=_CONNECT_S),
            http_client=_http_client(address, options.retries),
        )

    async def get(self, path: str) -> Any:
        """Get the JSON at ``path`` in one try; raises :class:`NoAnswer`, whose subclasses say
        why."""
        return await self._request(self._api.get, path, tries=1, limit=_GET_S)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Post ``body`` and return the answer's JSON; raises like :meth:`get` after all tries."""
        # In bytes: httpx's own JSON cannot hold the lone surrogates that a text may have.
        send = partial(self._api.post, body=json.dumps(body).encode())
        tries = self.options.retries + 1
        return await self._request(send, path, tries=tries, limit=self.options.timeout_s)

    async def _request(
        self, send: Callable[..., Awaitable[httpx.Response]], path: str, tries: int, limit: float
    ) -> Any:
        places = asyncio.Semaphore(self.options.concurrency)
        async with (
            self._places.setdefault(asyncio.get_running_loop(), places),
            self._breaker.watching(),
        ):
            response = await self._response(send, path, tries, limit)
            text, status = self._without_key(response.text), response.status_code
            again = status >= 500 or status in (408, 409, 429)
            if again and response.headers.get(_AGAIN) != "false":  # openai has tried again
                words = f"HTTP {status}: {shown(text)}".removesuffix(": ")
                if status == 429:
                    words += f". It limits requests: lower {self.options.option('concurrency')}"
                raise Unreachable(f"{words} ({_counted(tries)})")
        if not response.is_success:
            raise Refused(status, text)
        try:
            return from_json(text)
        except ValueError:
            raise BadAnswer(f"the answer is not JSON: {shown(text)!r}") from None

    async def _response(
        self, send: Callable[..., Awaitable[httpx.Response]], path: str, tries: int, limit: float
    ) -> httpx.Response:
        """The server's last answer, whatever its status."""
        import openai

        # openai's time-outs restart with every byte, and a server may send single bytes forever.
        longest = 1 + tries * limit + (tries - 1) * _MINUTE_S
        try:
            async with asyncio.timeout(longest):
                return await send(path, cast_to=httpx.Response, options={"max_retries": tries - 1})
        except openai.APIStatusError as error:
            return error.response
        except (openai.APIConnectionError, TimeoutError) as error:
            cause = error.__cause__
            reason = f"{type(cause).__name__}: {shown(self._without_key(str(cause)))}"
            if "CERTIFICATE_VERIFY_FAILED" in reason:
                reason += ". Name the file of your own certificate in SSL_CERT_FILE"
            slow = isinstance(error, (openai.APITimeoutError, TimeoutError))
            if slow and not isinstance(cause, httpx.ConnectTimeout):
                node = self.options.node
                hint = f"; raise {node}.timeout_s or lower {node}.concurrency" if node else ""
                reason = f"Timeout: no answer within {limit:g} s{hint}"
        raise Unreachable(f"{reason.removesuffix(': ')} ({_counted(tries)})")

    def _without_key(self, words: str) -> str:
        for secret in self._secrets:
            words = words.replace(secret, "***")
        return words


def _counted(tries: int) -> str:
    return "1 try" if tries == 1 else f"{tries} tries"


async def _plan_next_try(retries: int, response: httpx.Response) -> None:
    """Tell openai in the response's headers whether and when to ask again.

    It does not help if the account is empty. The tries are spread over a minute if a server limits
    requests and names no pause; a longer pause, which openai ignores, becomes a minute.
    """
    pause = response.headers.get("retry-after", "")
    if pause.isdecimal() and int(pause) > _MINUTE_S:
        response.headers["retry-after"] = f"{_MINUTE_S:g}"
    if response.status_code != 429:
        return
    if _NO_CREDIT.search((await response.aread()).decode(errors="replace")):
        response.headers[_AGAIN] = "false"
    elif not pause and "retry-after-ms" not in response.headers:
        response.headers["retry-after"] = f"{_MINUTE_S / max(1, retries):g}"


def _is_this_machine(host: str) -> bool:
    try:
        number = ip_address(host)
    except ValueError:
        return f".{host}".rstrip(".").endswith((".localhost", ".localhost.localdomain"))
    return number.is_loopback or number.is_unspecified


def _http_client(address: httpx.URL, retries: int) -> httpx.AsyncClient:
    try:
        return httpx.AsyncClient(
            # A proxy set in the environment would see the key of a server on this machine.
            trust_env=not _is_this_machine(address.host),
            verify=address.scheme == "https" and httpx.create_ssl_context(),  # takes 40 ms
            # A kept connection would belong to one event loop.
            limits=httpx.Limits(max_keepalive_connections=0),
            event_hooks={"response": [partial(_plan_next_try, retries)]},
        )
    except (ImportError, ValueError, httpx.InvalidURL):  # its message may repeat a password
        raise ValueError(
            "http_proxy, https_proxy or all_proxy cannot be used (SOCKS needs socksio)"
        ) from None


def blocking(request: Coroutine[Any, Any, T]) -> T:
    """Wait for a request in synchronous code, even inside a running event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, request).result()


def without_credentials(place: str) -> str:
    """Return an address without anything before an @, which may be a password."""
    return "***" + "".join(place.rpartition("@")[1:]) if "@" in place else place


def shown(words: str) -> str:
    """The beginning of a server's text on one line, for a message."""
    return visible(" ".join(words[:2000].split())[:200])
