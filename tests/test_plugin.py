"""The plugin loads with verl, without a word, costs little, and is never silently absent."""

import subprocess
import sys

import pytest
from real_runs import environment

WRONG_VERSION = """
import builtins, io
real_open = builtins.open
def fake_open(file, *args, **kwargs):
    return io.StringIO("0.8.0") if str(file).endswith("version/version") else real_open(file, \
*args, **kwargs)
builtins.open = fake_open
import verl
print("verl went on")
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in environment().items() if not k.startswith(("MEDSERL_", "VERL_"))}
    return subprocess.run(
        [sys.executable, "-c", code], env=clean, capture_output=True, text=True, timeout=280
    )


PLAIN = """
import sys, verl
assert "medserl_agentloop.plugin" in sys.modules
heavy = {"verl.trainer.ppo.v1", "verl.workers.engine.base", "transformers.modeling_utils"} & \
{*sys.modules}
print("imported:", heavy or "nothing heavy", flush=True)
from verl.plugin.platform import get_platform
print("platform:", get_platform().vendor_name)
"""


@pytest.mark.slow
def test_importing_verl_loads_the_plugin_which_only_a_run_says() -> None:
    run = python(PLAIN)
    assert run.returncode == 0, run.stderr
    assert "[medserl]" not in run.stdout + run.stderr
    # No trainer, engine or model outside a run, and the CPU platform is never detected.
    assert {"imported: nothing heavy", "platform: nvidia"} <= set(run.stdout.splitlines())


@pytest.mark.slow
def test_another_verl_is_an_error_with_the_right_version_and_not_silence() -> None:
    run = python(WRONG_VERSION)
    assert run.returncode != 0
    assert "verl went on" not in run.stdout
    assert "needs verl 0.9.1, but verl 0.8.0 is installed" in run.stderr
    assert "pip install 'verl==0.9.1'" in run.stderr
