"""A web application on a real local socket, in a thread of the test's own process, and what a model says in one."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI

T = TypeVar("T")


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
        server.should_exit = server.force_exit = True  # without waiting for connections that clients keep
        thread.join(timeout=10)


def as_new(server: T) -> T:
    """A server that is shared by tests, with everything but its address as it was made."""
    said: Any = server
    said.__dict__.update({**type(said)().__dict__, "url": said.url})
    return server


def refusal(field: str, other: str | None = None) -> dict[str, Any]:
    """The words of OpenAI, with status 400, about a field that a model does not take, or not with this value."""
    words = f"Unsupported parameter: '{field}' is not supported with this model."
    words += f" Use '{other}' instead." if other else ""
    return {"error": {"message": words, "type": "invalid_request_error", "param": field, "code": "unsupported_value"}}


def completion(content: str | list[Any] | None, *, finish: str | None = "stop", **message: Any) -> dict[str, Any]:
    """A chat completion as SGLang and vLLM write it."""
    said = {"role": "assistant", "content": content, **message}
    return {"choices": [{"index": 0, "message": said, "finish_reason": finish}], "usage": {"completion_tokens": 12}}
