"""A newcomer's first hour: the commands of the pages, as they stand and in their order, in one copy
of the checkout.
"""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from note_files import SAMPLE
from real_runs import REPOSITORY, environment
from test_docs import blocks

from medserl_agentloop.testing import compose_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PACKAGE = ("hydra_plugins", "medserl_agentloop", "prompts", "recipes", "tool_configs")
PARTS = ("assets", "data_prep", "experiments", *PACKAGE)
FILES = ("Makefile", "pyproject.toml", "constraints-cpu.txt")
SMALLER = {
    "medserl_agentloop/tools/quickstart.py": (("NEW_CASES = 1500, 100", "NEW_CASES = 100, 20"),),
    "recipes/quickstart.yaml": (("_steps: 16", "_steps: 1"), ("save_freq: 4", "save_freq: 1")),
    "recipes/tiny.yaml": (("_size: 16", "_size: 8"), ("n: 4", "n: 2")),
}
"""Smaller values for the copy. The commands are those of the pages; runs that they start end after
a step.
"""
NOTES = 100

GPU, SERVED = (
    "needs a GPU; composed by test_docs.py and planned here",
    "needs a served model; parsed by test_docs.py",
)
TWICE = (
    "the quickstart again with another reward; composed by test_docs.py, played in "
    "test_main_ppo_certificate.py"
)
NOT_RUN = {
    "git clone": "this is the checkout",
    "make test": "these tests",
    "make learn": "learning/test_learn.py runs it",
    "python -m verl.trainer.main_ppo "
    "+recipes=own_notes": "test_main_ppo.py runs it, and its data are looked for here",
    "pip install": "installs from a package index",
    "hf download": "needs the hub",
    "HF_HUB_CACHE=": "needs the packages of transformers[serving]",
    "medserl show runs/quickstart": "make quickstart does it",
    "medserl progress": "make quickstart does it",
    "python -m verl.trainer.main_ppo +recipes=quickstart selfplay.reward=zero_sum": TWICE,
    "medserl report runs/quickstart runs/zero_sum": TWICE,
    "medserl compare runs/quickstart runs/zero_sum": TWICE,
    "medserl play http": SERVED,
    "medserl show runs/played.jsonl": SERVED,
    "medserl judge calibrate": SERVED,
    "medserl evaluate http": SERVED,
    "CUDA_VISIBLE_DEVICES=": GPU,
    "python -m sglang.launch_server": GPU,
    "medserl export runs/qwen3_4b": GPU,
    "SGLANG_FLASHINFER_USE_PAGED=1 CUDA_VISIBLE_DEVICES=": GPU,
    "python -m verl.model_merger merge --backend fsdp --local_dir runs/qwen3_4b": GPU,
    "python -m verl.trainer.main_ppo +recipes=qwen3_4b": GPU,
    "python -m verl.trainer.main_ppo +recipes=[qwen3_4b": GPU,
}
"""Beginnings of commands that are not run here, and why."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with small runs, an environment that is installed, and files named
    as MEDEC's.
    """
    folder: Path = tmp_path_factory.mktemp("newcomer")
    for name in PARTS:
        shutil.copytree(
            REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in FILES:
        shutil.copy(REPOSITORY / name, folder)
    for name, changes in SMALLER.items():
        text = (folder / name).read_text(encoding="utf-8")
        for before, after in changes:
            assert before in text, f"{name}: {before}"
            text = text.replace(before, after)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / ".venv").mkdir()
    for part in ("bin", "lib", "pyvenv.cfg"):
        (folder / ".venv" / part).symlink_to(Path(sys.prefix) / part)
    (folder / ".venv" / ".cpu").touch()
    notes = pd.read_csv(SAMPLE, dtype=str, keep_default_na=False).head(NOTES)
    for name in (
        "MEDEC-MS-TrainingSet.csv",
        "MEDEC-MS-ValidationSet.csv",
        SAMPLE.relative_to(REPOSITORY),
    ):
        notes.to_csv(folder / name, index=False)
    return folder


def commands(page: str) -> Iterator[str]:
    """The commands of a page that are run, without their comments."""
    for block in blocks(REPOSITORY / page, "bash"):
        for line in re.sub(r"(^| +)# .*$", "", block.replace("\\\n", " "), flags=re.M).splitlines():
            if line and not line.startswith(tuple(NOT_RUN)):
                yield line


def run(folder: Path, page: str, about: str = "") -> dict[str, str]:
    """Run a page's commands, or those about something, in the activated environment; return their
    output.
    """
    printed = {}
    # Under another make, make says which folder it enters and leaves.
    env = {name: v for name, v in environment(folder).items() if not name.startswith("MAKE")}
    for command in (command for command in commands(page) if about in command):
        more = " trainer.total_training_steps=1" if "verl.trainer.main_ppo" in command else ""
        started = time.monotonic()
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"source .venv/bin/activate\n{command}{more}"],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        print(f"{time.monotonic() - started:4.0f} s  {command}")
        assert done.returncode == 0, f"{page}: {command}\n{done.stdout[-5000:]}"
        printed[command] = done.stdout
    return printed


def rewards(run: Path) -> set[str]:
    """The names of all reward components in the games of a run."""
    games = map(json.loads, (run / "games.jsonl").read_text(encoding="utf-8").splitlines())
    return {
        name for game in games for components in game["rewards"].values() for name in components
    }


@pytest.fixture(scope="module")
def readme(checkout: Path) -> dict[str, str]:
    """The output of README's commands."""
    return run(checkout, "README.md")


def test_the_readmes_commands_do_what_it_says(checkout: Path, readme: dict[str, str]) -> None:
    quickstart = readme["make quickstart"]
    assert "step 1/1 " in quickstart
    assert "errors found" in quickstart.splitlines()[-1]
    assert not (checkout / "outputs").exists(), "a run keeps its files in its folder"
    assert (checkout / "runs" / "quickstart" / "report.html").exists()
    own_notes = compose_run("+recipes=own_notes").data
    assert all((checkout / file).exists() for file in (own_notes.train_files, own_notes.val_files))
    assert "It fits" in readme["medserl plan qwen3_4b --gpu 96"]


@pytest.mark.long
@pytest.mark.usefixtures("readme")
def test_the_guides_go_on_from_the_readme(checkout: Path) -> None:
    said = run(checkout, "docs/start.md")
    assert "step 1/1 " not in said["make quickstart"], "what is finished is not done again"

    *_, verified = run(checkout, "docs/data.md", "data/own").values()
    assert "holds" in verified


@pytest.mark.long
def test_a_game_of_ones_own_trains_as_its_page_says(checkout: Path) -> None:
    (code,) = (
        block
        for block in blocks(REPOSITORY / "docs" / "extending.md", "python")
        if "(Interaction)" in block
    )
    (checkout / "rps.py").write_text(code, encoding="utf-8")
    run(checkout, "docs/extending.md", "rps")
    assert rewards(checkout / "runs" / "rps") == {"win"}
