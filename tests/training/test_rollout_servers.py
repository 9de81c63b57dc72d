"""A rollout server whose process is gone is found and named; a living one and a busy one are not."""

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from medserl_agentloop.training import rollout_servers
from medserl_agentloop.training.rollout_servers import dead_servers, watched

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


def test_a_server_that_outlives_its_engine_is_ended_and_one_without_an_engine_of_its_own_is_not(cluster: None) -> None:
    class Server:
        async def start_engine(self) -> int | None:
            self.engine = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,), daemon=True)
            self.engine.start()
            return self.engine.pid

        async def start_helper(self) -> None:
            helper = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(1.0,))
            helper.start()

        async def wait_for_ever(self) -> None:
            await asyncio.sleep(600)

    with_engine, without = (
        SimpleNamespace(replica_rank=rank, servers=[ray.remote(Server).options(name=f"outliving_{rank}").remote()])
        for rank in range(2)
    )
    engine = ray.get(with_engine.servers[0].start_engine.remote())
    ray.get(with_engine.servers[0].start_helper.remote())  # ends by itself, which is no crash
    waiting = with_engine.servers[0].wait_for_ever.remote()
    with watched([with_engine, without], every_s=0.2):
        time.sleep(4)
        assert dead_servers([with_engine, without]) == []
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(waiting, timeout=20)
        [line] = dead_servers([with_engine, without])
    assert line.startswith("rollout server 0 died")
