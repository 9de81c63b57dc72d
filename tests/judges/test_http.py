"""The /judge protocol: what is asked, which answers count, and that one bad answer costs one game."""

import asyncio
import threading
import time
from collections import Counter
from typing import Any

import pytest
from judges.games import played, reward_all, reward_manager
from judges.local_server import by_index, harmful, serving

from medserl_agentloop.games.medical.judges.protocol import HttpJudge
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord, Outcome
from medserl_agentloop.games.medical.types import Category, Label

FIELDS = {"game_idx", "medical_note", "assessment", "original_note", "game_category"}


def judge_all(judge: HttpJudge, records: list[MedicalRecord]) -> list[Judgement | BaseException]:
    async def all_at_once() -> list[Judgement | BaseException]:
        return await asyncio.gather(*(judge.judge(record) for record in records), return_exceptions=True)

    return asyncio.run(all_at_once())


@pytest.mark.parametrize("shape", [lambda answers: answers, lambda answers: {"labels": answers}])
def test_both_answer_shapes_are_read(shape: Any) -> None:
    with serving(lambda number, body: shape(by_index(body))) as server:
        (judgement,) = judge_all(HttpJudge(server.options()), [played()])
    assert isinstance(judgement, Judgement)
    assert (judgement.judge, judgement.label, judgement.realistic) == ("http", Label.HARMFUL, True)
    assert judgement.reason == "the dose is ten times too high"
    assert judgement.seconds > 0 and not judgement.cached


def test_a_query_says_what_the_protocol_asks_for() -> None:
    record = played(3)
    with serving(lambda number, body: by_index(body)) as server:
        judge_all(HttpJudge(server.options()), [record])
        assert server.paths == ["/judge"]
        (body,) = server.requests
    assert body["score_key"] == "labels"
    (query,) = body["queries"]
    assert set(query) == FIELDS
    assert query["medical_note"] == record.presented_note
    assert query["original_note"] == record.spec.seed_note
    assert query["game_category"] == "adversarial_benign"


def test_the_assessor_cannot_talk_to_the_judge() -> None:
    """Its verdict is told, its words are not."""
    records = [played(verdict="harmful"), played(verdict="safe")]
    with serving(lambda number, body: by_index(body)) as server:
        judge_all(HttpJudge(server.options()), records)
        assert [q["assessment"] for q in server.requests[0]["queries"]] == ["Harmful", "Safe"]


def test_the_url_may_name_the_path() -> None:
    with serving(lambda number, body: by_index(body)) as server:
        judge_all(HttpJudge(server.options(url=server.url + "/judge/")), [played()])
        assert server.paths == ["/judge"]


def test_an_api_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TEST_KEY", "k-123")
    with serving(lambda number, body: by_index(body)) as server:
        judge_all(HttpJudge(server.options(api_key_env="JUDGE_TEST_KEY")), [played()])
        assert server.headers[0]["authorization"] == "Bearer k-123"


def test_games_of_a_moment_share_a_request_and_keep_their_own_answers() -> None:
    def label_by_note(query: dict[str, Any]) -> dict[str, Any]:
        present = "4 grams" in query["medical_note"]
        return harmful(error_present=present, actual_harm="Harmful" if present else "Safe")

    with serving(lambda number, body: by_index(body, label_by_note)) as server:
        judgements = judge_all(
            HttpJudge(server.options(batch_size=4, batch_wait_ms=50)), [played(n) for n in range(10)]
        )
        assert sorted(len(body["queries"]) for body in server.requests) == [2, 4, 4]
        indices = [query["game_idx"] for body in server.requests for query in body["queries"]]
    assert len(set(indices)) == 10
    assert [j.label is Label.HARMFUL for j in judgements if isinstance(j, Judgement)] == [n == 2 for n in range(10)]


def test_no_more_requests_are_in_flight_than_allowed() -> None:
    gate = threading.Barrier(3)  # the server answers only when three requests are there at once

    def reply(number: int, body: Any) -> Any:
        gate.wait(timeout=60)
        time.sleep(0.02)  # a fourth would arrive now
        return by_index(body)

    with serving(reply) as server:
        judgements = judge_all(HttpJudge(server.options(batch_size=1, concurrency=3)), [played(n) for n in range(12)])
        assert (len(server.requests), server.most_at_once) == (12, 3)
    assert all(isinstance(j, Judgement) for j in judgements)


def _without_last(body: Any) -> Any:
    answers = by_index(body)
    answers.popitem()
    return answers


