"""Requests to a judge's server: a concurrency limit, time-outs, further tries and a circuit breaker.

Shared by the judges that ask a server. Nothing here is bound to an event loop before the first
request: the reward loop, a test and ``medserl judge serve`` each bring their own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential, wait_random

from medserl_agentloop.judges.options import JudgeServer

logger = logging.getLogger(__name__)


class JudgeError(Exception):
    """A judge gave no usable answer; the message says why."""


class Unreachable(JudgeError):
    """The server gave no answer: connection lost, time-out, 429 or 5xx. Another try may help."""


class Refused(JudgeError):
    """The server does not want this request.

    Attributes:
        status: The HTTP status.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class BadAnswer(JudgeError):
    """The server answered something else than it was asked for."""


class CircuitOpen(JudgeError):
    """The server counts as down; it was not asked."""


class CircuitBreaker:
    """Stops asking a server that does not answer, and tries it again with one request at a time.

    Args:
        failures: Requests lost in a row, each with all its tries, that open the circuit.
        seconds: How long it stays open before a trial.
        clock: Seconds of a clock that never goes back.
    """

    def __init__(self, failures: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._seconds, self._clock = failures, seconds, clock
        self._failures = 0
        self._opened_at: float | None = None
        self._trial_running = False

    @property
    def is_open(self) -> bool:
        """Whether the server counts as down."""
        return self._opened_at is not None

    def admit(self) -> bool:
        """Let a request through; True if it is the trial of an open circuit.

        Raises:
            CircuitOpen: The server counts as down and no trial is due.
        """
        if self._opened_at is None:
            return False
        if self._trial_running or self._clock() - self._opened_at < self._seconds:
            raise self.error()
        self._trial_running = True
        return True

    def error(self) -> CircuitOpen:
        """What to raise for a request that is not made."""
        return CircuitOpen(f"the judge did not answer {self._failures} requests in a row and counts as down")

    def succeeded(self) -> None:
        """A request got an answer, whatever it was."""
        self._failures, self._opened_at, self._trial_running = 0, None, False

    def failed(self, *, trial: bool) -> None:
        """A request got none."""
        self._failures += 1
        self._trial_running = self._trial_running and not trial
        if trial or (self._opened_at is None and self._failures >= self._limit):
            self._opened_at = self._clock()

    def given_up(self, *, trial: bool) -> None:
        """A request ended before anything is known about the server."""
        self._trial_running = self._trial_running and not trial


@dataclass
class _Connections:
    """What belongs to one event loop."""

    http: httpx.AsyncClient
    slots: asyncio.Semaphore


class JudgeClient:
    """Posts JSON to one server.

    Args:
        server: Its address and limits.
        suffix: The path of the requests; an address that ends with it is taken as it is.

    Raises:
        ValueError: The server has no address, or its API key is not in the environment.
    """

    def __init__(self, server: JudgeServer, suffix: str) -> None:
        if server.url is None:
            raise ValueError("selfplay.judge_server.url is not set")
        self._server = server
        self.url = server.url.rstrip("/").removesuffix(suffix) + suffix
        key = server.api_key()
        self._headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        self._breaker = CircuitBreaker(server.breaker_failures, server.breaker_seconds)
        self._connections: WeakKeyDictionary[asyncio.AbstractEventLoop, _Connections] = WeakKeyDictionary()

    @property
    def is_down(self) -> bool:
        """Whether the server has stopped answering."""
        return self._breaker.is_open

    async def post(self, body: dict[str, Any]) -> Any:
        """Post ``body`` and return the answer's JSON.

        Raises:
            Unreachable: No answer after all tries.
            Refused: The server does not want this request; it was made once.
            BadAnswer: The answer is not JSON.
            CircuitOpen: The server counts as down.
        """
        content = json.dumps(body).encode()
        trial = self._breaker.admit()
        tries = 1 if trial else 1 + self._server.retries
        retrying = AsyncRetrying(
            stop=stop_after_attempt(tries),
            wait=wait_exponential(self._server.backoff_s, max=self._server.backoff_max_s)
            + wait_random(0, self._server.backoff_s),
            retry=retry_if_exception_type(Unreachable),
            reraise=True,
        )
        try:
            answer: Any = await retrying(self._send, content, trial)
        except Unreachable as error:
            was_open = self._breaker.is_open
            self._breaker.failed(trial=trial)
            if self._breaker.is_open and not was_open:
                logger.warning("the judge at %s counts as down: %s", self.url, error)
            raise Unreachable(f"{error} ({tries} {'try' if tries == 1 else 'tries'})") from error
        except (Refused, BadAnswer):
            self._breaker.succeeded()
            raise
        except BaseException:  # cancelled, or the circuit opened between two tries
            self._breaker.given_up(trial=trial)
            raise
        self._breaker.succeeded()
        return answer

    async def _send(self, content: bytes, trial: bool) -> Any:
        connections = self._of_this_loop()
        async with connections.slots:
            if self._breaker.is_open and not trial:
                raise self._breaker.error()
            try:
                # httpx limits the wait for each part of an answer; a server may drip for ever.
                response = await asyncio.wait_for(
                    connections.http.post(self.url, content=content, headers=self._headers), self._server.timeout_s
                )
            except (asyncio.TimeoutError, httpx.TimeoutException):
                raise Unreachable(f"no answer within {self._server.timeout_s:g} s") from None
            except httpx.TransportError as error:
                raise Unreachable(f"{type(error).__name__}: {error}") from error
            except httpx.DecodingError as error:
                raise BadAnswer(f"the answer cannot be decoded: {error}") from error
        status = response.status_code
        if status == 429 or status >= 500:
            raise Unreachable(f"HTTP {status}")
        if not response.is_success:
            raise Refused(f"HTTP {status}: {response.text[:200]}", status)
        try:
            return response.json()
        except ValueError:
            raise BadAnswer(f"the answer is not JSON: {response.text[:100]!r}") from None

    def _of_this_loop(self) -> _Connections:
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            self._connections[loop] = _Connections(
                http=httpx.AsyncClient(
                    timeout=self._server.timeout_s,
                    # The slots are the limit: waiting for one must not count against the time-out.
                    limits=httpx.Limits(max_connections=None, max_keepalive_connections=self._server.concurrency),
                ),
                slots=asyncio.Semaphore(self._server.concurrency),
            )
        return self._connections[loop]
