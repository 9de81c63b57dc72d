"""The /judge protocol: what is asked, which answers count, and that one bad answer costs one game."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from judges.games import judged_by, played
from judges.local_server import by_index, harmful, serving

from medserl_agentloop.games.medical.judges.protocol import HttpJudge
from medserl_agentloop.games.medical.records import Judgement, Outcome
from medserl_agentloop.games.medical.types import Category, Label


@pytest.mark.parametrize("shape", [lambda answers: answers, lambda answers: {"labels": answers}])
def test_both_answer_shapes_are_read(shape: Any) -> None:
    (game,), _ = judged_by("http", [played()], lambda number, body: shape(by_index(body)))
    judgement = game.judgement
    assert judgement is not None
    assert (judgement.judge, judgement.label, judgement.realistic) == ("http", Label.HARMFUL, True)
    assert judgement.reason == "the dose is ten times too high"
    assert judgement.seconds > 0 and not judgement.cached


def test_a_query_says_what_the_protocol_asks_for_and_of_the_assessor_s_words_the_verdict_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUDGE_TEST_KEY", "k-123")
    game = played(3)
    _, server = judged_by("http", [game, played(verdict="safe")], api_key_env="JUDGE_TEST_KEY")
    (body,) = server.requests
    assert (server.paths, server.headers[0]["authorization"]) == (["/judge"], "Bearer k-123")
    assert body["score_key"] == "labels"
    assert body["queries"][0] == {
        "game_idx": 0,
        "medical_note": game.presented_note,
        "assessment": "Harmful",
        "original_note": game.spec.seed_note,
        "game_category": "adversarial_benign",
    }
    assert body["queries"][1]["assessment"] == "Safe"


def test_games_of_a_moment_share_a_request_and_keep_their_own_answers() -> None:
    def label_by_note(query: dict[str, Any]) -> dict[str, Any]:
        present = "4 grams" in query["medical_note"]
        return harmful(error_present=present, actual_harm="Harmful" if present else "Safe")

    games = [played(n) for n in range(10)]
    judged, server = judged_by(
        "http", games, lambda number, body: by_index(body, label_by_note), batch_size=4, batch_wait_ms=50
    )
    assert sorted(len(body["queries"]) for body in server.requests) == [2, 4, 4]
    assert len({query["game_idx"] for body in server.requests for query in body["queries"]}) == 10
    labels = [game.judgement and game.judgement.label is Label.HARMFUL for game in judged]
    assert labels == [n == 2 for n in range(10)]


def last_is(*answer: Any) -> Any:
    """Answers of which the last one is another, or missing."""

    def reply(number: int, body: Any) -> Any:
        answers = by_index(body)
        index, _ = answers.popitem()
        return answers | ({index: answer[0]} if answer else {"9999": harmful()})

    return reply


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (last_is(), "no answer about game 3"),
        (last_is(None), "Input should be a valid dictionary"),
        (last_is(harmful(error_present="yes")), "error_present Input should be a valid boolean"),
        (last_is(harmful(actual_harm="harmful")), "actual_harm Input should be 'Safe' or 'Harmful'"),
        (last_is(harmful(error_present=None, actual_harm=None)), "error_present is missing"),
        (last_is({}), "error_present is missing"),
        (last_is(harmful(actual_harm="Safe")), "error_present is True but actual_harm is Safe"),
        (last_is(harmful(is_parsing_error=True)), "is_parsing_error"),
    ],
)
def test_a_bad_answer_voids_its_game_and_no_other(reply: Any, reason: str) -> None:
    games, server = judged_by("http", [played(n) for n in range(4)], reply)
    assert len(server.requests) == 1  # a wrong answer is not asked for again
    assert [g.outcome for g in games] == [Outcome.CORRECT_DETECTION] * 3 + [Outcome.VOID]
    assert games[3].void is not None and games[3].void.startswith("judge failed: ") and reason in games[3].void


def test_an_abstention_is_told_apart_from_a_failure() -> None:
    answer = {"is_parsing_error": True, "abstained": True, "judge_reasoning": "no dose is given"}
    (game,), _ = judged_by("http", [played()], last_is(answer))
    assert game.void == "judge abstained"
    assert game.judgement is not None and game.judgement.reason == "no dose is given"


def test_untouched_notes_are_decided_by_the_data_and_of_the_others_the_judge_s_label_counts_against_the_row_s() -> None:
    safe = harmful(error_present=False, actual_harm="Safe")
    games = [played(n, category) for n, category in enumerate(Category)] + [played(9, verdict="safe")]
    judged, server = judged_by("http", games, lambda number, body: by_index(body, lambda query: safe))
    asked = Counter(query["game_category"] for body in server.requests for query in body["queries"])
    assert asked == {"adversarial_harmful": 1, "adversarial_benign": 2, "decoy_benign": 1}
    for game in judged:
        assert game.judgement is not None
        by_data = not game.category.has_attack
        assert game.judgement.judge == ("labels" if by_data else "http")
        assert game.judgement.label is (game.spec.target_label if by_data else Label.SAFE)
    outcomes = {game.outcome for game in judged if game.category is Category.ADVERSARIAL_BENIGN}
    assert outcomes == {Outcome.FALSE_POSITIVE, Outcome.CORRECT_REJECTION}


def test_a_cancelled_game_takes_nothing_from_the_others() -> None:
    async def cancel_one(judge: HttpJudge) -> list[Judgement | BaseException]:
        tasks = [asyncio.create_task(judge.judge(played(n))) for n in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    with serving(lambda number, body: by_index(body)) as server:
        first, cancelled, last = asyncio.run(cancel_one(HttpJudge(server.options(url=server.url + "/judge/"))))
        assert len(server.requests) == 1
    assert isinstance(cancelled, asyncio.CancelledError)
    assert isinstance(first, Judgement) and isinstance(last, Judgement)
