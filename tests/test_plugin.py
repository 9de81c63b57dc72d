"""The plugin loads with verl, says so once, costs little, and is never silently absent."""

import subprocess
import sys

import pytest
from real_runs import environment

pytestmark = pytest.mark.slow

WRONG_VERSION = """
import builtins, io
real_open = builtins.open
def fake_open(file, *args, **kwargs):
    return io.StringIO("0.8.0") if str(file).endswith("version/version") else real_open(file, *args, **kwargs)
builtins.open = fake_open
import verl
print("verl went on")
"""


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in environment().items() if not k.startswith(("MEDSERL_", "VERL_"))}
    return subprocess.run(
        [sys.executable, "-c", code], env={**clean, **env}, capture_output=True, text=True, timeout=280
    )


PLAIN = """
import subprocess, sys, verl
print("trainer imported:", "verl.trainer.ppo.v1" in sys.modules, flush=True)
subprocess.run([sys.executable, "-c", "import verl"], check=True)
from verl.plugin.platform import get_platform
print("platform:", get_platform().vendor_name)
"""


@pytest.fixture(scope="module")
def printed() -> str:
    """By a process that imports verl, and by one that it starts."""
    run = python(PLAIN)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_importing_verl_loads_the_plugin_and_names_both_versions_once_for_all_processes_of_a_run(printed: str) -> None:
    assert printed.count("[medserl] medserl-agentloop 0.1.0 loaded into verl 0.9.1") == 1
    assert printed.count("loaded into verl") == 1


def test_importing_verl_outside_a_run_does_not_import_the_trainer(printed: str) -> None:
    assert "trainer imported: False" in printed.splitlines()


def test_the_cpu_platform_is_chosen_and_never_detected(printed: str) -> None:
    assert "platform: nvidia" in printed.splitlines()
    code = "import verl; from verl.plugin.platform import get_platform; print(get_platform().vendor_name)"
    assert python(code, VERL_PLATFORM="cpu").stdout.splitlines()[-1] == "cpu"


def test_another_verl_is_an_error_with_the_right_version_and_not_silence() -> None:
    run = python(WRONG_VERSION)
    assert run.returncode != 0
    assert "verl went on" not in run.stdout
    assert "needs verl 0.9.1, but verl 0.8.0 is installed" in run.stderr
    assert "pip install 'verl==0.9.1'" in run.stderr


def test_a_process_of_a_run_knows_trainer_estimators_and_agent_loop_by_name() -> None:
    code = """
import ray
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
import verl
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.v1 import get_trainer_cls
print(get_trainer_cls("selfplay_sync").__name__, _agent_loop_registry["medserl_selfplay"]["_target_"])
get_adv_estimator_fn("role_reinforce_pp"), get_adv_estimator_fn("role_grpo")
"""
    run = python(code)
    assert run.returncode == 0, run.stderr
    loop = "medserl_agentloop.core.agent_loop.SelfPlayAgentLoop"
    assert run.stdout.splitlines()[-1] == f"SelfPlayTrainerSync {loop}"
