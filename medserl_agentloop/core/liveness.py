"""Ends a run that would hang or learn something else: dead processes, and game code that raises.

verl 0.9.1 continues without the games of a dead rollout server or reward-loop worker, waits forever
for those of a dead agent-loop worker, and continues if a game's code raises. Lost games differ from
the rest: a reward that divides by zero on invalid turns would hide them all. Ray is imported late:
games use this module, and so do verl's servers, where the import would block the event loop.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from inspect import isawaitable
from textwrap import indent
from typing import Any, TypeVar

from medserl_agentloop.terminal import announce, visible

# -- a user's code ---------------------------------------------------------------------------------

T = TypeVar("T")

_PULSE_S = 1.0  # an event loop that does nothing for so long is blocked
_loops: list[asyncio.AbstractEventLoop] = []  # the one in use, or none yet
_failures: list[str] = []  # exceptions of games' code in this process


def is_cancelled() -> bool:
    """Return whether the running task was asked to stop, instead of user code raising the error."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def limited(work: Callable[[], Awaitable[T] | T], limit_s: float) -> T:
    """Call ``work`` in the thread of users' code, and return or await what it returns.

    A coroutine may keep connections in the thread's event loop between games. TimeoutError after
    ``limit_s`` seconds, even if it blocks; RuntimeError if it exits or cancels itself.
    """

    async def call() -> Any:
        try:
            result = work()
            return await result if isawaitable(result) else result
        except (asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
            if is_cancelled():
                raise
            raise RuntimeError(f"it raised {type(error).__name__} {error}".strip()) from error

    async def within(seconds: float, called: Any) -> Any:
        started = asyncio.run_coroutine_threadsafe(called, loop)
        return await asyncio.wait_for(asyncio.wrap_future(started), seconds)

    if not _loops:
        _loops.append(asyncio.new_event_loop())
        # A daemon: a process must be able to end even if a user's code never does.
        threading.Thread(target=_loops[0].run_forever, name="user code", daemon=True).start()
    loop = _loops[0]
    try:
        answer: T = await within(limit_s, call())
        return answer
    except TimeoutError:
        try:
            await within(_PULSE_S, asyncio.sleep(0))
        except TimeoutError:
            # It may be blocked forever: the next call uses another thread.
            if loop in _loops:  # or another call has noticed it
                _loops.remove(loop)
        raise


def ends_the_run(play: Callable[..., Any]) -> Callable[..., Any]:
    """A coroutine function whose first exception ends the run at the trainer's next check."""

    async def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            return await play(*args, **kwargs)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            # It may quote a model's text, which must not look like a line of ours.
            _failures.append(indent(visible("".join(traceback.format_exception(error))), "    "))
            if isinstance(error, Exception):
                raise
            raise RuntimeError(f"a game raised {type(error).__name__}") from error

    return watched


def first_failure(actor: Any) -> str | None:
    """Runs in the process of ``actor``: the first exception there that ends the run."""
    return next(iter(_failures), None)


# -- processes -------------------------------------------------------------------------------------

# a living process answers at once; a slower one is assumed to be busy, not dead
ANSWER_WITHIN_S = 10.0


# Ray asks a node five times, every three seconds, before it declares it dead.
NODE_DECLARED_DEAD_WITHIN_S = 30.0


class ProcessDied(RuntimeError):
    """A process that plays games is gone; the message says which, why, and how to continue."""


Processes = list[tuple[str, Any]]  # Ray actors, each with its name in messages


def game_processes(trainer: Any) -> Processes:
    """The Ray actors of verl's trainer that serve, play and score."""
    # A user's own manager of agent loops may have no workers.
    players = getattr(trainer.agent_loop_manager, "agent_loop_workers", ())
    scorers = trainer.reward_loop_manager.reward_loop_workers
    return [
        (f"rollout server {replica.replica_rank}", server)
        for replica in trainer.llm_server_manager.get_replicas()
        for server in replica.servers
    ] + [
        (f"{kind} {number}", worker)
        for kind, workers in (("agent-loop worker", players), ("reward-loop worker", scorers))
        for number, worker in enumerate(workers)
    ]


def dead_processes(processes: Processes, answer_within_s: float = ANSWER_WITHIN_S) -> list[str]:
    """Return a line per dead process with Ray's report; together they have a few seconds to answer.
    RuntimeError if a game's code raised in one of them.
    """
    import ray
    from ray.exceptions import ActorUnavailableError, RayActorError

    signs = {actor.__ray_call__.remote(first_failure): name for name, actor in processes}
    answered, _ = ray.wait(list(signs), num_returns=len(signs), timeout=answer_within_s)
    dead = []
    for sign in answered:
        try:
            failure = ray.get(sign)
        except ActorUnavailableError:  # unreachable, perhaps only for a moment
            continue
        except RayActorError as error:
            dead.append(f"{signs[sign]} died ({_identity(error)})")
            continue
        if failure:
            raise RuntimeError(
                "the code of a game raised an exception, and a run without the games that it loses "
                "would learn something else. Fix it; the same command resumes from the last "
                f"checkpoint\n{failure}"
            )
    return dead


def _identity(error: Exception) -> str:
    """Class, name, pid and address of a dead actor, from Ray's long report."""
    texts = {"class_name": "class {}", "name": "named {}", "pid": "pid {}", "ip": "on {}"}
    found = re.findall(rf"^\s*({'|'.join(texts)}): (.+)$", str(error), flags=re.MULTILINE)
    facts = dict(found)
    known = [text.format(facts[key]) for key, text in texts.items() if key in facts]
    return ", ".join(known) or " ".join(str(error).split())


def living_nodes() -> frozenset[str]:
    """Return the ids of the nodes of the Ray cluster."""
    import ray

    return frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])


def lost_nodes(known: Collection[str], within_s: float = 0.0) -> list[str]:
    """Return a line for each lost node of the ``known`` ids, waiting for the first ``within_s``."""
    import ray

    deadline = time.monotonic() + within_s
    while True:
        lost = [
            f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']}, Ray's id "
            f"{node['NodeID'][:8]}) was lost"
            for node in ray.nodes()
            if node["NodeID"] in known and not node["Alive"]
        ]
        if lost or time.monotonic() >= deadline:
            return lost
        time.sleep(1)


@contextmanager
def watched(replicas: Iterable[Any], every_s: float = 5.0) -> Iterator[None]:
    """While the block runs, end servers of verl's ``replicas`` whose engine died.

    A signal tells a server that its engine ended. Python handles signals in the main thread, which
    sleeps in a Ray actor. So the server would stay alive, and its clients would wait forever.
    """
    servers = [server for replica in replicas for server in replica.servers]
    done = threading.Event()

    def look() -> None:
        while not done.wait(every_s):
            for server in servers:
                server.__ray_call__.remote(end_without_engine)

    threading.Thread(target=look, daemon=True, name="rollout-server-watch").start()
    try:
        yield
    finally:
        done.set()


def end_without_engine(server: Any) -> None:
    """Runs in a server's process: ends it once a process of its engine has crashed."""
    engine: dict[str, Any] = server.__dict__.setdefault("_engine_processes", {})
    engine.update({process.name: process for process in multiprocessing.active_children()})
    crashed = [
        f"{name} (pid={p.pid}) crashed with exit code {p.exitcode}"
        for name, p in engine.items()
        if p.exitcode
    ]
    if crashed:
        announce(f"the engine's process {', '.join(crashed)}; so its server ends")
        os._exit(1)
