"""Answers on disk: given once per content, shared by processes, and never in the way of a game."""

import asyncio
import json
from pathlib import Path
from typing import Any

import diskcache
import pytest
from judges.games import judged_by, played, reward_all, reward_manager
from judges.local_server import Status, by_index, harmful, serving
from judges.test_llm import PAIR
from serving import completion

from medserl_agentloop.core.client import AnswerCache
from medserl_agentloop.games.medical.judges.llm import BlindReader, LlmJudge, judge_template
from medserl_agentloop.games.medical.records import Judgement, Outcome
from medserl_agentloop.games.medical.types import Label


def test_a_second_judge_takes_the_first_one_s_answers_whatever_the_verdict_and_says_so(tmp_path: Path) -> None:
    with serving(lambda number, body: by_index(body)) as server:
        options = server.options(cache=str(tmp_path))
        first = reward_all(reward_manager("http", options), [played(n) for n in range(6)])
        asked = len(server.requests)
        second = reward_all(reward_manager("http", options), [played(n) for n in range(6)])
        (wrong,) = reward_all(reward_manager("http", options), [played(verdict="safe")])
        assert len(server.requests) == asked
    assert wrong.outcome is Outcome.MISSED_ERROR
    for fresh, cached in zip(first, second, strict=True):
        assert fresh.judgement and cached.judgement and fresh.rewards == cached.rewards
        assert (fresh.judgement.cached, cached.judgement.cached) == (False, True)
        same = {"cached": False, "seconds": 0.0}
        assert fresh.judgement.model_copy(update=same) == cached.judgement.model_copy(update=same)


@pytest.mark.parametrize("bad", [Status(400), harmful(is_parsing_error=True), harmful(error_present="yes")])
def test_a_failure_is_never_kept(tmp_path: Path, bad: Any) -> None:
    def reply(number: int, body: Any) -> Any:
        if number == 0 and isinstance(bad, Exception):
            raise bad
        return by_index(body, lambda query: bad if number == 0 else harmful())

    with serving(reply) as server:
        manager = reward_manager("http", server.options(cache=str(tmp_path)))
        outcomes = [reward_all(manager, [played()])[0].outcome for _ in range(2)]
    assert outcomes == [Outcome.VOID, Outcome.CORRECT_DETECTION]


def test_half_a_character_in_a_reason_costs_neither_the_judgement_nor_the_cache(tmp_path: Path) -> None:
    found = {"reason": "too \ud800 high", "error": "present"}

    def reply(number: int, body: Any) -> Any:
        blind = "finding" in str(body["response_format"])
        return completion(json.dumps({**found, **({"sentence": 1} if blind else {"realistic": True})}))

    with serving(reply) as server:
        options = server.model_options(cache=str(tmp_path))
        judge, reader = LlmJudge(options, PAIR), BlindReader(options, judge_template("medserl", "blind"), 1)
        for cached in (False, True):
            judgement = asyncio.run(judge.judge(played()))
            (reading,) = asyncio.run(reader.read(played()))
            assert (judgement.reason, judgement.cached) == (reading.reason, reading.cached) == ("too ? high", cached)


def recalled(folder: str | Path, about: str, reason: str = "") -> tuple[Judgement, bool]:
    """What the cache answers, asking for a judgement with this reason; and whether it had one."""

    async def ask() -> Judgement:
        return Judgement(judge="llm", label=Label.SAFE, reason=reason)

    return asyncio.run(AnswerCache(str(folder), Judgement).recall((about,), ask))


def test_a_cache_that_cannot_be_used_costs_no_game(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a_file").write_text("not a folder")
    (tmp_path / "cache.db").write_bytes(b"no database" * 1000)
    for folder in (tmp_path, tmp_path / "a_file" / "folder"):
        caplog.clear()
        games, _ = judged_by("http", [played(n) for n in range(3)], cache=str(folder))
        assert [g.outcome for g in games] == [Outcome.CORRECT_DETECTION] * 3
        (message,) = caplog.messages
        assert "is not used any more" in message


def test_an_entry_of_another_version_is_asked_for_again(tmp_path: Path) -> None:
    recalled(tmp_path, "note", "old")
    with diskcache.Cache(tmp_path) as kept:
        (key,) = kept
        kept[key] = '{"judge": "llm", "mood": "good", "label": "odd"}'
    for cached in (False, True):
        found, known = recalled(tmp_path, "note", "new")
        assert (found.reason, known) == ("new", cached)
