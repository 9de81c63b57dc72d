"""Which rollout servers of a run are gone; the trainer asks, whatever engine they run.

verl 0.9.1 logs a game whose server died, trains on with the rest and fails later on something else.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

ANSWER_WITHIN_S = 10.0
"""A living server answers at once. One that is slower is taken for busy, not for dead."""


class RolloutServerDied(RuntimeError):
    """A rollout server's process is gone; the message says which, why, and how to go on."""


def dead_servers(replicas: Iterable[Any]) -> list[str]:
    """One line per server that is gone, with what Ray knows of its end.

    Args:
        replicas: verl's rollout replicas.
    """
    servers = [(replica.replica_rank, server) for replica in replicas for server in replica.servers]
    signs_of_life = [(rank, server.__ray_ready__.remote()) for rank, server in servers]
    found = []
    for rank, sign in signs_of_life:
        try:
            ray.get(sign, timeout=ANSWER_WITHIN_S)
        except RayActorError as error:
            found.append(f"rollout server {rank} died ({_identity(error)})")
        except GetTimeoutError:
            continue
    return found


def raise_if_dead(replicas: Iterable[Any], step: int, checkpoints: str, cause: Exception | None = None) -> None:
    """End a run whose rollout server is gone.

    Args:
        replicas: verl's rollout replicas.
        step: The step in progress.
        checkpoints: Folder that the run resumes from.
        cause: What went wrong because of it, where something has already.

    Raises:
        RolloutServerDied: A server is gone; says which, and how to go on.
    """
    if dead := dead_servers(replicas):
        message = (
            f"{'; '.join(dead)} in step {step}. The log says above what it said last. The same command resumes "
            f"from the last checkpoint in {checkpoints}"
        )
        print(f"[medserl] {message}", flush=True)
        raise RolloutServerDied(message) from cause


@contextmanager
def watched(replicas: Iterable[Any], every_s: float = 5.0) -> Iterator[None]:
    """End servers that have outlived their engine, while the block runs.

    A server hears of its engine's end by a signal, which Python handles in the main thread, and in a Ray
    actor that one sleeps. So the server would live on, and whoever waits for its answer, a game or a push
    of weights, would wait for minutes or for ever.

    Args:
        replicas: verl's rollout replicas.
        every_s: seconds between two looks.
    """
    servers, done = [server for replica in replicas for server in replica.servers], threading.Event()

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
    """Runs in a server's process: ends it once a process that its engine consists of has crashed.

    One that has done its work and left is no crash. Servers that run their engine in their own process
    have none, and are left alone.
    """
    engine: dict[str, Any] = server.__dict__.setdefault("_engine_processes", {})
    engine.update({process.name: process for process in multiprocessing.active_children()})
    crashed = [f"{name} (exit code {process.exitcode})" for name, process in engine.items() if process.exitcode]
    if crashed:
        print(f"[medserl] the engine's process {', '.join(crashed)} has crashed; so its server ends", flush=True)
        os._exit(1)


def _identity(error: RayActorError) -> str:
    """Class, name and pid of a dead actor, out of Ray's long account of it."""
    facts = dict(re.findall(r"^\s*(class_name|name|pid): (.+)$", str(error), flags=re.MULTILINE))
    known = [
        f"{label} {facts[key]}"
        for key, label in (("class_name", "a"), ("name", "named"), ("pid", "pid"))
        if key in facts
    ]
    return ", ".join(known) or " ".join(str(error).split())
