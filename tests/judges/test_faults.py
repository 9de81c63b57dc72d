"""A judge's server that is slow, breaks, comes back or is gone: no game is lost, no result invented."""

import threading
import time
from collections import Counter
from typing import Any

import pytest
from judges.games import played, reward_all, reward_manager
from judges.local_server import Status, by_index, serving, unused_url

from medserl_agentloop.games.medical.config import JudgeServer
from medserl_agentloop.games.medical.records import MedicalRecord, Outcome
from medserl_agentloop.testing.tiny import compose_run


def outcomes(games: list[MedicalRecord]) -> dict[Outcome, int]:
    return dict(Counter(game.outcome for game in games))


def raising(status: int, times: int = 10**6) -> Any:
    """Fails the first requests and answers the others."""

    def reply(number: int, body: Any) -> Any:
        if number < times:
            raise Status(status)
        return by_index(body)

    return reply


@pytest.mark.parametrize(
    ("status", "times", "requests", "void"),
    [
        (500, 1, 2, None),  # it recovers
        (500, 99, 2, "judge failed: Unreachable: HTTP 500 (2 tries)"),
        (404, 99, 1, "judge failed: Refused: HTTP 404: "),
    ],
)
def test_a_server_that_recovers_costs_no_game_and_one_that_does_not_voids_them(
    status: int, times: int, requests: int, void: str | None
) -> None:
    with serving(raising(status, times)) as server:
        games = reward_all(reward_manager("http", server.options(retries=1)), [played(n) for n in range(4)])
        assert len(server.requests) == requests
    assert outcomes(games) == {Outcome.VOID if void else Outcome.CORRECT_DETECTION: 4}
    assert all((game.void or "").startswith(void or "") for game in games)


def test_a_server_that_reads_one_note_after_another_is_asked_for_few_at_once_or_the_keys_are_named() -> None:
    reading = threading.Lock()

    def reply(number: int, body: Any) -> Any:
        with reading:
            time.sleep(0.2 * len(body["queries"]))
        return by_index(body)

    script = compose_run("+recipes=openrlhf_script").selfplay.judge_server
    assert script.batch_size == script.concurrency == 1 and script.timeout_s >= 300
    games = [played(n) for n in range(8)]
    with serving(reply) as server:
        at_once = reward_all(reward_manager("http", server.options(timeout_s=1.0)), games)
        one_by_one = server.options(timeout_s=1.0, batch_size=script.batch_size, concurrency=script.concurrency)
        time.sleep(1)  # until it has read those that nobody waits for
        assert outcomes(reward_all(reward_manager("http", one_by_one), games)) == {Outcome.CORRECT_DETECTION: 8}
    (reason,) = {game.void for game in at_once}
    assert reason and "no answer within 1 s: raise selfplay.judge_server.timeout_s; of a server that reads" in reason
    assert "by batch_size and concurrency" in reason


def test_a_judge_that_is_down_for_the_whole_run_voids_all_rewritten_notes_and_no_others() -> None:
    categories = ["adversarial_benign", "vanilla_harmful", "adversarial_harmful", "vanilla_benign"]
    games = [played(n, categories[n % 4]) for n in range(100)]
    server = JudgeServer(url=unused_url(), retries=0, batch_size=1, breaker_failures=3)
    manager = reward_manager("http", server)
    for judged in (reward_all(manager, games), reward_all(manager, games)):
        assert outcomes(judged) == {Outcome.VOID: 50, Outcome.CORRECT_DETECTION: 25, Outcome.FALSE_POSITIVE: 25}
        voided = [game for game in judged if game.outcome is Outcome.VOID]
        assert all(game.judgement is None and "judge failed: Unreachable: " in str(game.void) for game in voided)
    assert all("requests in a row and counts as down" in str(game.void) for game in voided)
