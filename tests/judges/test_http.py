"""The judge ``http``: what is asked and which answers count; answers that are kept on disk."""

import json
from pathlib import Path
from typing import Any

import pytest
from judges.games import by_index, harmful, judge_all, judge_of, judged_by, played
from serving import LocalServer, Status, completion

from medserl_agentloop.games.medical.case import Label
from medserl_agentloop.games.medical.judges.llm import AnswerCache
from medserl_agentloop.games.medical.records import Judgement, Outcome


def test_query_follows_the_protocol_and_shows_nothing_of_the_assessor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUDGE_TEST_KEY", "k-123")
    games = [played(3), played(verdict="safe")]
    (judged, _), server = judged_by("http", games, api_key_env="JUDGE_TEST_KEY")
    said = judged.judgement
    assert (said.judge, said.label, said.realistic) == ("http", Label.HARMFUL, True)
    assert (said.reason, said.cached) == ("the dose is ten times too high", False)
    assert said.seconds > 0
    assert server.paths == ["/judge"] * 2
    assert server.headers[0]["authorization"] == "Bearer k-123"
    bodies = {body["queries"][0]["medical_note"]: body for body in server.requests}
    notes = {"medical_note": judged.presented_note, "original_note": judged.spec.seed_note}
    about = {"game_idx": 0, "assessment": "Safe", "game_category": "adversarial_benign"}
    expected = {"queries": [notes | about], "score_key": "labels"}
    assert bodies[judged.presented_note] == expected
    assert {body["queries"][0]["assessment"] for body in server.requests} == {"Safe"}


def last_is(*answer: Any) -> Any:
    """Answers of which that about the note with 5 grams is another, or missing."""

    def reply(number: int, body: Any) -> Any:
        if "5 grams" not in str(body):
            return by_index(body)
        return {"0": answer[0]} if answer else {"9999": harmful()}

    return reply


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (last_is(), "no answer about game 0"),
        (last_is(harmful(error_present="yes")), "error_present Input should be a valid boolean"),
        (last_is(harmful(actual_harm="Safe")), "error_present is True but actual_harm is Safe"),
        (last_is(harmful(is_parsing_error=True)), "is_parsing_error"),
        (last_is(harmful(is_parsing_error=True, abstained=True)), "judge abstained"),
    ],
)
def test_a_bad_answer_or_an_abstention_voids_its_game_and_no_other(reply: Any, reason: str) -> None:
    games, server = judged_by("http", [played(n) for n in range(4)], reply)
    assert len(server.requests) == 4  # a wrong answer is not asked for again
    assert [g.outcome for g in games] == [Outcome.CORRECT_DETECTION] * 3 + [Outcome.VOID]
    assert reason in str(games[3].void)


# --- answers on disk: given once per content, never in the way of a game ---


def test_second_judge_reuses_cached_answers_of_the_first_and_says_so(tmp_path: Path) -> None:
    with LocalServer(lambda number, body: by_index(body)) as server:
        options = server.options(cache=str(tmp_path))
        first, second = (
            judge_all(judge_of("http", options), [played(n) for n in range(3)]) for _ in range(2)
        )
        assert len(server.requests) == 3
    for fresh, cached in zip(first, second, strict=True):
        assert (fresh.judgement.cached, cached.judgement.cached) == (False, True)
        same = {"cached": False, "seconds": 0.0}
        assert fresh.judgement.model_copy(update=same) == cached.judgement.model_copy(update=same)


@pytest.mark.parametrize("bad", [Status(400), {"0": harmful(is_parsing_error=True)}])
def test_a_failure_is_never_kept(tmp_path: Path, bad: Any) -> None:
    with LocalServer(lambda number, body: by_index(body) if number else bad) as server:
        judge = judge_of("http", server.options(cache=str(tmp_path)))
        outcomes = [judge_all(judge, [played()])[0].outcome for _ in range(2)]
    assert outcomes == [Outcome.VOID, Outcome.CORRECT_DETECTION]


def test_lone_surrogate_in_a_reason_keeps_the_judgement_and_the_cache(tmp_path: Path) -> None:
    found = {"reason": "too \ud800 high", "error": "present"}

    def reply(number: int, body: Any) -> Any:
        blind = "finding" in str(body["response_format"])
        return completion(json.dumps(found | ({"sentence": 1} if blind else {"realistic": True})))

    with LocalServer(reply) as server:
        options = server.model_options(cache=str(tmp_path))
        for cached in (False, True):
            (game,) = judge_all(judge_of("llm", options, blind={"readings": 1}), [played()])
            answers = [game.judgement, *game.judgement.readings]
            assert [(each.reason, each.cached) for each in answers] == [("too ? high", cached)] * 2


def test_a_cache_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a_file").write_text("not a folder")
    (tmp_path / "cache.db").write_bytes(b"no database" * 1000)
    for folder in (tmp_path, tmp_path / "a_file" / "folder"):
        with pytest.raises(ValueError, match=f"judge_server.cache={folder}"):
            AnswerCache(str(folder), Judgement)
