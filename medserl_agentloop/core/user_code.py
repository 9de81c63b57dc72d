"""Runs a user's code with a time limit, where it can neither block nor end a process of games.

It runs in the event loop of a thread of its own. A coroutine may keep connections there between
games.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, TypeVar

T = TypeVar("T")

_PULSE_S = 1.0  # an event loop that does nothing for so long is blocked
_loops: list[asyncio.AbstractEventLoop] = []  # the one in use, or none yet


def is_cancelled() -> bool:
    """Return whether the running task was asked to stop.

    If it was not, a CancelledError is an error of the user's own code.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def limited(work: Callable[[], Awaitable[T] | T], limit_s: float) -> T:
    """Call ``work`` in the thread of users' code, and return or await what it returns.

    TimeoutError after ``limit_s`` seconds, also if it blocks. An exit or a cancellation that it
    raises by itself becomes a RuntimeError.
    """

    async def call() -> Any:
        try:
            result = work()
            return await result if isawaitable(result) else result
        except (asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
            if is_cancelled():
                raise
            raise RuntimeError(f"it raised {type(error).__name__} {error}".strip()) from error

    loop = _loop()
    try:
        answer: T = await asyncio.wait_for(
            asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(), loop)), limit_s
        )
        return answer
    except TimeoutError:
        # Blocked, maybe for ever: the next call gets another thread. Other calls notice it, too.
        if not await _is_free(loop) and loop in _loops:
            _loops.remove(loop)
        raise


def _loop() -> asyncio.AbstractEventLoop:
    if not _loops:
        _loops.append(asyncio.new_event_loop())
        # A daemon: a process may end although a user's code never does.
        threading.Thread(target=_loops[0].run_forever, name="user code", daemon=True).start()
    return _loops[0]


async def _is_free(loop: asyncio.AbstractEventLoop) -> bool:
    pulse = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop))
    try:
        await asyncio.wait_for(pulse, _PULSE_S)
    except TimeoutError:
        return False
    return True
