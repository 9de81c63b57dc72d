"""A real HTTP server on this machine whose answers a test writes, faults included."""

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from medserl_agentloop.games.medical.config import JudgeServer


class Reset(Exception):
    """Raised by a reply: the connection is torn down without an answer."""


@dataclass
class Status(Exception):
    """Raised by a reply: the answer is this HTTP status, with these words."""

    code: int
    words: Any = None


Reply = Callable[[int, Any], Any]
"""From the number of the request, from 0, and its JSON to the answer: JSON-able, or bytes as they are."""


@dataclass
class LocalServer:
    """A server that records its requests."""

    reply: Reply
    url: str = ""
    requests: list[Any] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    healthy: bool = True
    most_at_once: int = 0
    _at_once: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def options(self, **changes: Any) -> JudgeServer:
        """Options to ask this server with, impatient enough for a test."""
        quick = {"url": self.url, "timeout_s": 5.0, "retries": 0}
        return JudgeServer(**{**quick, **changes})

    def model_options(self, **changes: Any) -> JudgeServer:
        """The same for a chat model."""
        return self.options(**{"url": self.url + "/v1", "model": "judge-model", **changes})

    def answer(self, path: str, headers: dict[str, str], body: Any) -> Any:
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


@contextmanager
def serving(reply: Reply) -> Iterator[LocalServer]:
    """A server that answers with ``reply`` until the block ends."""
    local = LocalServer(reply)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status = 200
            try:
                answer = local.answer(self.path, {k.lower(): v for k, v in self.headers.items()}, body)
            except Reset:
                # No lingering: the peer sees a reset, not an end.
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                return
            except Status as error:
                status, answer = error.code, error.words or {"error": "as the test wants it"}
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            self.send_response(200 if local.healthy else 503)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # connections that wait, each for one request
        block_on_close = False

        def handle_error(self, request: Any, client_address: Any) -> None:
            """The judge hung up, or we did."""

    with Server(("127.0.0.1", 0), Handler) as server:
        local.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield local
        finally:
            server.shutdown()


def unused_url() -> str:
    """An address where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def harmful(**changes: Any) -> dict[str, Any]:
    """The answer about one game of a judge that finds an error."""
    answer = {
        "error_detected": True,
        "error_present": True,
        "error_realistic": True,
        "assessor_correct": True,
        "is_parsing_error": False,
        "judge_reasoning": "the dose is ten times too high",
        "actual_harm": "Harmful",
    }
    return {**answer, **changes}


def by_index(body: Any, answer: Callable[[dict[str, Any]], Any] = lambda query: harmful()) -> dict[str, Any]:
    """One answer for each query of a request."""
    return {str(query["game_idx"]): answer(query) for query in body["queries"]}
