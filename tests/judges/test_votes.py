"""Several votes on a note: who is right where they differ, in which order the notes stand, what is asked again."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judges.games import played, reward_all, reward_manager
from judges.local_server import Status, serving
from judges.test_llm import PAIR, PRESENT, VERDICT, options
from serving import completion
from support import run_with

from medserl_agentloop.core.client import BadAnswer, ServerAddress
from medserl_agentloop.core.config import ConfigError
from medserl_agentloop.core.run_check import check_run
from medserl_agentloop.games.medical.judges import Agreement
from medserl_agentloop.games.medical.judges.llm import LlmJudge, combine
from medserl_agentloop.games.medical.metrics import role_metrics
from medserl_agentloop.games.medical.records import MedicalRecord, Outcome, Vote
from medserl_agentloop.games.medical.types import Label

H, S, A, LOST = "harmful", "safe", "abstained", "lost"


def votes(*said: str, realistic: bool | None = None) -> list[Vote]:
    labels = {H: Label.HARMFUL, S: Label.SAFE}
    return [
        Vote(model="m", edited_first=False, label=labels.get(word), realistic=realistic, reason=word, failed=failed)
        for word in said
        for failed in ["HTTP 500" if word == LOST else None]
    ]


def result(rule: Agreement, *said: str) -> str:
    try:
        label = combine("llm", votes(*said), rule).label
    except BadAnswer:
        return LOST
    return label.value if label else A


@pytest.mark.parametrize(
    ("said", "majority", "unanimous", "abstain"),
    [
        ((H, H, H), H, H, H),
        ((H, H, S), H, A, A),
        ((H, S), A, A, A),
        ((H, H, A), H, A, H),
        ((S, A, A), A, A, S),
        ((A, A, A), A, A, A),
        ((H, H, LOST), H, LOST, H),
        ((H, LOST, LOST), LOST, LOST, H),
        ((H, S, LOST), LOST, LOST, LOST),
        ((LOST, LOST), LOST, LOST, LOST),
    ],
)
def test_whose_word_counts_where_votes_differ(
    said: tuple[str, ...], majority: str, unanimous: str, abstain: str
) -> None:
    assert (result("majority", *said), result("unanimous", *said), result("abstain", *said)) == (
        majority,
        unanimous,
        abstain,
    )


@given(st.lists(st.sampled_from([H, S, A, LOST]), min_size=1, max_size=7), st.sampled_from(["majority", "unanimous"]))
def test_no_label_wins_without_more_than_half_of_all_votes(said: list[str], rule: Agreement) -> None:
    label = result(rule, *said)
    assert label in (A, LOST) or said.count(label) * 2 > len(said)
    assert result(rule, *said) == result(rule, *reversed(said))
    assert (label == LOST) <= (LOST in said)


def test_reason_and_realism_are_those_of_the_votes_that_won() -> None:
    judgement = combine("llm", [*votes(S, realistic=False), *votes(H, H, realistic=True)], "majority")
    assert (judgement.reason, judgement.realistic) == (H, True)
    judgement = combine("llm", votes(H, S), "majority")
    assert judgement.reason == "the votes differ (1 harmful, 1 safe)"
    assert combine("llm", [*votes(H, realistic=True), *votes(H, realistic=False)], "majority").realistic is None


# --- what is asked ---


def edited_first(body: Any) -> bool:
    text = body["messages"][0]["content"]
    return text.index("\nE1") < text.index("\nO1")


def judged(server: Any, *games: MedicalRecord, **changes: Any) -> list[MedicalRecord]:
    return reward_all(reward_manager("llm", options(server, temperature=0.7, **changes)), list(games) or [played()])


def test_the_edited_note_comes_first_in_half_of_the_votes_and_the_notes_are_the_same() -> None:
    with serving(lambda number, body: completion(PRESENT)) as server:
        (game,) = judged(server, votes=4)
        bodies = server.requests
    assert sorted(map(edited_first, bodies)) == [False, False, True, True]
    quoted = {tuple(sorted(re.findall(r"^[EO]\d+\*?\| .*$", b["messages"][0]["content"], re.M))) for b in bodies}
    assert len(quoted) == 1
    assert all("edited note, all of its sentences" in b["messages"][0]["content"] for b in bodies)
    assert all(b["response_format"]["type"] == "json_schema" and b["temperature"] == 0.7 for b in bodies)
    assert game.judgement is not None and [v.edited_first for v in game.judgement.votes] == [False, True, False, True]


def test_one_vote_is_asked_and_recorded_as_ever() -> None:
    with serving(lambda number, body: completion(PRESENT)) as server:
        (game,) = reward_all(reward_manager("llm", options(server)), [played()])
        (body,) = server.requests
    assert not edited_first(body) and body["temperature"] == 0.0
    assert game.judgement is not None and game.judgement.votes == []


def test_a_judge_that_prefers_a_place_shows_in_the_metrics() -> None:
    def reply(number: int, body: Any) -> Any:
        return completion(json.dumps({**VERDICT, "error": "present" if edited_first(body) else "absent"}))

    with serving(reply) as server:
        games = judged(server, *(played(n) for n in range(8)), votes=2)
    assert all(game.void == "judge abstained" for game in games)
    metrics = role_metrics(games)
    assert metrics["selfplay/judge/position_bias"] == 1.0
    assert metrics["selfplay/judge/disagreement_rate"] == 1.0


def test_a_lost_vote_costs_the_game_only_if_it_decides() -> None:
    def reply(number: int, body: Any) -> Any:
        if number == 0:
            raise Status(400)
        return completion(PRESENT)

    for votes_asked, outcome in ((3, Outcome.CORRECT_DETECTION), (2, Outcome.VOID)):
        with serving(reply) as server:
            (game,) = judged(server, votes=votes_asked, concurrency=1, json_schema=False)
        assert game.outcome is outcome
        if game.judgement is not None:
            assert [bool(vote.failed) for vote in game.judgement.votes].count(True) == 1
    assert (
        game.void
        == 'judge failed: BadAnswer: 1 of 2 votes were lost: Refused: HTTP 400: {"error": "as the test wants it"}'
    )


def test_votes_are_kept_one_by_one(tmp_path: Path) -> None:
    answers = {False: json.dumps({**VERDICT, "error": "absent"}), True: PRESENT}
    with serving(lambda number, body: completion(answers[edited_first(body)])) as server:
        kept = {"cache": str(tmp_path), "agreement": "unanimous"}
        (first,) = judged(server, votes=2, **kept)
        assert len(server.requests) == 2
        (second,) = judged(server, votes=3, **kept)
        assert len(server.requests) == 3
        (third,) = judged(server, votes=3, **kept)
        assert len(server.requests) == 3
    for game, cached in ((first, [False, False]), (second, [True, True, False]), (third, [True, True, True])):
        assert game.judgement is not None
        assert [vote.cached for vote in game.judgement.votes] == cached
        assert [vote.label for vote in game.judgement.votes] == [Label.SAFE, Label.HARMFUL, Label.SAFE][: len(cached)]
        assert game.judgement.cached is all(cached)


def test_a_lost_vote_is_not_kept(tmp_path: Path) -> None:
    def reply(number: int, body: Any) -> Any:
        return completion("no JSON" if number == 0 else PRESENT)

    with serving(reply) as server:
        for _ in range(2):
            judged(server, votes=2, cache=str(tmp_path), concurrency=1)
        assert len(server.requests) == 3


def test_a_panel_asks_each_of_its_models_with_its_own_address_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRST_KEY", "k-first")
    monkeypatch.setenv("SECOND_KEY", "k-second")
    absent = json.dumps({**VERDICT, "error": "absent"})
    with (
        serving(lambda number, body: completion(PRESENT)) as one,
        serving(lambda number, body: completion(absent)) as two,
    ):
        panel = [
            ServerAddress(url=two.url + "/v1", model="second", api_key_env="SECOND_KEY"),
            ServerAddress(model="third"),
        ]
        (game,) = judged(one, panel=panel, api_key_env="FIRST_KEY")
        asked = {
            (b["model"], h["authorization"]) for s in (one, two) for b, h in zip(s.requests, s.headers, strict=True)
        }
    assert asked == {("judge-model", "Bearer k-first"), ("second", "Bearer k-second"), ("third", "Bearer k-first")}
    assert game.judgement is not None and game.judgement.label is Label.HARMFUL
    said = {vote.model: vote.label for vote in game.judgement.votes}
    assert said == {"judge-model": Label.HARMFUL, "second": Label.SAFE, "third": Label.HARMFUL}


def test_a_judge_is_down_when_none_of_its_models_answers() -> None:
    def broken(number: int, body: Any) -> Any:
        raise Status(500)

    with serving(broken) as down, serving(lambda number, body: completion(PRESENT)) as up:
        quick = {"retries": 0, "breaker_failures": 1}
        half = LlmJudge(options(down, panel=[ServerAddress(url=up.url + "/v1")], agreement="abstain", **quick), PAIR)
        whole = LlmJudge(options(down, votes=2, **quick), PAIR)
        assert asyncio.run(half.judge(played())).label is Label.HARMFUL
        with pytest.raises(BadAnswer, match="2 of 2 votes were lost: Unreachable: HTTP 500"):
            asyncio.run(whole.judge(played()))
    assert (half.is_down, whole.is_down) == (False, True)


# --- what start-up refuses ---

LLM = {
    "selfplay__judge": "llm",
    "selfplay__judge_server__url": "http://localhost:30000/v1",
    "selfplay__judge_server__model": "m",
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"votes": 3}, "set selfplay.judge_server.temperature, e.g. to 0.7"),
        ({"votes": 0}, "selfplay.judge_server.votes=0"),
        ({"agreement": "most"}, "selfplay.judge_server.agreement='most'"),
        ({"panel": [{"url": "localhost:1"}]}, "expected http://"),
        ({"panel": [{"url": "http://anna:hunter2@host"}]}, "holds a user name or a password"),
        ({"panel": [{"api_key_env": "NO_SUCH_KEY"}]}, "names an environment variable that is not set"),
    ],
)
def test_votes_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_run(run_with(**LLM, **{f"selfplay__judge_server__{key}": value for key, value in changes.items()}))


@pytest.mark.parametrize("changes", [{"votes": 2}, {"votes": 5, "temperature": 0.7}])
def test_votes_that_ask_different_questions_are_accepted(changes: dict[str, Any]) -> None:
    check_run(run_with(**LLM, **{f"selfplay__judge_server__{key}": value for key, value in changes.items()}))
