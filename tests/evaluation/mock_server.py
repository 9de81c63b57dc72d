"""The mock engine behind an OpenAI-compatible server: it applies the chat template as SGLang does."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from serving import serving

from medserl_agentloop.testing.mock_engine import MockSGLangEngine
from medserl_agentloop.testing.tiny import tiny_tokenizer

MODEL = "toy-4b"
TOKENIZER = tiny_tokenizer()


class MockServer:
    """Answers with what ``answer(prompt)`` says, a text or an HTTP status; remembers the prompts that it was asked."""

    def __init__(self, answer: Callable[[str], str | int]) -> None:
        self.answer = answer
        self.url = ""
        self.prompts: list[list[int]] = []
        self.bodies: list[dict[str, Any]] = []
        self.hold_after: int | None = None
        """Requests from this one on get no answer before ``released``."""
        self.released = threading.Event()
        self._engine = MockSGLangEngine(lambda ids, params: str(self.answer(TOKENIZER.decode(ids))), TOKENIZER)

    @property
    def asked(self) -> list[str]:
        """The prompts as text."""
        return [TOKENIZER.decode(ids) for ids in self.prompts]

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/models")
        def models() -> dict[str, Any]:
            return {"data": [{"id": MODEL}]}

        @app.post("/v1/chat/completions")
        async def chat(body: dict[str, Any]) -> Response:
            ids = list(TOKENIZER.apply_chat_template(body["messages"], add_generation_prompt=True)["input_ids"])
            self.prompts.append(ids)
            self.bodies.append(body)
            while self.hold_after is not None and len(self.prompts) > self.hold_after and not self.released.is_set():
                await asyncio.sleep(0.05)
            if isinstance(status := self.answer(TOKENIZER.decode(ids)), int):
                return JSONResponse({"error": "no luck"}, status_code=status)
            output = await self._engine.generate("", prompt_ids=ids, sampling_params={"max_tokens": body["max_tokens"]})
            content = TOKENIZER.decode(output.token_ids, skip_special_tokens=True)
            for string in body.get("stop", []):
                before, found, _ = content.partition(string)
                content = before + (found if body.get("no_stop_trim") else "")
            message = {"role": "assistant", "content": content}
            choice = {"index": 0, "message": message, "finish_reason": output.stop_reason}
            return JSONResponse({"choices": [choice], "usage": {"completion_tokens": len(output.token_ids)}})

        return app


@contextmanager
def mock_server(answer: Callable[[str], str | int]) -> Iterator[MockServer]:
    server = MockServer(answer)
    with serving(server.app()) as server.url:
        try:
            yield server
        finally:
            server.released.set()
