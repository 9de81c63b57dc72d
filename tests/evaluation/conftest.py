"""An OpenAI-compatible chat server whose answers a test chooses, a run's folder, and a file of rows to play."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from game.builders import spec
from serving import as_new, completion, serving

from medserl_agentloop.core.step_file import CONFIG_FILE, LATEST
from medserl_agentloop.data.rows import write_parquet
from medserl_agentloop.games.medical.records import MedicalRecord
from medserl_agentloop.games.medical.types import GameSpec, Role
from medserl_agentloop.paths import resource

MODEL = "toy-4b"
Answer = str | int | bytes | dict[str, Any] | Response
"""Text of a turn, an HTTP status to fail with, a raw body, a whole body, or all of the answer."""


class ChatServer:
    """Answers a role's turn on a note with ``answer(role, prompt)``; remembers the requests."""

    def __init__(self) -> None:
        self.answer: Callable[..., Answer] = lambda role, prompt: "?"
        self.models: Answer = {"data": [{"id": MODEL}]}
        self.info: Answer = 404  # SGLang's word on its weights
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.url = ""

    def complete(self, body: dict[str, Any]) -> Answer:
        prompt = body["messages"][-1]["content"]
        return self.answer(Role.ATTACKER if "You are the attacker" in prompt else Role.ASSESSOR, prompt)

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/models")
        def models() -> Response:
            return response(self.models)

        @app.get("/model_info")
        def info() -> Response:
            return response(self.info)

        @app.post("/v1/chat/completions")
        def chat(body: dict[str, Any], request: Request) -> Response:
            self.requests.append(body)
            self.keys.append(request.headers.get("authorization"))
            return response(self.complete(body))

        return app


def response(answer: Answer) -> Response:
    if isinstance(answer, Response):
        return answer
    if isinstance(answer, str):
        return JSONResponse(completion(answer))
    if isinstance(answer, int):
        return JSONResponse({"error": "no luck"}, status_code=answer)
    return Response(answer) if isinstance(answer, bytes) else JSONResponse(answer)


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
    facts = [MedicalRecord(spec=one).to_json()["spec"] | {"sentences": []} for one in specs]
    write_parquet([{"extra_info": of_row} for of_row in facts], path)
    return path


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve games, three of each of the four categories."""
    specs = [spec(CATEGORIES[number % 4], index=number, text_id=f"toy-{number}") for number in range(12)]
    return write_rows(specs, tmp_path_factory.mktemp("rows") / "train.parquet")
