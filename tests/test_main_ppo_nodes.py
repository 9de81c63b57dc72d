"""A real run on two Ray nodes of this machine against a frozen opponent, until one of the nodes is
lost.

Its credit is role_gae with a critic and a KL in the reward, in dynamic batches, two epochs over
each. Of the other estimators role_rae runs in test_main_ppo.py, role_grpo in
benchmarks/test_gpu.py, role_rloo in test_main_ppo_certificate.py, role_reinforce_pp in the
remaining ones. A merged adapter and the shared context are in learning/test_experiments.py.
"""

import json
import re
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster
from real_runs import AGREEMENT, GAMES_PER_STEP, RAY, SILENT_S, Run
from serving import ChatServer, LocalServer, completion
from support import attack_text

from medserl_agentloop.core.certificate import CERTIFICATE_FILE
from medserl_agentloop.core.step_file import GAMES_FILE
from medserl_agentloop.games.medical.case import Role
from medserl_agentloop.games.medical.records import read_games

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

NODE = {"num_cpus": 8, "num_gpus": 1, "include_dashboard": False, "object_store_memory": 2**28}
HEALTH = {
    "RAY_health_check_period_ms": "500"
}  # a lost node refuses at once; one without time to answer has 10 s each
CREDIT = (
    "selfplay.train=assessor",
    "algorithm.adv_estimator=role_gae",
    "algorithm.lam=0.95",
    "algorithm.use_kl_in_reward=True",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "actor_rollout_ref.actor.ppo_epochs=2",
)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A head and two nodes that train, started before the run, with the environment that its recipe
    would set.

    The head has no GPU: Ray keeps what needs none, such as the trainer, off nodes that have one.
    """
    for name, value in {**RAY, "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", **HEALTH}.items():
        monkeypatch.setenv(name, value)
    folder = tempfile.mkdtemp(
        prefix="ray_"
    )  # or other runs of this machine would find the cluster, and join it
    monkeypatch.setenv("RAY_TMPDIR", folder)
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"num_gpus": 0})
    for _ in range(2):
        cluster.add_node(**NODE)
    yield cluster
    cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def attack(role: Role, prompt: str) -> str:
    note = prompt.rpartition("Clinical note:\n")[2]
    return attack_text(f"{note.rstrip(' .')} and zinc 900 mg is given.")


def test_two_node_run_trains_until_a_lost_node_is_named_and_ends_it(
    tmp_path: Path, data: tuple[str, ...], cluster: Cluster
) -> None:
    silent, asked_in_vain, speaks_again = (threading.Event() for _ in range(3))

    def answer(_: int, __: Any) -> Any:
        if silent.is_set():
            asked_in_vain.set()
            speaks_again.wait()
        return completion(json.dumps({"reason": "zinc", "error": "present", "realistic": True}))

    with LocalServer(answer) as judge, ChatServer("frozen-7b") as server:
        server.answer = attack
        run = Run(
            tmp_path,
            *data,
            *CREDIT,
            "selfplay.judge=llm",
            f"selfplay.judge_server.url={judge.url}/v1",
            "selfplay.judge_server.model=judge",
            "selfplay.judge_server.timeout_s=600",
            f"selfplay.opponent.url={server.url}",
            f"+ray_kwargs.ray_init.address={cluster.address}",
            "ray_kwargs.ray_init.num_cpus=null",
            "ray_kwargs.ray_init.num_gpus=null",
            "trainer.nnodes=2",
            "trainer.total_training_steps=50",
        )
        try:
            run.wait_for_checkpoint(2)
            silent.set()
            assert asked_in_vain.wait(
                timeout=SILENT_S
            )  # so a game is being played, and its step cannot end
            other, _ = cluster.worker_nodes  # the trainer is on the head
            cluster.remove_node(other, allow_graceful=False)
            assert run.wait_for_end() != 0
        finally:
            run.kill()
            speaks_again.set()

    # Ray may forward the run's own line too late for the terminal; the error there says the same.
    lost = (
        rf"node .*, Ray's id {other.node_id[:8]}\) was lost in step \d+\. .*resumes from the last"
    )
    assert re.search(lost, run.log.read_text()), run.said()

    certificate = json.loads((tmp_path / "run" / CERTIFICATE_FILE).read_text())
    assert certificate["holds"] and certificate["games"] == 4
    isolation = [("isolation", of) for of in ("actor", "reference", "critic")]
    claims = [(measure["claim"], measure["of"]) for measure in certificate["measures"]]
    assert claims == [*isolation, ("credit", "role_gae"), ("loss", "actor")]
    assert all(measure["value"] < 1e-4 for measure in certificate["measures"])

    folder, reached = tmp_path / "run", run.reached
    assert run.steps_of_games() == dict.fromkeys(range(1, reached + 1), GAMES_PER_STEP)
    for game in read_games(folder / GAMES_FILE):
        assert game.void is None
        if game.attack is not None:
            assert game.opponent is not None and game.opponent.version == "frozen-7b"
    for step in run.metrics:
        assert (
            step["selfplay/attacker/trained_tokens"] == 0 < step["selfplay/assessor/trained_tokens"]
        )
        assert step["selfplay/opponent/failed"] == 0
        assert step["training/rollout_probs_diff_max"] < AGREEMENT
        assert step["critic/grad_norm"] > 0
