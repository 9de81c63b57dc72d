"""A real run on two Ray nodes of this machine: both play and train, one file holds the games, a lost node ends it.

Its credit is role_gae with a critic and a KL in the reward, in the shared context, with a merged LoRA adapter. Of the
other estimators role_rae runs in test_main_ppo.py, role_grpo in test_main_ppo_waiting.py, role_rloo in
test_main_ppo_certificate.py and role_reinforce_pp in the remaining ones.
"""

import re
import shutil
import tempfile
from pathlib import Path

import psutil
import pytest
from ray.cluster_utils import Cluster
from real_runs import AGREEMENT, GAMES_PER_STEP, RAY, Run

from medserl_agentloop.games.medical.types import Role

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

NODE = {"num_cpus": 8, "num_gpus": 1, "include_dashboard": False, "object_store_memory": 2**28}
HEALTH = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "3"}  # a lost node is soon noticed
CREDIT = (
    "selfplay.context=shared",
    "algorithm.adv_estimator=role_gae",
    "algorithm.lam=0.95",
    "algorithm.use_kl_in_reward=True",
    *(f"actor_rollout_ref.model.{of}" for of in ("lora_rank=4", "target_modules=all-linear", "lora.merge=True")),
)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A head and two nodes that train, started before the run, with the environment that its recipe would set."""
    for name, value in {**RAY, "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", **HEALTH}.items():
        monkeypatch.setenv(name, value)
    folder = tempfile.mkdtemp(prefix="ray_")  # or other runs of this machine would find the cluster, and join it
    monkeypatch.setenv("RAY_TMPDIR", folder)
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_gpus": 0})
    for _ in range(2):
        cluster.add_node(**NODE)
    yield cluster
    cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def test_two_nodes_train_both_roles_and_the_critic_and_the_one_that_is_lost_is_named(
    tmp_path: Path, data: tuple[str, ...], cluster: Cluster
) -> None:
    run = Run(
        tmp_path,
        *data,
        *CREDIT,
        f"+ray_kwargs.ray_init.address={cluster.address}",
        "ray_kwargs.ray_init.num_cpus=null",
        "ray_kwargs.ray_init.num_gpus=null",
        "trainer.nnodes=2",
        "trainer.total_training_steps=50",
    )
    try:
        run.wait_for_checkpoint(1)
        [trainer] = set(re.findall(r"TaskRunnerV1 pid=(\d+)", run.train_log.read_text()))
        raylet = psutil.Process(int(trainer)).ppid()
        other, *_ = [node for node in cluster.worker_nodes if node.all_processes["raylet"][0].process.pid != raylet]
        cluster.remove_node(other, allow_graceful=False)
        assert run.process.wait(timeout=90) != 0
    finally:
        run.kill()
    [line] = {line for line in run.lines() if "was lost" in line}
    assert re.search(rf"^node .*, Ray's id {other.node_id[:8]}\) was lost in step \d+\. .*resumes from the last", line)
    for step in run.metrics:
        assert step["training/rollout_probs_diff_max"] < AGREEMENT
        assert all(step[f"selfplay/{role.value}/trained_tokens"] > 0 for role in Role)
        assert step["critic/grad_norm"] > 0
    assert run.metrics[0]["actor/grad_norm"] > 0
    assert run.steps_of_games()[1] == GAMES_PER_STEP
