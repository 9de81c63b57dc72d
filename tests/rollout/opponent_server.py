"""A local OpenAI-compatible server that plays an opponent, on a real socket."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from evaluation.conftest import Answer, ChatServer
from serving import completion, serving


class OpponentServer(ChatServer):
    """Answers with whatever ``answer`` returns for the messages of a request."""

    def __init__(self) -> None:
        super().__init__()
        self.chats = self.requests
        self.answer = lambda messages: "hello"

    def complete(self, body: dict[str, Any]) -> Answer:
        said = self.answer(body["messages"])
        return {**completion(said), "model": "frozen-7b"} if isinstance(said, str) else said


@contextmanager
def opponent_server() -> Iterator[OpponentServer]:
    """A server in a thread, on a port of its own."""
    opponent = OpponentServer()
    with serving(opponent.app()) as opponent.url:
        yield opponent
