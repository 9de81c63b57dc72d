"""Answers on disk: given once per content, shared by processes, and never in the way of a game."""

import asyncio
import json
import multiprocessing
from pathlib import Path
from typing import Any

import diskcache
import pytest
from judges.games import played, reward_all, reward_manager
from judges.local_server import Status, by_index, harmful, serving
from judges.test_llm import PAIR, options
from serving import completion

from medserl_agentloop.core.client import AnswerCache
from medserl_agentloop.games.medical.judges.llm import BlindReader, LlmJudge, judge_template
from medserl_agentloop.games.medical.records import Judgement, Outcome
from medserl_agentloop.games.medical.types import Label


def test_a_second_judge_takes_the_first_one_s_answers_and_says_so(tmp_path: Path) -> None:
    games = [played(n) for n in range(6)]
    with serving(lambda number, body: by_index(body)) as server:
        options = server.options(cache=str(tmp_path))
        first = reward_all(reward_manager("http", options), games)
        asked = len(server.requests)
        second = reward_all(reward_manager("http", options), games)
        assert len(server.requests) == asked
    for fresh, cached in zip(first, second, strict=True):
        assert fresh.judgement and cached.judgement
        assert (fresh.judgement.cached, cached.judgement.cached) == (False, True)
        same = {"cached": False, "seconds": 0.0}
        assert fresh.judgement.model_copy(update=same) == cached.judgement.model_copy(update=same)
        assert fresh.rewards == cached.rewards


def test_another_verdict_on_the_same_note_needs_no_second_question(tmp_path: Path) -> None:
    with serving(lambda number, body: by_index(body)) as server:
        manager = reward_manager("http", server.options(cache=str(tmp_path)))
        (right,) = reward_all(manager, [played(verdict="harmful")])
        (wrong,) = reward_all(manager, [played(verdict="safe")])
        assert len(server.requests) == 1
    assert (right.outcome, wrong.outcome) == (Outcome.CORRECT_DETECTION, Outcome.MISSED_ERROR)


@pytest.mark.parametrize("bad", [Status(400), harmful(is_parsing_error=True), harmful(error_present="yes")])
def test_a_failure_is_never_kept(tmp_path: Path, bad: Any) -> None:
    def reply(number: int, body: Any) -> Any:
        if number == 0 and isinstance(bad, Exception):
            raise bad
        return by_index(body, lambda query: bad if number == 0 else harmful())

    with serving(reply) as server:
        manager = reward_manager("http", server.options(cache=str(tmp_path)))
        assert reward_all(manager, [played()])[0].outcome is Outcome.VOID
        assert reward_all(manager, [played()])[0].outcome is Outcome.CORRECT_DETECTION


def test_half_a_character_in_a_reason_costs_neither_the_judgement_nor_the_cache(tmp_path: Path) -> None:
    found = {"reason": "too \ud800 high", "error": "present", "realistic": True}
    blind = {"reason": "too \ud800 high", "error": "present", "sentence": 1}

    def reply(number: int, body: Any) -> Any:
        return completion(json.dumps(blind if "finding" in str(body["response_format"]) else found))

    with serving(reply) as server:
        judge = LlmJudge(options(server, cache=str(tmp_path)), PAIR)
        reader = BlindReader(options(server, cache=str(tmp_path)), judge_template("medserl", "blind"), 1)
        for cached in (False, True):
            judgement = asyncio.run(judge.judge(played()))
            (reading,) = asyncio.run(reader.read(played()))
            assert (judgement.reason, judgement.cached) == (reading.reason, reading.cached) == ("too ? high", cached)


def cache_in(folder: str | Path) -> AnswerCache[Judgement]:
    return AnswerCache(str(folder), Judgement)


def recalled(cache: AnswerCache[Judgement], about: str, reason: str = "") -> tuple[Judgement, bool]:
    """What the cache answers, asking for a judgement with this reason; and whether it had one."""

    async def ask() -> Judgement:
        return Judgement(judge="llm", label=Label.SAFE, reason=reason)

    return asyncio.run(cache.recall((about,), ask))


def _write(folder: str, writer: int, start: Any) -> None:
    start.wait()
    cache = cache_in(folder)
    for number in range(50):
        recalled(cache, f"{writer}-{number}", f"{writer}-{number}")
        recalled(cache, f"common-{number}", f"common-{number}")


def test_several_processes_may_write_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # spawn would import torch three times
    start = context.Event()
    writers = [context.Process(target=_write, args=(str(tmp_path), writer, start)) for writer in range(3)]
    for process in writers:
        process.start()
    start.set()
    for process in writers:
        process.join(30)
    assert [process.exitcode for process in writers] == [0, 0, 0]
    cache = cache_in(tmp_path)
    for writer in range(3):
        for number in range(50):
            for about in (f"{writer}-{number}", f"common-{number}"):
                found, cached = recalled(cache, about)
                assert cached and found.reason == about


def test_a_cache_that_cannot_be_used_costs_no_game(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a_file").write_text("not a folder")
    (tmp_path / "cache.db").write_bytes(b"no database" * 1000)
    for folder in (tmp_path, tmp_path / "a_file" / "folder"):
        caplog.clear()
        with serving(lambda number, body: by_index(body)) as server:
            games = reward_all(reward_manager("http", server.options(cache=str(folder))), [played(n) for n in range(3)])
        assert [g.outcome for g in games] == [Outcome.CORRECT_DETECTION] * 3
        assert [r for r in caplog.messages if "is not used any more" in r] == caplog.messages
        assert len(caplog.messages) == 1


def test_an_entry_of_another_version_is_asked_for_again(tmp_path: Path) -> None:
    cache = cache_in(tmp_path)
    recalled(cache, "note", "old")
    with diskcache.Cache(tmp_path) as kept:
        (key,) = kept
        kept[key] = '{"judge": "llm", "mood": "good"}'
    for cached in (False, True):
        assert recalled(cache_in(tmp_path), "note", "new") == (
            Judgement(judge="llm", label=Label.SAFE, reason="new"),
            cached,
        )
