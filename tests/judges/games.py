"""Games to judge, what a run makes of many at once, and the answers of a judge over HTTP."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from game.builders import CLEAN_NOTE, HARMFUL_ANSWER, SAFE_ANSWER, attack_text, game
from run_check.runs import start_up
from serving import LocalServer

from medserl_agentloop.games.medical.case import Category
from medserl_agentloop.games.medical.config import JudgeServer, MedicalConfig
from medserl_agentloop.games.medical.judges import (
    GatedJudge,
    Judge,
    ask_judge,
    build_judge,
    take_judgement,
)
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord


def played(
    number: int = 0,
    category: Category | str = Category.ADVERSARIAL_BENIGN,
    *,
    verdict: str = "harmful",
) -> MedicalRecord:
    """A finished, unjudged game on a note of its own."""
    note = CLEAN_NOTE.replace("52", str(1000 + number))
    if Category(category).seed_label == "harmful":
        note = note.replace("heparin", "warfarin")
    playing = game(category, seed_note=note)
    if Category(category).has_attack:
        playing.play(attack_text(note.replace("500 units", f"{number + 2} grams")))
    playing.play(HARMFUL_ANSWER if verdict == "harmful" else SAFE_ANSWER)
    return playing.record


async def judgement(judge: Judge, game: MedicalRecord) -> Judgement:
    """Have a judge decide about a game's presented note."""
    return await judge.judge(game.presented_note, game.spec.seed_note, game.spec)


def judge_of(judge: str, server: JudgeServer, **changes: Any) -> GatedJudge:
    """The judge of a run with this server."""
    return build_judge(MedicalConfig(judge=judge, judge_server=server, **changes))


def judge_all(judge: GatedJudge, games: list[MedicalRecord]) -> list[MedicalRecord]:
    """Have many games judged at once."""

    async def one(record: MedicalRecord) -> None:
        take_judgement(record, await ask_judge(judge, record))

    async def all_at_once() -> None:
        await asyncio.gather(*map(one, games))

    asyncio.run(all_at_once())
    return games


def judged_by(
    judge: str,
    games: list[MedicalRecord],
    reply: Any = lambda number, body: by_index(body),
    blind: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[list[MedicalRecord], LocalServer]:
    """Games judged over HTTP, and the server that was asked with these ``options``."""
    with LocalServer(reply) as server:
        served = server.model_options() if judge == "llm" else server.options()
        asked = judge_of(judge, served.model_copy(update=options), blind=blind or {})
        return judge_all(asked, games), server


def printed_at_start_up(capsys: pytest.CaptureFixture[str], *overrides: str) -> list[str]:
    """The lines that a run of the quickstart prints before it starts."""
    data = "hdfs://rows.parquet"  # only verl would read it
    start_up(f"data.train_files={data}", f"data.val_files={data}", *overrides)
    return capsys.readouterr().out.splitlines()


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


SAFE = {"error_present": False, "actual_harm": "Safe"}
"""What of it another judge says, which finds none."""


def by_index(
    body: Any, answer: Callable[[dict[str, Any]], Any] = lambda query: harmful()
) -> dict[str, Any]:
    """One answer for each query of a request."""
    return {str(query["game_idx"]): answer(query) for query in body["queries"]}
