"""Which rollout servers of a run are gone; the trainer asks, whatever engine they run.

verl 0.9.1 logs a game whose server died, trains on with the rest and fails later on something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
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


def _identity(error: RayActorError) -> str:
    """Class, name and pid of a dead actor, out of Ray's long account of it."""
    facts = dict(re.findall(r"^\s*(class_name|name|pid): (.+)$", str(error), flags=re.MULTILINE))
    known = [
        f"{label} {facts[key]}"
        for key, label in (("class_name", "a"), ("name", "named"), ("pid", "pid"))
        if key in facts
    ]
    return ", ".join(known) or " ".join(str(error).split())
