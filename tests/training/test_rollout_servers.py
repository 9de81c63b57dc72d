"""A rollout server whose process is gone is found and named; a living one and a busy one are not."""

import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from medserl_agentloop.training import rollout_servers
from medserl_agentloop.training.rollout_servers import dead_servers

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def replica(rank: int, name: str) -> Any:
    class Server:  # local, so that Ray sends the class itself and not the name of this module
        def pid(self) -> int:
            return os.getpid()

        def work(self, seconds: float) -> None:
            time.sleep(seconds)

    return SimpleNamespace(replica_rank=rank, servers=[ray.remote(Server).options(name=name).remote()])


def test_the_dead_one_among_servers_is_named(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_servers, "ANSWER_WITHIN_S", 2.0)
    alive, busy, dying = (replica(rank, f"server_{rank}") for rank in range(3))
    pid = ray.get(dying.servers[0].pid.remote())
    assert dead_servers([alive, dying]) == []

    busy.servers[0].work.remote(30)
    os.kill(pid, signal.SIGKILL)
    [line] = dead_servers([alive, busy, dying])
    assert line == f"rollout server 2 died (a replica.<locals>.Server, named server_2, pid {pid})"
