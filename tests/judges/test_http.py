"""The /judge protocol: what is asked and which answers count; servers that break or mean harm;
answers kept on disk.
"""

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import diskcache
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from game.builders import CLEAN_NOTE
from invoking import invoke
from judges.games import by_index, harmful, judged_by, judgement, played, reward_all, reward_manager
from judges.test_llm import PAIR
from note_files import SAMPLE
from serving import LocalServer, Status, completion
from support import extra_info

from medserl_agentloop.games.medical.case import Category, Label
from medserl_agentloop.games.medical.config import BlindGate, MedicalConfig
from medserl_agentloop.games.medical.judges.cache import AnswerCache
from medserl_agentloop.games.medical.judges.llm import BlindReader, LlmJudge
from medserl_agentloop.games.medical.records import Judgement, Outcome
from medserl_agentloop.medical_team.protocol import HttpJudge


def test_query_follows_the_protocol_and_shows_nothing_of_the_assessor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUDGE_TEST_KEY", "k-123")
    game = played(3)
    (judged, _), server = judged_by(
        "http", [game, played(verdict="safe")], api_key_env="JUDGE_TEST_KEY"
    )
    found = judged.judgement.model_dump(exclude={"seconds", "readings", "knowable", "error_type"})
    reason = "the dose is ten times too high"
    assert found == {
        "judge": "http",
        "label": Label.HARMFUL,
        "realistic": True,
        "reason": reason,
        "cached": False,
    }
    assert judged.judgement.seconds > 0
    (body,) = server.requests
    assert (server.paths, server.headers[0]["authorization"]) == (["/judge"], "Bearer k-123")
    assert body["score_key"] == "labels"
    notes = {"medical_note": game.presented_note, "original_note": game.spec.seed_note}
    about = {"game_idx": 0, "assessment": "Safe", "game_category": "adversarial_benign"}
    assert body["queries"][0] == notes | about
    assert {query["assessment"] for query in body["queries"]} == {
        "Safe"
    }  # whatever the assessor said


