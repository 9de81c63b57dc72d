"""A local HTTP server that speaks the routes of SGLang's that opponents use, on a real socket."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from serving import completion, serving

Answer = str | int | dict[str, Any]
"""Text of a turn, an HTTP status to fail with, or a whole body."""


class OpponentServer:
    """Answers with whatever ``answer`` returns for the messages of a request; remembers all requests."""

    def __init__(self) -> None:
        self.answer: Callable[[list[dict[str, str]]], Answer] = lambda _: "hello"
        self.swap_result: Answer = {"success": True}
        self.weight_version = "default"
        self.chats: list[dict[str, Any]] = []
        self.swaps: list[dict[str, str]] = []
        self.url = ""

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/chat/completions")
        def chat(body: dict[str, Any], request: Request) -> Any:
            self.chats.append({**body, "authorization": request.headers.get("authorization")})
            said = self.answer(body["messages"])
            if isinstance(said, int):
                return JSONResponse({"error": "broken"}, status_code=said)
            if isinstance(said, dict):
                return said
            return {**completion(said), "model": "frozen-7b", "metadata": {"weight_version": self.weight_version}}

        @app.post("/update_weights_from_disk")
        def swap(body: dict[str, str]) -> Any:
            self.swaps.append(body)
            if isinstance(self.swap_result, int):
                return JSONResponse({"success": False}, status_code=self.swap_result)
            assert isinstance(self.swap_result, dict)
            if self.swap_result["success"]:
                self.weight_version = body["weight_version"]
            return self.swap_result

        @app.get("/model_info")
        def info() -> dict[str, str]:
            return {"model_path": "somewhere", "weight_version": self.weight_version}

        return app


@contextmanager
def opponent_server() -> Iterator[OpponentServer]:
    """A server in a thread, on a port of its own."""
    opponent = OpponentServer()
    with serving(opponent.app()) as opponent.url:
        yield opponent
