"""A frozen attacker as an OpenAI-compatible chat server on this machine's CPU.

``python -m experiments.opponent.frozen_player FOLDER PORT`` answers with one attack. With ``--draws
4 --rows train.parquet --run RUN`` it searches: it draws four attacks on the note, lets the newest
saved assessor of the run read them, and answers with a valid one that this assessor gets wrong.
Called by ``experiments.opponent.run``.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import pyarrow.parquet as pq
import torch
import typer
import uvicorn
from fastapi import FastAPI

from experiments.opponent.clinic import CONFIG
from medserl_agentloop.core.encoding import Message, as_untrusted
from medserl_agentloop.core.interaction import Reply, Turn, play_game
from medserl_agentloop.core.step_file import LATEST
from medserl_agentloop.evaluation.local_models import LocalModel, load_player
from medserl_agentloop.games.medical.case import Role
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.records import MedicalRecord

_GATHER_S = 0.05  # requests of one step arrive within this time, and are answered in one batch
SEARCHED_FILE = "searched.jsonl"


@dataclass
class _Seat:
    """A model in one game; ``said`` is its last turn."""

    model: LocalModel
    number: int
    name: str = ""
    said: Reply = field(default=Reply(""))

    async def reply(self, turn: Turn, messages: Sequence[Message]) -> Reply:
        self.said = await self.model.sample(
            turn, messages, number=self.number, budget=turn.max_tokens, temperature=1.0, seed=0
        )
        return self.said


class Searcher:
    """Chooses among several attacks of a frozen player by what a training run's assessor misses.

    Attributes:
        attacker: The frozen player.
        run: Folder of the run; its newest checkpoint assesses, before the first one the attacker.
        draws: Attacks drawn for each answer.
    """

    def __init__(self, attacker: LocalModel, rows: Path, run: Path, draws: int) -> None:
        self.attacker, self.run, self.draws = attacker, run, draws
        self._interaction = MedicalGameInteraction(CONFIG, attacker.encoder)
        self._step, self._assessor = "0", attacker
        self._facts: dict[str, Any] = {}
        for facts in pq.read_table(rows, columns=["extra_info"])["extra_info"].to_pylist():
            turn = self._interaction.next_turn(self._interaction.new_game(facts))
            assert turn is not None
            self._facts[_key(turn.prompt.filled())] = facts

    def newest_assessor(self) -> LocalModel:
        """The player of the run's last saved step."""
        latest = self.run / LATEST
        step = latest.read_text().strip() if latest.is_file() else "0"
        if step != self._step:
            self._step, self._assessor = step, load_player(self.run / f"global_step_{step}")
        return self._assessor

    async def answer(self, messages: list[Message], number: int) -> Reply:
        """The chosen attack on the note of a request, and a line about the search in the run."""
        facts, assessor = self._facts[_key(messages)], self.newest_assessor()
        numbers = range(number * self.draws, (number + 1) * self.draws)
        drawn = await asyncio.gather(*(self._play(facts, assessor, each) for each in numbers))
        missed = [one for one in drawn if is_valid(one[0]) and one[0].outcome.is_right is False]
        valid = [one for one in drawn if is_valid(one[0])]
        _, reply = random.Random(number).choice(missed or valid or drawn)
        line = {
            "step": int(self._step),
            "attacks": len(drawn),
            "assessed": sum(one.assessment is not None for one, _ in drawn),
            "missed": len(missed),
        }
        with (self.run / SEARCHED_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return reply

    async def _play(
        self, facts: Any, assessor: LocalModel, number: int
    ) -> tuple[MedicalRecord, Reply]:
        game = self._interaction.new_game(facts)
        attacker = _Seat(self.attacker, number)
        players = {Role.ATTACKER.value: attacker, Role.ASSESSOR.value: _Seat(assessor, number)}
        await play_game(self._interaction, game, players)
        await self._interaction.score(game.record)
        return game.record, attacker.said


def is_valid(record: MedicalRecord) -> bool:
    """Return whether an attack keeps the rules and did what its row asks for."""
    judged = record.judgement
    return (
        judged is not None and bool(judged.realistic) and judged.label is record.spec.target_label
    )


def _key(messages: list[Message]) -> str:
    return json.dumps(messages, sort_keys=True)


def app_of(folder: Path, searcher: Searcher | None = None) -> FastAPI:
    """The server's routes for the model in ``folder``; each answer has a seed of its own."""
    player = load_player(folder) if searcher is None else searcher.attacker
    numbers, app = count(), FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": [{"id": folder.name}]}

    @app.post("/v1/chat/completions")
    async def chat(body: dict[str, Any]) -> dict[str, Any]:
        number = next(numbers)
        await asyncio.sleep(_GATHER_S)
        messages = body["messages"]
        if searcher is None:
            turn = Turn(Role.ATTACKER.value, as_untrusted(messages), body["max_tokens"])
            drawn = {"budget": body["max_tokens"], "temperature": body["temperature"], "seed": 0}
            reply = await player.sample(turn, messages, number=number, **drawn)
        else:
            reply = await searcher.answer(messages, number)
        choice = {
            "message": {"role": "assistant", "content": reply.text},
            "finish_reason": "length" if reply.truncated else "stop",
        }
        usage = {"completion_tokens": reply.tokens}
        return {"model": folder.name, "choices": [choice], "usage": usage}

    return app


def main(
    folder: Path,
    port: int,
    draws: Annotated[int, typer.Option(help="Attacks drawn for each answer.")] = 1,
    rows: Annotated[Path | None, typer.Option(help="Rows of the run, with several draws.")] = None,
    run: Annotated[Path | None, typer.Option(help="Folder of the run, with several draws.")] = None,
) -> None:
    """Serve the model until the process is ended."""
    torch.set_num_threads(1)  # small matrices: more threads only wait for each other
    searcher = None
    if draws > 1:
        assert rows is not None and run is not None
        searcher = Searcher(load_player(folder), rows, run, draws)
    uvicorn.run(app_of(folder, searcher), host="127.0.0.1", port=port, log_level="error")


if __name__ == "__main__":
    typer.run(main)
