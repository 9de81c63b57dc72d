"""The contents of the wheel: everything a run needs besides the code."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
def test_an_unpacked_wheel_finds_its_resources_and_recipes(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import medserl_agentloop.paths as p; from hydra import compose, initialize_config_module\n"
        f"assert str(p.PACKAGE).startswith({str(tmp_path)!r}), p.PACKAGE\n"
        "import verl\n"
        "initialize_config_module('verl.trainer.config', version_base=None).__enter__()\n"
        "print(compose('ppo_trainer', "
        "overrides=['+recipes=quickstart']).actor_rollout_ref.model.path)"
    )
    env = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    command = [sys.executable, "-c", code]
    run = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == str(tmp_path / "medserl_agentloop/assets/novice")
