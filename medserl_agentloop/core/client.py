"""The one HTTP client: sends JSON to a server that is not trusted, and reads JSON back.

Everything in the package that asks a server uses it. The worst that a server can do is to give no answer: its answers
are limited in size and time and read strictly, and the credentials are taken out of its words before they are shown.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import re
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from typing import Any, ClassVar, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit
from weakref import WeakKeyDictionary

import httpx
from pydantic import BaseModel, ConfigDict, Field
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential, wait_random

from medserl_agentloop.command_line import visible

T = TypeVar("T")
logger = logging.getLogger(__name__)

for _library in ("httpx", "httpcore"):
    # They log each response with its status line and headers, in which a server may repeat the key.
    logging.getLogger(_library).setLevel(logging.WARNING)

MAX_BYTES = 8 * 2**20
"""Longest answer, and in a server's place longest request, that is read. A thousand games with a page of reasoning each
fit."""

_READ, _SHOWN = 65_536, 200  # characters of a server's words that are looked at for a message, and in it
_SHORTEST_SECRET = 6  # Of shorter ones only whole credentials are looked for in answers: "none" is also a word.


class NoAnswer(Exception):
    """There is no usable answer; the message says why, and ``reason`` says it without the server's own words."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message


class Unreachable(NoAnswer):
    """The server gave no answer: connection lost, time-out, 429 or 5xx. Another try may help."""


class Refused(NoAnswer):
    """The server does not want this request and answers with the HTTP ``status``."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(f"HTTP {status}: {words}".removesuffix(": "), f"HTTP {status}")
        self.status = status


class BadAnswer(NoAnswer):
    """The server answered something else than it was asked for."""


class CircuitOpen(NoAnswer):
    """The server counts as down; it was not asked."""


class CircuitBreaker:
    """Stops asking a server that lost so many requests in a row, each with all its tries.

    After so many seconds it is tried again, with one request at a time.
    """

    def __init__(
        self, failures: float = math.inf, seconds: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit, self._seconds, self._clock = failures, seconds, clock
        self._failures = 0
        self._opened_at: float | None = None
        self._trial_running = False

    @property
    def is_open(self) -> bool:
        """Whether the server counts as down."""
        return self._opened_at is not None

    @contextmanager
    def request(self, url: str) -> Iterator[bool]:
        """Watch how a request to ``url`` ends; True for the trial of an open circuit, CircuitOpen if none is due."""
        trial = False
        if self._opened_at is not None:
            if self._trial_running or self._clock() - self._opened_at < self._seconds:
                raise self.error()
            trial = self._trial_running = True
        try:
            yield trial
        except Unreachable as error:
            self._failures += 1
            if trial or (not self.is_open and self._failures >= self._limit):
                if not self.is_open:
                    logger.warning("the server at %s counts as down: %s", url, error)
                self._opened_at = self._clock()
            raise
        except (Refused, BadAnswer):  # it answers
            self._failures, self._opened_at = 0, None
            raise
        else:
            self._failures, self._opened_at = 0, None
        finally:  # also of a request that was cancelled, which says nothing about the server
            if trial:
                self._trial_running = False

    def error(self) -> CircuitOpen:
        """What to raise for a request that is not made."""
        return CircuitOpen(f"the server did not answer {self._failures} requests in a row and counts as down")


class ServerAddress(BaseModel):
    """Where a server is, what it serves, and which key it wants."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    node: ClassVar[str] = ""  # the config's node with these options; empty where they come from a command line

    url: str | None = Field(default=None, repr=False, description="Base of an OpenAI-compatible API.")
    model: str | None = Field(default=None, description="Name of the served model.")
    api_key_env: str | None = Field(
        default=None, description="Name of the environment variable that holds the API key; never the key itself."
    )

    def api_key(self) -> str | None:
        """The API key, from the environment: configs are logged. Raises a ValueError where it is not set."""
        if not self.api_key_env:
            return None
        if key := os.environ.get(self.api_key_env):
            return key
        raise ValueError(  # without the variable's name, which may be a key by mistake
            f"{f'{self.node}.api_key_env' if self.node else '--api-key-env'} names an environment variable that is not "
            "set. It wants the name of a variable, such as MY_API_KEY, not the key; set that variable before the start."
        )

    def check_address(self) -> None:
        """Refuse an address that a config cannot use or should not hold; a ValueError says what to write instead."""
        url = self.url or ""
        if "@" in url:
            raise ValueError(
                f"{self.node}.url holds a user name or a password, and verl prints and logs the whole config. Take "
                f"them out, and set {self.node}.api_key_env to the name of an environment variable that holds the word "
                "Basic, a blank and the base64 code of user:password."
            )
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{self.node}.url={url}: expected http://… or https://…")
        try:
            Credentials(url)
        except ValueError as error:
            raise ValueError(f"{self.node}.url={url}: {error}") from None


