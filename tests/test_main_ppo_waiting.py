"""A real run against a pool of its checkpoints, one of whose processes is killed while games are played."""

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
from judges.local_server import by_index, serving
from real_runs import AGREEMENT, GAMES_PER_STEP, Run
from rollout.opponent_server import OpponentServer, opponent_server
from support import attack_text

from medserl_agentloop.core.step_file import GAMES_FILE, STATE_FILE
from medserl_agentloop.games.medical.records import read_games

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

NOTICED_WITHIN_S = 30.0
"""Checks are 5 s apart; the rest is for a busy machine."""


@dataclass(frozen=True)
class Killed:
    """A run whose agent-loop worker was killed after step ``reached``, and the one that resumed it."""

    first: Run
    said: str | None
    pid: int
    reached: int
    second: Run
    server: OpponentServer


def kill(run: Run, ray_class: str) -> int:
    """SIGKILL to the run's only process of a Ray class; returns its pid."""
    processes = psutil.Process(run.process.pid).children(recursive=True)
    [victim] = [process for process in processes if process.name().startswith(f"ray::{ray_class}")]
    victim.kill()
    return victim.pid


def what_is_said(run: Run, pattern: str) -> str | None:
    """The first line that begins with ``pattern``, if there is one in time."""
    deadline = time.monotonic() + NOTICED_WITHIN_S
    while time.monotonic() < deadline:
        for line in run.lines():
            if re.match(pattern, line):
                return line
        time.sleep(0.1)
    return None


def attack(messages: list[dict[str, str]]) -> str:
    note = messages[-1]["content"].rpartition("Clinical note:\n")[2]
    return attack_text(f"{note.rstrip(' .')} and zinc 900 mg is given.")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, data: tuple[str, ...]) -> Iterator[Killed]:
    silent, asked_in_vain, speaks_again = (threading.Event() for _ in range(3))

    def answer(_: int, body: Any) -> Any:
        if silent.is_set():
            asked_in_vain.set()
            speaks_again.wait()
        return by_index(body)

    folder = tmp_path_factory.mktemp("waiting")
    with serving(answer) as judge, opponent_server() as server:
        server.answer = attack
        overrides = (
            *data,
            "selfplay.judge=http",
            f"selfplay.judge_server.url={judge.url}",
            "selfplay.judge_server.timeout_s=600",
            "selfplay.train=assessor",
            "algorithm.adv_estimator=role_grpo",
            "selfplay.opponent.kind=pool",
            "selfplay.opponent.rule=latest",
            f"selfplay.opponent.url={server.url}",
            "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        )
        first = Run(folder, *overrides, "trainer.total_training_steps=50")
        try:
            first.wait_for_checkpoint(1)
            silent.set()
            assert asked_in_vain.wait(timeout=200)  # so a game is being played, and its step cannot end
            pid = kill(first, "AgentLoopWorkerTQ")
            said = what_is_said(first, r"agent-loop worker 0 died ")
            first.process.wait(timeout=60)
        finally:
            first.kill()
        silent.clear()
        speaks_again.set()
        reached = first.reached
        second = Run(folder, *overrides, f"trainer.total_training_steps={reached + 1}")
        second.wait()
        yield Killed(first, said, pid, reached, second, server)


def test_a_killed_agent_loop_worker_is_named_and_ends_the_run_which_resumes(killed: Killed) -> None:
    worker = rf"class AgentLoopWorkerTQ, named agent_loop_worker_0\w*, pid {killed.pid}"
    assert killed.said is not None, killed.first.log.read_text()[-5000:]
    assert re.match(rf"agent-loop worker 0 died \({worker}\) in step \d+", killed.said)
    assert killed.first.process.returncode > 0
    steps = range(1, killed.reached + 2)
    assert any(line.startswith(f"resuming after step {killed.reached} of") for line in killed.second.lines())
    assert killed.second.steps_of_games() == dict.fromkeys(steps, GAMES_PER_STEP)
    assert [step["step"] for step in killed.second.metrics] == list(steps)


def test_the_assessor_is_trained_against_a_pool_of_its_own_checkpoints(killed: Killed) -> None:
    folder, reached, swaps = killed.second.folder / "run", killed.reached, killed.server.swaps
    opponents = [*range(reached + 1), reached]  # the resumed run has its first opponent loaded again
    assert [swap["weight_version"] for swap in swaps] == [f"global_step_{step}" for step in opponents]
    model = folder / f"global_step_{reached}" / "actor" / "huggingface"
    assert swaps[-1]["model_path"] == str(model) and any(model.glob("*.safetensors"))
    assessed: Counter[str] = Counter()
    for game in read_games(folder / GAMES_FILE):
        assert game.void is None
        if game.attack is not None:
            assert game.opponent is not None and game.opponent.version == f"global_step_{game.step - 1}"
            assessed[game.opponent.version] += game.assessment is not None
    state = json.loads((folder / f"global_step_{reached + 1}" / STATE_FILE).read_text())
    results = state["opponents"]["results"]
    assert {version: result["games"] for version, result in results.items()} == assessed
    for step in killed.second.metrics:
        assert step["selfplay/attacker/trained_tokens"] == 0 < step["selfplay/assessor/trained_tokens"]
        assert step["selfplay/opponent/failed"] == 0
        assert step["training/rollout_probs_diff_max"] < AGREEMENT
