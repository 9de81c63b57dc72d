"""A chat server whose answers a test chooses, a run's folder, and a file of rows to play."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from game.builders import spec
from serving import ChatServer

from medserl_agentloop.core.step_file import CONFIG_FILE, LATEST
from medserl_agentloop.data.rows import write_parquet
from medserl_agentloop.games.medical.case import GameSpec
from medserl_agentloop.paths import resource

CATEGORIES = ("vanilla_harmful", "adversarial_harmful", "vanilla_benign", "adversarial_benign")


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer() as server:
        yield server


def run_at(folder: Path, steps: int = 1, player: str = "tiny_player", **config: Any) -> Path:
    """A run's folder: its config, and a checkpoint of a player after each step."""
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    for step in range(1, steps + 1):
        (folder / f"global_step_{step}").mkdir()
        (folder / f"global_step_{step}" / "actor").symlink_to(resource(f"assets/{player}"))
    (folder / LATEST).write_text(str(steps))
    return folder


def write_rows(specs: Iterable[GameSpec], path: Path) -> Path:
    """A parquet file of rows to play."""
    facts = [asdict(one) | {"sentences": []} for one in specs]
    for of_row in facts:  # a row has the notes of the case
        del of_row["seed_note"]
    write_parquet([{"extra_info": of_row} for of_row in facts], path)
    return path


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve games, three of each of the four categories."""
    specs = [
        spec(CATEGORIES[number % 4], index=number, text_id=f"toy-{number}") for number in range(12)
    ]
    return write_rows(specs, tmp_path_factory.mktemp("rows") / "train.parquet")
