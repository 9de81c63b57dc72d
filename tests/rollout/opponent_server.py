"""A local HTTP server that speaks the routes of SGLang's that opponents use, on a real socket."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from evaluation.conftest import Answer, ChatServer, response
from fastapi import FastAPI, Response
from serving import completion, serving


class OpponentServer(ChatServer):
    """Answers with whatever ``answer`` returns for the messages of a request, and plays with other weights if told."""

    def __init__(self) -> None:
        super().__init__()
        self.chats = self.requests
        self.answer = lambda messages: "hello"
        self.info: dict[str, str] = {"model_path": "somewhere", "weight_version": "default"}
        self.swap_result: Answer = {"success": True}
        self.swaps: list[dict[str, str]] = []

    def complete(self, body: dict[str, Any]) -> Answer:
        said = self.answer(body["messages"])
        metadata = {"weight_version": self.info["weight_version"]}
        return {**completion(said), "model": "frozen-7b", "metadata": metadata} if isinstance(said, str) else said

    def app(self) -> FastAPI:
        app = super().app()

        @app.post("/update_weights_from_disk")
        def swap(body: dict[str, str]) -> Response:
            self.swaps.append(body)
            if isinstance(self.swap_result, dict) and self.swap_result["success"]:
                self.info["weight_version"] = body["weight_version"]
            return response(self.swap_result)

        return app


@contextmanager
def opponent_server() -> Iterator[OpponentServer]:
    """A server in a thread, on a port of its own."""
    opponent = OpponentServer()
    with serving(opponent.app()) as opponent.url:
        yield opponent
