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


def python(code: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in environment().items() if not k.startswith(("MEDSERL_", "VERL_"))}
    return subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, timeout=280)


PLAIN = """
import subprocess, sys, verl
print("trainer imported:", "verl.trainer.ppo.v1" in sys.modules, flush=True)
subprocess.run([sys.executable, "-c", "import verl"], check=True)
from verl.plugin.platform import get_platform
print("platform:", get_platform().vendor_name)
"""


def test_importing_verl_loads_the_plugin_and_says_so_once_for_all_processes_of_a_run() -> None:
    run = python(PLAIN)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("[medserl] medserl-agentloop 0.1.0 loaded into verl 0.9.1") == 1
    assert "loaded into verl" not in run.stdout
    # No trainer outside a run, and the CPU platform is never detected.
    assert {"trainer imported: False", "platform: nvidia"} <= set(run.stdout.splitlines())


def test_another_verl_is_an_error_with_the_right_version_and_not_silence() -> None:
    run = python(WRONG_VERSION)
    assert run.returncode != 0
    assert "verl went on" not in run.stdout
    assert "needs verl 0.9.1, but verl 0.8.0 is installed" in run.stderr
    assert "pip install 'verl==0.9.1'" in run.stderr
