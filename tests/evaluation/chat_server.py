"""An OpenAI-compatible chat server whose answers a test chooses."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from serving import completion

from medserl_agentloop.games.medical.types import Role

MODEL = "toy-4b"
Answer = str | int | bytes | dict[str, Any] | Response
"""Text of a turn, an HTTP status to fail with, a raw body, a whole body, or all of the answer."""


class ChatServer:
    """Answers a role's turn on a note with ``answer(role, prompt)``; remembers the requests."""

    def __init__(self) -> None:
        self.answer: Callable[..., Answer] = lambda role, prompt: "?"
        self.models: Answer = {"data": [{"id": MODEL}]}
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
