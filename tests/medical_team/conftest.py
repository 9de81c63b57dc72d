"""Parts of an OpenRLHF script: vLLM-like generators, and a judge server that can read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from judges.games import by_index, harmful
from serving import LocalServer
from support import TOKENIZER

CLEAN = "Chest pain. Prescribed aspirin 325 mg daily."
WRONG = "Chest pain. Prescribed aspirin 9000 mg daily."


def turn(answer: str, thinking: str = "MY SECRET PLAN") -> str:
    return f"{thinking}</think><answer>{answer}</answer>"


@dataclass
class Generator:
    """Answers every prompt with ``says(prompt)``; remembers how it was called."""

    says: Callable[[str], str]
    calls: list[tuple[list[str], list[str], dict[str, Any]]] = field(default_factory=list)

    def __call__(self, prompts: list[str], labels: list[str], **kwargs: Any) -> list[Any]:
        self.calls.append((prompts, labels, kwargs))
        tokens = (TOKENIZER.encode(self.says(prompt)) for prompt in prompts)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids)]) for ids in tokens]


def verdicts(body: Any) -> dict[str, Any]:
    """Return the bare answers of a judge that can read."""

    def verdict(query: dict[str, Any]) -> dict[str, Any]:
        present, detected = "9000" in query["medical_note"], query["assessment"] == "Harmful"
        labels = {"error_present": present, "error_detected": detected}
        labels["judge_reasoning"] = "read it"
        harm = "Harmful" if present else "Safe"
        return harmful(**labels, assessor_correct=present == detected, actual_harm=harm)

    return by_index(body, verdict)


def attacker() -> Generator:
    """Slips the error in."""
    return Generator(lambda prompt: turn(WRONG))


def assessor() -> Generator:
    """Finds it."""
    return Generator(lambda prompt: turn("Harmful" if "9000" in prompt else "Safe"))


@pytest.fixture
def judge() -> Iterator[LocalServer]:
    with LocalServer(lambda number, body: verdicts(body)) as server:
        yield server
