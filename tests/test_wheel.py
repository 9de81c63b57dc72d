"""What travels in the wheel: everything a run needs besides the code."""

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


@pytest.mark.parametrize("folder", ["prompts", "tool_configs", "recipes", "assets"])
def test_the_wheel_holds_every_resource_of_the_checkout(wheel: Path, folder: str) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    files = [p for p in (REPOSITORY / folder).rglob("*") if p.is_file()]
    assert files
    assert {f"medserl_agentloop/{p.relative_to(REPOSITORY).as_posix()}" for p in files} <= inside


def test_the_wheel_brings_its_hydra_plugin_and_its_entry_points(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    assert "hydra_plugins/medserl_searchpath.py" in archive.namelist()
    (entry_points,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
    assert b"medserl = medserl_agentloop.plugin" in archive.read(entry_points)


def test_the_wheel_holds_no_experiments(wheel: Path) -> None:
    folders = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert folders == {"hydra_plugins", "medserl_agentloop"}


@pytest.mark.slow
def test_an_unpacked_wheel_finds_its_resources_and_recipes(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import medserl_agentloop.paths as p; from hydra import compose, initialize_config_module\n"
        f"assert str(p.PACKAGE).startswith({str(tmp_path)!r}), p.PACKAGE\n"
        "import verl\n"
        "initialize_config_module('verl.trainer.config', version_base=None).__enter__()\n"
        "print(compose('ppo_trainer', overrides=['+recipes=quickstart']).actor_rollout_ref.model.path)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == str(tmp_path / "medserl_agentloop/assets/tiny_player")
