"""A real run on two Ray nodes of this machine: both play and train, one file holds the games, a lost node ends it."""

import re
import shutil
import tempfile
from pathlib import Path

import psutil
import pytest
from ray.cluster_utils import Cluster
from real_runs import AGREEMENT, GAMES_PER_STEP, RAY, Run

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

NODE = {"num_cpus": 8, "num_gpus": 1, "include_dashboard": False, "object_store_memory": 2**28}


HEALTH = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "3"}  # a lost node is soon noticed


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


def test_a_run_on_two_nodes_trains_and_names_the_one_that_is_lost(
    tmp_path: Path, data: tuple[str, ...], cluster: Cluster
) -> None:
    run = Run(
        tmp_path,
        *data,
        f"+ray_kwargs.ray_init.address={cluster.address}",
        "ray_kwargs.ray_init.num_cpus=null",
        "ray_kwargs.ray_init.num_gpus=null",
        "trainer.nnodes=2",
        "trainer.total_training_steps=50",
    )
    try:
        run.wait_for_checkpoint(1)
        [trainer] = set(re.findall(r"TaskRunnerV1 pid=(\d+)", run.log.read_text()))
        raylet = psutil.Process(int(trainer)).ppid()
        other, *_ = [node for node in cluster.worker_nodes if node.all_processes["raylet"][0].process.pid != raylet]
        cluster.remove_node(other, allow_graceful=False)
        assert run.process.wait(timeout=90) != 0
    finally:
        run.kill()
    [line] = {line for line in run.lines() if "was lost" in line}
    assert re.search(rf"^node .*, Ray's id {other.node_id[:8]}\) was lost in step \d+\. .*resumes from the last", line)
    assert all(step["training/rollout_probs_diff_max"] < AGREEMENT for step in run.metrics)
    assert run.steps_of_games()[1] == GAMES_PER_STEP
