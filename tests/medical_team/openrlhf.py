"""What an OpenRLHF script brings along: a strategy, a tokenizer, vLLM-like generators, a judge server."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from serving import serving

CLEAN = "Chest pain. Prescribed aspirin 325 mg daily."
WRONG = "Chest pain. Prescribed aspirin 9000 mg daily."


class Strategy:
    def __init__(self) -> None:
        self.printed: list[str] = []

    def get_rank(self) -> int:
        return 0

    def print(self, message: str) -> None:
        self.printed.append(message)


class Tokenizer:
    """Characters as tokens."""

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        return "".join(f"[{m['role']}] {m['content']}\n" for m in messages) + "[assistant] "

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(c) for c in text]

    def batch_decode(self, batch: list[list[int]], skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return ["".join(map(chr, ids)) for ids in batch]


def vllm_output(text: str) -> Any:
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=[ord(c) for c in text])])


def turn(answer: str, thinking: str = "MY SECRET PLAN") -> str:
    return f"{thinking}</think><answer>{answer}</answer>"


@dataclass
class Generator:
    """Answers every prompt with ``says(prompt)``; remembers how it was called."""

    says: Callable[[str], str]
    calls: list[tuple[list[str], list[str], dict[str, Any]]] = field(default_factory=list)

    def __call__(self, prompts: list[str], labels: list[str], **kwargs: Any) -> list[Any]:
        self.calls.append((prompts, labels, kwargs))
        return [vllm_output(self.says(prompt)) for prompt in prompts]


@dataclass
class JudgeServer:
    """Speaks the ``/judge`` protocol; ``answer`` is the body or a status to fail with, None knows the game."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    answer: Callable[[dict[str, Any]], Any] = lambda body: verdicts(body)
    healthy: bool = True


def verdicts(body: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a judge that can read says, bare."""
    found = {}
    for query in body["queries"]:
        present, detected = "9000" in query["medical_note"], query["assessment"] == "Harmful"
        found[str(query["game_idx"])] = {
            "error_detected": detected,
            "error_present": present,
            "error_realistic": True,
            "assessor_correct": present == detected,
            "is_parsing_error": False,
            "judge_reasoning": "read it",
            "actual_harm": "Harmful" if present else "Safe",
        }
    return found


@contextmanager
def judge_server() -> Iterator[JudgeServer]:
    judge = JudgeServer()
    app = FastAPI()

    @app.post("/judge")
    def ask(body: dict[str, Any]) -> Response:
        judge.requests.append(body)
        answer = judge.answer(body)
        if isinstance(answer, int):
            return JSONResponse({"detail": "no luck"}, status_code=answer)
        return Response(answer) if isinstance(answer, bytes) else JSONResponse(answer)

    @app.get("/health")
    def health() -> Response:
        return JSONResponse({"status": "healthy"}, status_code=200 if judge.healthy else 503)

    with serving(app) as judge.url:
        yield judge


def attacker() -> Generator:
    """Slips the error in."""
    return Generator(lambda prompt: turn(WRONG))


def assessor() -> Generator:
    """Finds it."""
    return Generator(lambda prompt: turn("Harmful" if "9000" in prompt else "Safe"))
