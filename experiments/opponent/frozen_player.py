"""A model in a folder as an opponent on this machine's CPU: the chat route of an OpenAI-compatible
server.

``python -m experiments.opponent.frozen_player FOLDER PORT``. Called by
``experiments.opponent.run``.
"""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path
from typing import Any

import typer
import uvicorn
from fastapi import FastAPI

from medserl_agentloop.core.interaction import Turn, as_untrusted
from medserl_agentloop.evaluation.local_models import load_player
from medserl_agentloop.games.medical.types import Role

_GATHER_S = (
    0.05  # requests of one training step arrive within this time, and are answered in one batch
)


def app_of(folder: Path) -> FastAPI:
    """The server's routes for the model in ``folder``; each answer has a seed of its own."""
    player, numbers, app = load_player(folder), count(), FastAPI()

    @app.post("/v1/chat/completions")
    async def chat(body: dict[str, Any]) -> dict[str, Any]:
        number = next(numbers)
        await asyncio.sleep(_GATHER_S)
        turn = Turn(Role.ATTACKER.value, as_untrusted(body["messages"]), body["max_tokens"])
        reply = await player.sample(
            turn,
            body["messages"],
            number=number,
            budget=body["max_tokens"],
            temperature=body["temperature"],
            seed=0,
        )
        choice = {
            "message": {"role": "assistant", "content": reply.text},
            "finish_reason": "length" if reply.truncated else "stop",
        }
        return {
            "model": folder.name,
            "choices": [choice],
            "usage": {"completion_tokens": reply.tokens},
        }

    return app


def main(folder: Path, port: int) -> None:
    """Serve the model until the process is ended."""
    uvicorn.run(app_of(folder), host="127.0.0.1", port=port, log_level="error")


if __name__ == "__main__":
    typer.run(main)
