"""Games to judge, what the reward manager makes of many at once, and the answers of a judge over
HTTP.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from game.builders import CLEAN_NOTE, HARMFUL_ANSWER, SAFE_ANSWER, attack_text, game
from run_check.runs import start_up
from serving import LocalServer
from support import TOKENIZER, run_with, scored
from verl.trainer.ppo.reward import load_reward_manager

from medserl_agentloop.core.trajectory import GAME_KEY
from medserl_agentloop.games.medical.case import Category
from medserl_agentloop.games.medical.config import JudgeServer
from medserl_agentloop.games.medical.judges import Judge
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord
from medserl_agentloop.paths import PACKAGE


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


def reward_manager(judge: str, server: JudgeServer, **changes: Any) -> Any:
    """verl's reward manager of a run with this judge, as its reward-loop workers build it."""
    run = run_with(selfplay__judge=judge, selfplay__judge_server=server.model_dump(), **changes)
    return load_reward_manager(run, TOKENIZER)


async def reward(manager: Any, record: MedicalRecord) -> tuple[MedicalRecord, dict[str, Any]]:
    """One game through the manager: its judged record, and all that the manager returns."""
    result = await scored(manager, record)
    return MedicalRecord.model_validate(result["reward_extra_info"][GAME_KEY]), result


def reward_all(manager: Any, games: list[MedicalRecord]) -> list[MedicalRecord]:
    """Many games at once; checks that none is lost and no void one is rewarded."""

    async def all_at_once() -> list[tuple[MedicalRecord, dict[str, Any]]]:
        return await asyncio.gather(*(reward(manager, record) for record in games))

    results = asyncio.run(all_at_once())
    assert [record.spec for record, _ in results] == [record.spec for record in games]
    for record, result in results:
        assert (
            (record.void is None)
            == bool(record.rewards)
            == (not result["reward_extra_info"]["void"])
        )
        assert record.void is None or result["reward_score"] == 0
        assert record.void is not None or (record.judgement and record.judgement.label)
    return [record for record, _ in results]


def judged_by(
    judge: str,
    games: list[MedicalRecord],
    reply: Any = lambda number, body: by_index(body),
    **options: Any,
) -> tuple[list[MedicalRecord], LocalServer]:
    """Games judged over HTTP, and the server that was asked; ``selfplay__...`` are keys of the
    run."""
    of_run = {key: options.pop(key) for key in list(options) if key.startswith("selfplay__")}
    with LocalServer(reply) as server:
        served = server.model_options() if judge == "llm" else server.options()
        manager = reward_manager(judge, served.model_copy(update=options), **of_run)
        return reward_all(manager, games), server


def printed_at_start_up(capsys: pytest.CaptureFixture[str], *overrides: str) -> list[str]:
    """The lines that a run of the quickstart prints before it starts."""
    data = (
        PACKAGE.parent / "README.md"
    )  # start-up looks whether the files are there; nothing reads them
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


def by_index(
    body: Any, answer: Callable[[dict[str, Any]], Any] = lambda query: harmful()
) -> dict[str, Any]:
    """One answer for each query of a request."""
    return {str(query["game_idx"]): answer(query) for query in body["queries"]}
