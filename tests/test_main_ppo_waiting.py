"""A real run against a pool of its checkpoints, one of whose processes is killed while games are played."""

import json
import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from judges.local_server import by_index, serving
from real_runs import AGREEMENT, GAMES_PER_STEP, Run
from rollout.opponent_server import opponent_server
from support import attack_text

from medserl_agentloop.core.step_file import GAMES_FILE, STATE_FILE
from medserl_agentloop.games.medical.records import read_games

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

NOTICED_WITHIN_S = 30.0
"""Checks are 5 s apart; the rest is for a busy machine."""


def kill(run: Run, ray_class: str) -> int:
    """SIGKILL to the run's only process of a Ray class; returns its pid."""
    processes = psutil.Process(run.process.pid).children(recursive=True)
    [victim] = [process for process in processes if process.name().startswith(f"ray::{ray_class}")]
    victim.kill()
    return victim.pid


def line_in_time(run: Run, pattern: str) -> str | None:
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


def test_the_assessor_is_trained_against_a_pool_until_a_killed_worker_is_named_and_ends_the_run(
    tmp_path: Path, data: tuple[str, ...]
) -> None:
    silent, asked_in_vain, speaks_again = (threading.Event() for _ in range(3))

    def answer(_: int, body: Any) -> Any:
        if silent.is_set():
            asked_in_vain.set()
            speaks_again.wait()
        return by_index(body)

    with serving(answer) as judge, opponent_server() as server:
        server.answer = attack
        run = Run(
            tmp_path,
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
            "trainer.total_training_steps=50",
        )
        try:
            run.wait_for_checkpoint(2)
            silent.set()
            assert asked_in_vain.wait(timeout=200)  # so a game is being played, and its step cannot end
            pid = kill(run, "AgentLoopWorkerTQ")
            line = line_in_time(run, r"agent-loop worker 0 died ")
            run.process.wait(timeout=60)
        finally:
            run.kill()
            speaks_again.set()

    worker = rf"class AgentLoopWorkerTQ, named agent_loop_worker_0\w*, pid {pid}"
    assert line is not None, run.log.read_text()[-5000:]
    assert re.match(rf"agent-loop worker 0 died \({worker}\) in step \d+", line)
    assert run.process.returncode > 0

    folder, reached = tmp_path / "run", run.reached
    assert run.steps_of_games() == dict.fromkeys(range(1, reached + 1), GAMES_PER_STEP)
    assert [swap["weight_version"] for swap in server.swaps] == [f"global_step_{step}" for step in range(reached + 1)]
    model = folder / f"global_step_{reached}" / "actor" / "huggingface"
    assert server.swaps[-1]["model_path"] == str(model) and any(model.glob("*.safetensors"))
    assessed: Counter[str] = Counter()
    for game in read_games(folder / GAMES_FILE):
        assert game.void is None
        if game.attack is not None:
            assert game.opponent is not None and game.opponent.version == f"global_step_{game.step - 1}"
            assessed[game.opponent.version] += game.assessment is not None
    state = json.loads((folder / f"global_step_{reached}" / STATE_FILE).read_text())
    results = state["opponents"]["results"]
    assert {version: result["games"] for version, result in results.items()} == assessed
    for step in run.metrics:
        assert step["selfplay/attacker/trained_tokens"] == 0 < step["selfplay/assessor/trained_tokens"]
        assert step["selfplay/opponent/failed"] == 0
        assert step["training/rollout_probs_diff_max"] < AGREEMENT
