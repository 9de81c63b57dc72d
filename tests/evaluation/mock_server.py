"""The mock engine behind an OpenAI-compatible server: it applies the chat template as SGLang does."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from evaluation.chat_server import Answer, ChatServer
from serving import serving

from medserl_agentloop.testing.mock_engine import MockSGLangEngine
from medserl_agentloop.testing.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


class MockServer(ChatServer):
    """Answers with what ``answer(prompt)`` says, a text or an HTTP status; remembers the prompts that it was asked."""

    def __init__(self, answer: Callable[[str], str | int]) -> None:
        super().__init__()
        self.answer = answer
        self.prompts: list[list[int]] = []
        self.hold_after: int | None = None
        """Requests from this one on get no answer before ``released``."""
        self.released = threading.Event()

    @property
    def asked(self) -> list[str]:
        """The prompts as text."""
        return [TOKENIZER.decode(ids) for ids in self.prompts]

    def complete(self, body: dict[str, Any]) -> Answer:
        ids = list(TOKENIZER.apply_chat_template(body["messages"], add_generation_prompt=True)["input_ids"])
        self.prompts.append(ids)
        if self.hold_after is not None and len(self.prompts) > self.hold_after:
            self.released.wait()
        answer = self.answer(TOKENIZER.decode(ids))
        if isinstance(answer, int):
            return answer
        engine = MockSGLangEngine([answer], TOKENIZER)
        sampling = {"max_tokens": body["max_tokens"]}
        output = asyncio.run(engine.generate("", prompt_ids=ids, sampling_params=sampling))
        content = TOKENIZER.decode(output.token_ids, skip_special_tokens=True)
        for string in body.get("stop", []):
            before, stop, _ = content.partition(string)
            content = before + (stop if body.get("no_stop_trim") else "")
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": output.stop_reason}
        return {"choices": [choice], "usage": {"completion_tokens": len(output.token_ids)}}


@contextmanager
def mock_server(answer: Callable[[str], str | int]) -> Iterator[MockServer]:
    server = MockServer(answer)
    with serving(server.app()) as server.url:
        try:
            yield server
        finally:
            server.released.set()
