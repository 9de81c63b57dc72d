"""The contents of the wheel: everything a run needs besides the code."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from real_runs import RAY, SMALL

from medserl_agentloop.paths import PACKAGE

REPOSITORY = PACKAGE.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (REPOSITORY / "pyproject.toml").exists():
        pytest.skip("not a checkout: there is nothing to build a wheel from")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=280)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_resources_plugin_and_entry_points_and_no_experiments(wheel: Path) -> None:
    inside = set((archive := zipfile.ZipFile(wheel)).namelist())
    for folder in ("prompts", "tool_configs", "recipes", "assets"):
        files = [p for p in (REPOSITORY / folder).rglob("*") if p.is_file()]
        assert (
            files
            and {f"medserl_agentloop/{p.relative_to(REPOSITORY).as_posix()}" for p in files}
            <= inside
        )
    assert "hydra_plugins/medserl_searchpath.py" in inside
    (entry_points,) = (name for name in inside if name.endswith("entry_points.txt"))
    assert b"medserl = medserl_agentloop.plugin" in archive.read(entry_points)
    folders = {name.split("/")[0] for name in inside if ".dist-info/" not in name}
    assert folders == {"hydra_plugins", "medserl_agentloop"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_unpacked_wheel_plays_the_quickstart_in_an_empty_folder(
    wheel: Path, tmp_path: Path
) -> None:
    unpacked, empty = tmp_path / "unpacked", tmp_path / "empty"
    zipfile.ZipFile(wheel).extractall(unpacked)
    empty.mkdir()
    small = [*SMALL, "trainer.total_training_steps=1", "data.val_batch_size=50"]
    code = (
        "import medserl_agentloop.cli as cli; from medserl_agentloop.tools import quickstart\n"
        f"assert cli.__file__.startswith({str(unpacked)!r}), cli.__file__\n"
        "quickstart.TRAIN_CASES, quickstart.NEW_CASES = 40, 10\n"
        f"cli.app(['quickstart', *{small!r}])"
    )
    env = os.environ | RAY | {"PYTHONPATH": str(unpacked)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=empty, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "errors found" in done.stdout.splitlines()[-1]
    run = empty / "runs" / "quickstart"
    assert (run / "report.html").exists()
    config = OmegaConf.load(run / "run_config.yaml")
    assert config.actor_rollout_ref.model.path == str(unpacked / "medserl_agentloop/assets/novice")
    assert sorted(path.name for path in empty.iterdir()) == ["data", "runs"]