class ServerOptions(ServerAddress):
    """How a server is asked. All limits hold per process."""

    timeout_s: float = Field(default=300.0, gt=0, description="Seconds that one request may take, answer included.")
    retries: int = Field(default=3, ge=0, description="Further tries after a lost connection, a time-out, 429 or 5xx.")
    backoff_s: float = Field(default=0.5, ge=0, description="First pause between tries; it doubles, with jitter.")
    backoff_max_s: float = Field(default=20.0, ge=0, description="Longest pause between two tries, in seconds.")
    concurrency: int = Field(default=16, ge=1, description="Requests in flight at once.")
    extra_body: dict[str, Any] = Field(
        default={},
        description="More fields of a chat request, e.g. {chat_template_kwargs: {enable_thinking: false}}; null takes "
        "a field out.",
    )

    def breaker(self) -> CircuitBreaker:
        """When to stop asking; never by default."""
        return CircuitBreaker()

    def client(self, path: str = "", timeout_s: float | None = None) -> HttpClient:
        """A client of the server, whose ``url`` may end with the ``path`` of the requests; raises as its class."""
        if self.url is None:
            raise ValueError(f"{self.node}.url is not set")
        base = self.url.rstrip("/").removesuffix(path)
        return HttpClient(self.model_copy(update={"url": base, "timeout_s": timeout_s or self.timeout_s}))


class _Connections(NamedTuple):
    """What belongs to one event loop."""

    http: httpx.AsyncClient
    slots: asyncio.Semaphore


class HttpClient:
    """Asks one server. Its ``url`` is the base of all paths, without credentials.

    The wait for one of the ``concurrency`` places does not count as time of a request.

    Raises:
        ValueError: The address or the key cannot be used, or the key is not in the environment.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self._credentials = Credentials(options.url or "", options.api_key())
        self.url = self._credentials.url
        self._retrying = AsyncRetrying(
            wait=wait_exponential(options.backoff_s, max=options.backoff_max_s) + wait_random(0, options.backoff_s),
            retry=retry_if_exception_type(Unreachable),
            reraise=True,
        )
        self._breaker = options.breaker()
        # A client belongs to an event loop, and a worker's is not running yet when this is built.
        self._connections: WeakKeyDictionary[asyncio.AbstractEventLoop, _Connections] = WeakKeyDictionary()

    @property
    def is_down(self) -> bool:
        """Whether the server has stopped answering."""
        return self._breaker.is_open

    async def get(self, path: str) -> Any:
        """The JSON at ``path``, asked for once; raises :class:`NoAnswer`, whose subclasses say why."""
        return await self._request("GET", path, None, tries=1)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Post ``body`` and return the answer's JSON; raises as :meth:`get`, after all tries."""
        # Not httpx's json=, which cannot send the lone surrogates that a text may hold.
        return await self._request("POST", path, json.dumps(body).encode(), tries=self.options.retries + 1)

    def blocking(self, request: Coroutine[Any, Any, T]) -> T:
        """Wait for one of this client's requests where code is not asynchronous; an event loop may run around it."""

        async def closing() -> T:
            async with aclosing(self):
                return await request

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, closing()).result()

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        if connections := self._connections.pop(asyncio.get_running_loop(), None):
            await connections.http.aclose()

    def shown(self, words: str | bytes) -> str:
        """The beginning of a server's words on one line, as they may stand in a message."""
        text = words[:_READ].decode(errors="replace") if isinstance(words, bytes) else words[:_READ]
        return visible(" ".join(self._credentials.taken_out_of(text).split())[:_SHOWN])

    async def _request(self, method: str, path: str, content: bytes | None, tries: int) -> Any:
        with self._breaker.request(self.url) as trial:
            tries = 1 if trial else tries
            retrying = self._retrying.copy(stop=stop_after_attempt(tries))
            try:
                return await retrying(self._try, method, path, content, trial)
            except Unreachable as error:
                raise Unreachable(f"{error} ({tries} {'try' if tries == 1 else 'tries'})", error.reason) from None

    async def _try(self, method: str, path: str, content: bytes | None, trial: bool) -> Any:
        connections = self._of_this_loop()
        async with connections.slots:
            if self._breaker.is_open and not trial:
                raise self._breaker.error()
            try:
                # httpx limits the wait for each part of an answer; a server may drip for ever.
                status, body = await asyncio.wait_for(
                    self._exchange(connections.http, method, path, content), self.options.timeout_s
                )
            except TimeoutError:
                raise Unreachable(
                    f"ReadTimeout: no answer within {self.options.timeout_s:g} s", "ReadTimeout"
                ) from None
            except httpx.HTTPError as error:
                name = type(error).__name__
                # Not "from error": what stands in a traceback is shown, too.
                raise Unreachable(f"{name}: {self.shown(str(error))}".removesuffix(": "), name) from None
        if not 200 <= status < 300:
            raise Refused(status, self.shown(body))
        try:
            return self._credentials.taken_out_of_answer(read_json(body))
        except (ValueError, RecursionError):
            reason = "the answer is not JSON"
            raise BadAnswer(f"{reason}: {self.shown(body)!r}", reason) from None

    async def _exchange(
        self, http: httpx.AsyncClient, method: str, path: str, content: bytes | None
    ) -> tuple[int, bytes]:
        async with http.stream(method, self.url + path, content=content) as response:
            if response.status_code == 429 or response.status_code >= 500:
                raise Unreachable(f"HTTP {response.status_code}")
            packing = response.headers.get("content-encoding", "identity").strip().lower()
            if packing != "identity":  # unpacking could make gigabytes of a few bytes
                raise BadAnswer(f"the answer is packed, and nobody asked for that: {self.shown(packing)}")
            body = bytearray()
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > MAX_BYTES:
                    raise BadAnswer(f"the answer is longer than {MAX_BYTES} bytes")
            return response.status_code, bytes(body)

    def _of_this_loop(self) -> _Connections:
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            headers = {"content-type": "application/json", "accept-encoding": "identity"}
            http = httpx.AsyncClient(
                headers={**headers, **self._credentials.headers},
                timeout=None,  # there is one for the whole exchange
                verify=self.url.startswith("https:"),  # loading certificates that nobody asks for takes 40 ms
                # The slots are the limit: waiting for one must not count against the time-out.
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=self.options.concurrency),
            )
            self._connections[loop] = _Connections(http, asyncio.Semaphore(self.options.concurrency))
        return self._connections[loop]


