"""The plugin loads with verl, without a word, costs little, and is never silently absent."""

import subprocess
import sys

import pytest
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from real_runs import environment

from hydra_plugins.medserl_searchpath import MedserlSearchPathPlugin

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


def start(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
    """Let the plugin see a command as Hydra does, before it composes."""
    monkeypatch.setattr(MedserlSearchPathPlugin, "checked", False)
    monkeypatch.setattr(sys, "argv", ["main_ppo.py", *overrides])
    MedserlSearchPathPlugin().manipulate_search_path(ConfigSearchPathImpl())


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["+recipe=quickstart"], "+recipes=NAME"),
        ([], "+recipes=NAME"),
        (["selfplay.train=assessor"], "selfplay.train"),
        (["+recipes=quickstrat"], "'quickstart'"),
        (["+recipes=quickstart", "rollout.n=4"], "actor_rollout_ref.rollout.n"),
        (
            ["+recipes=quickstart", "trainer.total_training_step=4"],
            "'trainer.total_training_steps'",
        ),
        (["+recipes=quickstart", "trainer.save_freq=[1"], "'[1'"),
    ],
)
def test_a_command_that_hydra_cannot_compose_ends_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], named: str
) -> None:
    with pytest.raises(SystemExit) as refused:
        start(monkeypatch, *overrides)
    message = str(refused.value)
    assert message.startswith("[medserl] ") and named in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    "overrides",
    [["+recipes=quickstart", "rollout_typo=1", "--info"], ["data.train_files=[one,two]"]],
)
def test_options_of_hydra_and_runs_without_self_play_go_on(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str]
) -> None:
    start(monkeypatch, *overrides)
