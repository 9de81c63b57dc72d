"""Games per second and CPU time per game of everything but generation: parse, compare, judge, score, record.

Run by hand: ``python benchmarks/game_core.py``. Scripted players write turns on synthetic notes of MEDEC's median
length; the ``http`` judge asks a server of labels in a process of its own, whose CPU time is not counted.

Measured on two CPU cores without a GPU:

Rules, parsing, edits, judge and rewards of whole games, records complete (the script asserts it):

| judge | games | games/s | CPU ms per game |
|---|---|---|---|
| `labels` | 1,000 | 2,437 | 0.41 |
| `http`, a server on the same machine | 200 | 827 | 0.62 |
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from omegaconf import OmegaConf

from medserl_agentloop.core.interaction import Message, Reply, Turn, play_game
from medserl_agentloop.core.step_file import to_line
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.records import MedicalRecord, Outcome
from medserl_agentloop.games.medical.rewards import medserl
from medserl_agentloop.games.medical.types import Category, ErrorType, GameSpec, Label, Role

CATEGORIES = (
    Category.VANILLA_HARMFUL,
    Category.ADVERSARIAL_HARMFUL,
    Category.VANILLA_BENIGN,
    Category.ADVERSARIAL_BENIGN,
)
WORDS, WORDS_PER_SENTENCE = 120, 12
REASONING_WORDS = 200
SEED = 7
CONCURRENCY = 64


def spec(number: int, rng: random.Random, length: int = WORDS) -> GameSpec:
    """The facts of a game on a note of ``length`` random words."""
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 10))) for _ in range(length)]
    sentences = [
        " ".join(words[at : at + WORDS_PER_SENTENCE]).capitalize() + "." for at in range(0, length, WORDS_PER_SENTENCE)
    ]
    at = rng.randrange(len(sentences))
    wrong = sentences[at].replace(words[at * WORDS_PER_SENTENCE + 1], "wrongword", 1)
    clean, error = " ".join(sentences), " ".join([*sentences[:at], wrong, *sentences[at + 1 :]])
    category = CATEGORIES[number % len(CATEGORIES)]
    return GameSpec(
        category=category,
        target_label=category.default_target_label,
        seed_note=error if category.seed_label is Label.HARMFUL else clean,
        error_note=error,
        clean_note=clean,
        error_type=rng.choice(list(ErrorType)),
        error_sentence=wrong,
        corrected_sentence=sentences[at],
        text_id=f"toy-{number}",
        vignette_id=f"toy-{number}",
        index=number,
    )


class ScriptedPlayer:
    """Writes whole turns of random words: one attack in twenty is a plain copy."""

    name = "scripted"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def reply(self, turn: Turn, messages: Sequence[Message]) -> Reply:
        note = turn.prompt.data["note"]
        words = note.split()
        reasoning = " ".join(self._rng.choices(words, k=REASONING_WORDS))
        if turn.role == Role.ATTACKER:
            if self._rng.random() >= 0.05:
                words[self._rng.randrange(len(words))] = "anotherword"
            return Reply(f"<think>{reasoning}</think>\n<note>{' '.join(words)}</note>", tokens=len(words))
        answer = "verdict: safe"
        if self._rng.random() < 0.5:
            sentence = self._rng.choice(note.split(". "))
            answer = f"verdict: harmful\nsentence: {sentence}\nerror_type: diagnosis\ncorrection: {sentence}"
        return Reply(f"<think>{reasoning}</think>\n<answer>\n{answer}\n</answer>", tokens=len(words))


async def play_all(specs: list[GameSpec], config: MedicalConfig) -> list[bytes]:
    """Play, judge and score every game; the lines of its record."""
    interaction = MedicalGameInteraction(config)
    players = dict.fromkeys(interaction.roles, ScriptedPlayer(random.Random(SEED)))
    places = asyncio.Semaphore(CONCURRENCY)

    async def one(facts: GameSpec) -> bytes:
        async with places:
            game = interaction.new_game(asdict(facts))
            await play_game(interaction, game, players)
            await interaction.score(game.record)
        return to_line(game.record.to_json())

    return await asyncio.gather(*map(one, specs))


def check(lines: list[bytes], specs: list[GameSpec]) -> None:
    """Every game is there once, has a result and its rewards, and can be read and scored again."""
    records = [MedicalRecord.model_validate(json.loads(line)) for line in lines]
    assert [r.spec for r in records] == specs
    for record in records:
        assert record.outcome is not Outcome.VOID, record.void
        assert record.rewards == medserl(record) != {}
        assert (record.judgement is None) == (record.outcome is Outcome.INVALID_ATTACK)


def measure(config: MedicalConfig, games: int) -> None:
    """Print what ``games`` games cost with the judge of ``config``."""
    rng = random.Random(SEED)
    specs = [spec(number, rng) for number in range(games)]
    wall, cpu = time.perf_counter(), time.process_time()
    lines = asyncio.run(play_all(specs, config))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    check(lines, specs)
    print(f"{config.judge}: {games} games, {games / wall:.0f} games/s, {1000 * cpu / games:.2f} ms CPU per game")


def serve_labels(port: int) -> None:
    """A ``/judge`` server that gives every note its category's label."""
    app = FastAPI()

    @app.post("/judge")
    def judge(body: dict[str, Any]) -> dict[str, Any]:
        answers = {}
        for query in body["queries"]:
            present = Category(query["game_category"]).default_target_label is Label.HARMFUL
            detected = query["assessment"] == "Harmful"
            answers[str(query["game_idx"])] = {
                "error_detected": detected,
                "error_present": present,
                "error_realistic": True,
                "assessor_correct": detected == present,
                "is_parsing_error": False,
                "judge_reasoning": "",
                "actual_harm": "Harmful" if present else "Safe",
            }
        return answers

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


@contextmanager
def serving_labels() -> Iterator[str]:
    """Start the server in a process of its own; yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = multiprocessing.get_context("spawn").Process(target=serve_labels, args=(port,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                httpx.get(f"{url}/health")
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.join()


def measure_http(games: int) -> None:
    """Measure the judge that asks the server."""
    with serving_labels() as url:
        node = {"selfplay": {"judge": "http", "judge_server": {"url": url}}}
        measure(MedicalConfig.from_run(OmegaConf.create(node)), games)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=int, default=1000, help="games through the labels judge")
    parser.add_argument("--http", type=int, default=200, help="games through the http judge")
    arguments = parser.parse_args()
    measure(MedicalConfig(), arguments.labels)
    measure_http(arguments.http)


if __name__ == "__main__":
    main()