class Credentials:
    """The address of a server, and what it wants: the API key, or the user name and password in the address.

    A key is sent as a bearer token; with its scheme in front (``Basic ...``) it is sent as it is. Raises a ValueError,
    which repeats neither, where the address or the key cannot be used.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        try:
            parts = urlsplit(url.strip())
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            usable = usable and not parts.query and not parts.fragment
            httpx.URL(url.strip())
        except (ValueError, httpx.InvalidURL):
            usable = False
        if not usable:
            raise ValueError(
                "the address of the server cannot be used: expected http://host:port or https://host (signs of a "
                "password other than letters and digits are written in percent code)"
            )
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")
        value, user, password = (key or "").strip(), unquote(parts.username or ""), unquote(parts.password or "")
        if not value and (user or password):
            value = f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"
        if value and not (value.isascii() and value.isprintable()):
            raise ValueError("the API key holds a character that no HTTP header can hold")
        value = value if not value or " " in value else f"Bearer {value}"
        self.headers = {"authorization": value} if value else {}
        # As they stand in the address, decoded, and as they travel: a server may repeat any of them.
        whole = {value, parts.netloc.rpartition("@")[0], f"{user}:{password}" if user else "", decoded(value)}
        parted = {value.rpartition(" ")[2], password or user, parts.password or "", decoded(value).partition(":")[2]}
        self._in_messages = _any_of(whole | parted)
        self._in_answers = _any_of(whole | {part for part in parted if len(part) >= _SHORTEST_SECRET})

    def taken_out_of(self, text: str) -> str:
        """A message without them."""
        return self._in_messages.sub("***", text)

    def taken_out_of_answer(self, answer: Any) -> Any:
        """An answer's JSON without them, and without the lone surrogates that no file or tokenizer takes."""
        if isinstance(answer, str):
            return self._in_answers.sub("***", answer).encode(errors="replace").decode()
        clean = self.taken_out_of_answer
        if isinstance(answer, list):
            return [clean(item) for item in answer]
        return {clean(k): clean(v) for k, v in answer.items()} if isinstance(answer, dict) else answer


def without_credentials(place: str) -> str:
    """What was given as an address, for a message: what stands before an @ may be a password."""
    return "***" + "".join(place.rpartition("@")[1:]) if "@" in place else place


def decoded(authorization: str) -> str:
    """``user:password`` of a header of basic authentication; nothing of another one."""
    scheme, _, value = authorization.partition(" ")
    try:
        return b64decode(value).decode() if scheme.lower() == "basic" else ""
    except ValueError:
        return ""


def _any_of(texts: set[str]) -> re.Pattern[str]:
    """Matches each of ``texts`` in any case, the longest first; nothing where there is none."""
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)", re.IGNORECASE)


def read_json(text: str | bytes) -> Any:
    """The JSON in ``text``, or a ValueError. An object that has a key twice says two things: it is read as null."""
    try:
        return json.loads(text, object_pairs_hook=_unambiguous)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any] | None:
    found = dict(pairs)
    return found if len(found) == len(pairs) else None