def _last_is(answer: Any) -> Any:
    def reply(body: Any) -> Any:
        answers = by_index(body)
        answers[str(body["queries"][-1]["game_idx"])] = answer
        return answers

    return reply


def _last_has_another_index(body: Any) -> Any:
    answers = by_index(body)
    answers["9999"] = answers.pop(str(body["queries"][-1]["game_idx"]))
    return answers


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (_without_last, "no answer about game 3"),
        (_last_has_another_index, "no answer about game 3"),
        (_last_is(None), "Input should be a valid dictionary"),
        (_last_is(harmful(error_present="yes")), "error_present Input should be a valid boolean"),
        (_last_is(harmful(actual_harm="harmful")), "actual_harm Input should be 'Safe' or 'Harmful'"),
        (_last_is(harmful(error_present=None, actual_harm=None)), "error_present is missing"),
        (_last_is({}), "error_present is missing"),
        (_last_is(harmful(actual_harm="Safe")), "error_present is True but actual_harm is Safe"),
        (_last_is(harmful(is_parsing_error=True)), "is_parsing_error"),
    ],
)
def test_a_bad_answer_voids_its_game_and_no_other(reply: Any, reason: str) -> None:
    with serving(lambda number, body: reply(body)) as server:
        games = reward_all(reward_manager("http", server.options()), [played(n) for n in range(4)])
        assert len(server.requests) == 1  # a wrong answer is not asked for again
    assert [g.outcome for g in games[:3]] == [Outcome.CORRECT_DETECTION] * 3
    assert games[3].outcome is Outcome.VOID
    assert games[3].void is not None and games[3].void.startswith("judge failed: ") and reason in games[3].void


@pytest.mark.parametrize("content", [b"{", b"null", b'{"labels": []}'])
def test_a_body_that_is_no_object_of_answers_voids_its_batch(content: bytes) -> None:
    with serving(lambda number, body: content if number == 0 else by_index(body)) as server:
        manager = reward_manager("http", server.options())
        first = reward_all(manager, [played(n) for n in range(3)])
        second = reward_all(manager, [played(n) for n in range(3)])
    assert all(g.void and g.void.startswith("judge failed: ") for g in first)
    assert all(g.outcome is Outcome.CORRECT_DETECTION for g in second)


def test_an_abstention_is_told_apart_from_a_failure() -> None:
    answer = {"is_parsing_error": True, "abstained": True, "judge_reasoning": "no dose is given"}
    with serving(lambda number, body: by_index(body, lambda query: answer)) as server:
        (game,) = reward_all(reward_manager("http", server.options()), [played()])
    assert game.void == "judge abstained"
    assert game.judgement is not None and game.judgement.reason == "no dose is given"


def test_untouched_notes_are_decided_by_the_data_without_asking() -> None:
    games = [played(n, category) for n, category in enumerate(Category)]
    with serving(
        lambda number, body: by_index(body, lambda q: harmful(error_present=False, actual_harm="Safe"))
    ) as server:
        judged = reward_all(reward_manager("http", server.options()), games)
        asked = Counter(query["game_category"] for body in server.requests for query in body["queries"])
    assert asked == {"adversarial_harmful": 1, "adversarial_benign": 1, "decoy_benign": 1}
    for game in judged:
        assert game.judgement is not None
        by_data = not game.category.has_attack
        assert game.judgement.judge == ("labels" if by_data else "http")
        assert game.judgement.label is (game.spec.target_label if by_data else Label.SAFE)


def test_the_judge_s_label_counts_where_it_contradicts_the_row_s() -> None:
    """The attacker injected nothing; the assessor that says so is right."""
    safe = harmful(error_present=False, actual_harm="Safe")
    with serving(lambda number, body: by_index(body, lambda query: safe)) as server:
        said_safe, said_harmful = reward_all(
            reward_manager("http", server.options()), [played(verdict="safe"), played(verdict="harmful")]
        )
    assert said_safe.spec.target_label is Label.HARMFUL
    assert said_safe.outcome is Outcome.CORRECT_REJECTION
    assert said_harmful.outcome is Outcome.FALSE_POSITIVE


def test_a_cancelled_game_takes_nothing_from_the_others() -> None:
    async def cancel_one(judge: HttpJudge) -> list[Judgement | BaseException]:
        tasks = [asyncio.create_task(judge.judge(played(n))) for n in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    with serving(lambda number, body: by_index(body)) as server:
        first, cancelled, last = asyncio.run(cancel_one(HttpJudge(server.options())))
        assert len(server.requests) == 1
    assert isinstance(cancelled, asyncio.CancelledError)
    assert isinstance(first, Judgement) and isinstance(last, Judgement)
