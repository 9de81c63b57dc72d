"""A chat server for the whole folder, and a file of rows that it plays."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from evaluation.chat_server import ChatServer
from game.builders import spec
from serving import as_new, serving

from medserl_agentloop.core.step_file import CONFIG_FILE, LATEST
from medserl_agentloop.data.rows import write_parquet
from medserl_agentloop.games.medical.records import MedicalRecord
from medserl_agentloop.paths import resource

CATEGORIES = ("vanilla_harmful", "adversarial_harmful", "vanilla_benign", "adversarial_benign")


@pytest.fixture(scope="session")
def _server() -> Iterator[ChatServer]:
    server = ChatServer()
    with serving(server.app()) as server.url:
        yield server


@pytest.fixture
def server(_server: ChatServer) -> ChatServer:
    """The server as new: each test says how it answers."""
    return as_new(_server)


def run_at(folder: Path, steps: int = 1, **config: Any) -> Path:
    """A run's folder: its config, and a checkpoint of the tiny player after each step."""
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    for step in range(1, steps + 1):
        (folder / f"global_step_{step}").mkdir()
        (folder / f"global_step_{step}" / "actor").symlink_to(resource("assets/tiny_player"))
    (folder / LATEST).write_text(str(steps))
    return folder


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A parquet file of twelve games, three of each of the four categories."""
    path = tmp_path_factory.mktemp("rows") / "train.parquet"
    specs = [spec(CATEGORIES[number % 4], index=number, text_id=f"toy-{number}") for number in range(12)]
    write_parquet([{"extra_info": MedicalRecord(spec=one).to_json()["spec"]} for one in specs], path)
    return path
