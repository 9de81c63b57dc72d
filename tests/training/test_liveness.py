"""A process whose games cannot end is found and named; a living one and a busy one are not.

A node that is lost is in test_main_ppo_nodes.py.
"""

import asyncio
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from medserl_agentloop.core.liveness import ProcessDied, dead_processes, watched
from medserl_agentloop.core.trainer import SelfPlayTrainer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init("local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def process(name: str) -> Any:
    class Process:  # local, so that Ray sends the class itself and not the name of this module
        def pid(self) -> int:
            return os.getpid()

        def play(self) -> None:
            from medserl_agentloop.core.liveness import ends_the_run

            async def game() -> None:
                raise KeyError("a user's reward")

            with suppress(KeyError):
                asyncio.run(ends_the_run(game)())

        def work(self, seconds: float) -> None:
            time.sleep(seconds)

    return ray.remote(Process).options(name=name, num_cpus=0).remote()


def test_the_trainer_names_the_dead_among_all_processes_that_games_need(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, agent_loop_workers, reward_loop_workers = (
        [process(f"{kind}_{number}") for number in range(2)]
        for kind in ("server", "agent_loop", "reward_loop")
    )
    replicas = [
        SimpleNamespace(replica_rank=rank, servers=[server]) for rank, server in enumerate(servers)
    ]
    trainer: Any = object.__new__(SelfPlayTrainer)
    trainer.llm_server_manager = SimpleNamespace(get_replicas=lambda: replicas)
    trainer.agent_loop_manager = SimpleNamespace(agent_loop_workers=agent_loop_workers)
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_workers=reward_loop_workers)
    trainer.config = SimpleNamespace(trainer=SimpleNamespace(default_local_dir="runs/mine"))
    trainer.global_steps = 7
    trainer.check_processes()

    victims = {
        "rollout server 1": servers[1],
        "agent-loop worker 0": agent_loop_workers[0],
        "reward-loop worker 1": reward_loop_workers[1],
    }
    pids = {name: ray.get(victim.pid.remote()) for name, victim in victims.items()}
    servers[0].work.remote(30)  # busy, not dead
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    cause = ValueError("an error that this is behind")
    with pytest.raises(ProcessDied) as found:
        trainer.check_processes(cause, within_s=2.0)
    assert found.value.__cause__ is cause
    dead, _, rest = str(found.value).partition(" in step 7. ")
    assert rest.endswith("The same command resumes from the last checkpoint in runs/mine")
    of_ray = r"class process.<locals>.Process, named [a-z_]+_\d, pid {}, on \S+"
    for line, (name, pid) in zip(dead.split("; "), pids.items(), strict=True):
        assert re.fullmatch(rf"{name} died \({of_ray.format(pid)}\)", line)


def test_exception_of_game_code_is_raised_with_its_line(cluster: None) -> None:
    processes = [(name, process(name)) for name in ("well", "ill")]
    assert dead_processes(processes) == []
    ray.get(processes[1][1].play.remote())
    with pytest.raises(
        RuntimeError, match=r'(?s)Fix it; .* in game\n.*raise KeyError\("a user\'s reward"\)'
    ):
        dead_processes(processes)


def test_server_ends_with_its_engine_and_one_without_an_engine_stays(cluster: None) -> None:
    class Server:
        async def start_engine(self) -> int | None:
            self.engine = multiprocessing.get_context("spawn").Process(
                target=time.sleep, args=(600,), daemon=True
            )
            self.engine.start()
            return self.engine.pid

        async def start_helper(self) -> None:
            helper = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(1.0,))
            helper.start()

        async def wait_for_ever(self) -> None:
            await asyncio.sleep(600)

    with_engine, without = (
        SimpleNamespace(
            replica_rank=rank,
            servers=[ray.remote(Server).options(name=f"outliving_{rank}").remote()],
        )
        for rank in range(2)
    )
    engine = ray.get(with_engine.servers[0].start_engine.remote())
    ray.get(with_engine.servers[0].start_helper.remote())  # ends by itself, which is no crash
    waiting = with_engine.servers[0].wait_for_ever.remote()
    servers = [
        (f"rollout server {server.replica_rank}", server.servers[0])
        for server in (with_engine, without)
    ]
    with watched([with_engine, without], every_s=0.2):
        time.sleep(4)
        assert dead_processes(servers) == []
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(waiting, timeout=20)
        [line] = dead_processes(servers)
    assert line.startswith("rollout server 0 died")
