"""A chat server for the whole folder, and a file of rows that it plays."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from evaluation.chat_server import ChatServer, chat_server
from game.builders import spec
from serving import as_new

from medserl_agentloop.data.conversion import write_parquet
from medserl_agentloop.games.medical.records import MedicalRecord

CATEGORIES = ("vanilla_harmful", "adversarial_harmful", "vanilla_benign", "adversarial_benign")


@pytest.fixture(scope="session")
def _server() -> Iterator[ChatServer]:
    with chat_server() as server:
        yield server


@pytest.fixture
def server(_server: ChatServer) -> ChatServer:
    """The server as new: each test says how it answers."""
    return as_new(_server)


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A parquet file of twelve games, three of each of the four categories."""
    path = tmp_path_factory.mktemp("rows") / "train.parquet"
    specs = [spec(CATEGORIES[number % 4], index=number, text_id=f"toy-{number}") for number in range(12)]
    write_parquet([{"extra_info": MedicalRecord(spec=one).to_json()["spec"]} for one in specs], path)
    return path