def test_games_of_a_moment_share_a_request_and_keep_their_own_answers() -> None:
    def label_by_note(query: dict[str, Any]) -> dict[str, Any]:
        present = "4 grams" in query["medical_note"]
        return harmful(error_present=present, actual_harm="Harmful" if present else "Safe")

    games = [played(n) for n in range(10)]
    options = {"batch_size": 4}
    judged, server = judged_by(
        "http", games, lambda number, body: by_index(body, label_by_note), **options
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
        (
            last_is(harmful(actual_harm="harmful")),
            "actual_harm Input should be 'Safe' or 'Harmful'",
        ),
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
    assert (
        games[3].void is not None
        and games[3].void.startswith("judge failed: ")
        and reason in games[3].void
    )


def test_an_abstention_is_told_apart_from_a_failure() -> None:
    answer = {"is_parsing_error": True, "abstained": True, "judge_reasoning": "no dose is given"}
    (game,), _ = judged_by("http", [played()], last_is(answer))
    assert game.void == "judge abstained"
    assert game.judgement is not None and game.judgement.reason == "no dose is given"


def test_judge_label_counts_for_changed_notes_and_data_for_untouched_ones() -> None:
    safe = harmful(error_present=False, actual_harm="Safe")
    games = [played(n, category) for n, category in enumerate(Category)] + [
        played(9, verdict="safe")
    ]
    judged, server = judged_by(
        "http", games, lambda number, body: by_index(body, lambda query: safe)
    )
    asked = Counter(query["game_category"] for body in server.requests for query in body["queries"])
    assert asked == {"adversarial_harmful": 1, "adversarial_benign": 2, "decoy_benign": 1}
    for game in judged:
        by_data = not game.category.has_attack
        assert game.judgement.judge == ("labels" if by_data else "http")
        assert game.judgement.label is (game.spec.target_label if by_data else Label.SAFE)
    outcomes = {game.outcome for game in judged if game.category is Category.ADVERSARIAL_BENIGN}
    assert outcomes == {Outcome.FALSE_POSITIVE, Outcome.CORRECT_REJECTION}


def test_a_cancelled_game_takes_nothing_from_the_others() -> None:
    async def cancel_one(judge: HttpJudge) -> list[Judgement | BaseException]:
        tasks = [asyncio.create_task(judgement(judge, played(n))) for n in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    with LocalServer(lambda number, body: by_index(body)) as server:
        first, cancelled, last = asyncio.run(
            cancel_one(HttpJudge(server.options(url=server.url + "/judge/")))
        )
        assert len(server.requests) == 1
    assert isinstance(cancelled, asyncio.CancelledError)
    assert isinstance(first, Judgement) and isinstance(last, Judgement)


# --- a server that is slow, breaks or is gone: no game is lost, no result invented ---


def test_a_judge_that_takes_too_long_is_told_with_the_keys_to_change() -> None:
    def reply(number: int, body: Any) -> Any:
        time.sleep(0.4)
        return by_index(body)

    (game,), _ = judged_by("http", [played()], reply, timeout_s=0.1)
    assert (
        "no answer within 0.1 s: raise selfplay.judge_server.timeout_s; of a server that reads"
        in str(game.void)
    )
    assert "by batch_size and concurrency" in str(game.void)


# --- answers on disk: given once per content, never in the way of a game ---


def test_second_judge_reuses_cached_answers_of_the_first_and_says_so(tmp_path: Path) -> None:
    with LocalServer(lambda number, body: by_index(body)) as server:
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


@pytest.mark.parametrize(
    "bad", [Status(400), harmful(is_parsing_error=True), harmful(error_present="yes")]
)
def test_a_failure_is_never_kept(tmp_path: Path, bad: Any) -> None:
    def reply(number: int, body: Any) -> Any:
        if number == 0 and isinstance(bad, Status):
            return bad
        return by_index(body, lambda query: bad if number == 0 else harmful())

    with LocalServer(reply) as server:
        manager = reward_manager("http", server.options(cache=str(tmp_path)))
        outcomes = [reward_all(manager, [played()])[0].outcome for _ in range(2)]
    assert outcomes == [Outcome.VOID, Outcome.CORRECT_DETECTION]


def test_lone_surrogate_in_a_reason_keeps_the_judgement_and_the_cache(tmp_path: Path) -> None:
    found = {"reason": "too \ud800 high", "error": "present"}

    def reply(number: int, body: Any) -> Any:
        blind = "finding" in str(body["response_format"])
        return completion(
            json.dumps({**found, **({"sentence": 1} if blind else {"realistic": True})})
        )

    with LocalServer(reply) as server:
        options = server.model_options(cache=str(tmp_path))
        config = MedicalConfig(judge="labels", judge_server=options, blind=BlindGate(readings=1))
        judge, reader = LlmJudge(options, PAIR), BlindReader(config)
        for cached in (False, True):
            said = asyncio.run(judgement(judge, played()))
            (reading,) = asyncio.run(reader.read(CLEAN_NOTE, []))
            assert (
                (said.reason, said.cached)
                == (reading.reason, reading.cached)
                == ("too ? high", cached)
            )


def recalled(folder: str | Path, about: str, reason: str = "") -> tuple[Judgement, bool]:
    """Ask for a judgement with this reason; return the cache's answer, and whether it had one."""

    async def ask() -> Judgement:
        return Judgement(judge="llm", label=Label.SAFE, reason=reason)

    return asyncio.run(AnswerCache(str(folder), Judgement).recall((about,), ask))


def test_a_cache_that_cannot_be_used_costs_no_game(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


# answers full of malice and addresses with a password: nothing spreads, nothing shows, whichever
# client asks


EVERY = set(range(16))


@pytest.mark.parametrize(
    ("status", "refused", "requests"),
    [(400, {5}, 9), (413, {0, 15}, 17), (422, EVERY, 31), (401, EVERY, 1), (404, EVERY, 1)],
)
def test_refused_note_costs_its_game_and_full_refusal_is_asked_once(
    status: int, refused: set[int], requests: int
) -> None:
    def reply(number: int, body: Any) -> Any:
        if any(
            str(1000 + n) in query["medical_note"] for query in body["queries"] for n in refused
        ):
            return Status(status)
        return by_index(body)

    judged, server = judged_by("http", [played(n) for n in range(16)], reply)
    assert len(server.requests) <= requests
    assert {n for n, game in enumerate(judged) if game.void} == refused


COMMANDS = [
    "play {url} --model m --data {rows} --games 1",
    "probe {url} --model m --data {rows} --notes 2 --output {rows}.jsonl",
    "evaluate {url} --model m --notes {notes} --output {rows}.answers",
    "evaluate {url} --notes {notes} --output {rows}.answers",  # as a folder
    "tournament m@{url} --data {rows} --games 2 --output {rows}.games",
]


ADDRESSES = [
    "http://{}@127.0.0.1:9",
    "{}@127.0.0.1:9",
    "ftp://{}@127.0.0.1",
    "http://{}/@127.0.0.1",
    "http://{}@[::1:9",
]


@pytest.mark.parametrize(
    ("command", "url"),
    [
        *((command, ADDRESSES[0]) for command in COMMANDS),
        *((COMMANDS[0], u) for u in ADDRESSES[1:]),
    ],
)
def test_no_command_prints_the_password_of_an_address_that_cannot_be_used(
    command: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = pa.Table.from_pylist([{"extra_info": extra_info("adversarial_benign")}] * 2)
    pq.write_table(rows, tmp_path / "rows.parquet")
    places = {"url": url.format("anna:hunter2"), "rows": tmp_path / "rows.parquet", "notes": SAMPLE}
    result = invoke(*command.format(**places).split())
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    assert "hunter2" not in result.output
