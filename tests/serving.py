"""Servers on real local sockets, in threads of the test's own process, and what a model says in
one.
"""

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import uvicorn
from fastapi import FastAPI

from medserl_agentloop.games.medical.case import Role
from medserl_agentloop.games.medical.config import JudgeServer

MODEL = "toy-4b"


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Serve ``app`` on a port of its own; yields its address."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        # without waiting for connections that clients keep
        server.should_exit = server.force_exit = True
        thread.join(timeout=10)


@dataclass
class Status:
    """An answer with this HTTP status, and with these words."""

    code: int
    words: Any = None


@dataclass
class Line:
    """An answer that is these very bytes, all at once or one by one.

    Without any, the connection is torn down.
    """

    content: bytes = b""
    drip_s: float = 0.0


class LocalServer:
    """Answers with whatever a test's ``reply`` returns, faults included, until its block ends;
    records the requests.

    ``reply`` gets the number of the request, from 0, and its JSON. It returns JSON, bytes as they
    are, or a fault.
    """

    def __init__(self, reply: Callable[[int, Any], Any]) -> None:
        self.reply = reply
        self.requests: list[Any] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.healthy = True
        self.most_at_once = self._at_once = 0
        self._lock = threading.Lock()
        self._server = HttpServer(("127.0.0.1", 0), Handler)
        self._server.local = self
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def options(self, **changes: Any) -> JudgeServer:
        """Options to ask this server with, impatient enough for a test."""
        quick = {"url": self.url, "timeout_s": 5.0, "retries": 0}
        return JudgeServer(**{**quick, **changes})

    def model_options(self, **changes: Any) -> JudgeServer:
        """The same for a chat model."""
        return self.options(**{"url": self.url + "/v1", "model": "judge-model", **changes})

    def page(self, path: str) -> Any:
        """Return the answer to a GET."""
        return {} if self.healthy else Status(503)

    def posted(self, path: str, headers: dict[str, str], body: Any) -> Any:
        """Return the answer to a POST."""
        with self._lock:
            number = len(self.requests)
            self.requests.append(body)
            self.paths.append(path)
            self.headers.append(headers)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return self.reply(number, body)
        finally:
            with self._lock:
                self._at_once -= 1


class HttpServer(ThreadingHTTPServer):
    local: LocalServer
    request_queue_size = 128  # connections that wait, each for one request
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client hung up, or we did."""


class Handler(BaseHTTPRequestHandler):
    server: HttpServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send(
            self.server.local.posted(
                self.path, {k.lower(): v for k, v in self.headers.items()}, body
            )
        )

    def do_GET(self) -> None:
        self.send(self.server.local.page(self.path))

    def send(self, answer: Any) -> None:
        if isinstance(answer, Line):
            for part in map(bytes, zip(answer.content)) if answer.drip_s else [answer.content]:
                self.wfile.write(part)
                time.sleep(answer.drip_s)
            if not answer.content:  # no lingering: the peer sees a reset, not an end
                self.connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
                self.connection.close()
            return
        status = 200
        if isinstance(answer, Status):
            status, answer = answer.code, answer.words or {"error": "as the test wants it"}
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def unused_url() -> str:
    """An address where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


class ChatServer(LocalServer):
    """An OpenAI-compatible chat server that answers a role's turn on a note with ``answer(role,
    prompt)``.

    An answer is the text of a turn, an HTTP status to fail with, or all of the body.
    """

    def __init__(self, model: str | None = None) -> None:
        super().__init__(lambda number, body: self.complete(body))
        self.answer: Callable[..., Any] = lambda role, prompt: "?"
        self.model = model
        self.models: Any = {"data": [{"id": MODEL}]}
        self.info: Any = 404  # SGLang's word on its weights

    def page(self, path: str) -> Any:
        found = {"/v1/models": self.models, "/model_info": self.info}.get(path, 404)
        return Status(found) if isinstance(found, int) else found

    def complete(self, body: dict[str, Any]) -> Any:
        prompt = body["messages"][-1]["content"]
        said = self.answer(
            Role.ATTACKER if "You are the attacker" in prompt else Role.ASSESSOR, prompt
        )
        if isinstance(said, str):
            return completion(said) | ({"model": self.model} if self.model else {})
        return Status(said) if isinstance(said, int) else said


def refusal(field: str, other: str | None = None) -> dict[str, Any]:
    """The words of OpenAI, with status 400, about a field that a model does not take, or not with
    this value.
    """
    words = f"Unsupported parameter: '{field}' is not supported with this model."
    words += f" Use '{other}' instead." if other else ""
    return {
        "error": {
            "message": words,
            "type": "invalid_request_error",
            "param": field,
            "code": "unsupported_value",
        }
    }


def completion(
    content: str | list[Any] | None, *, finish: str | None = "stop", **message: Any
) -> dict[str, Any]:
    """A chat completion as SGLang and vLLM write it."""
    said = {"role": "assistant", "content": content, **message}
    return {
        "choices": [{"index": 0, "message": said, "finish_reason": finish}],
        "usage": {"completion_tokens": 12},
    }
