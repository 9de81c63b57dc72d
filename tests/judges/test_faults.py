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


def outcomes(games: list[MedicalRecord]) -> dict[Outcome, int]:
    return dict(Counter(game.outcome for game in games))


def broken(reply: Any) -> Any:
    """Answers properly once ``reply`` returns."""

    def answer(number: int, body: Any) -> Any:
        reply(number)
        return by_index(body)

    return answer


def raising(error: Exception, times: int = 10**6) -> Any:
    def fail(number: int) -> None:
        if number < times:
            raise error

    return broken(fail)


def test_a_server_that_recovers_costs_no_game() -> None:
    with serving(raising(Status(500), times=1)) as server:
        games = reward_all(reward_manager("http", server.options(retries=1)), [played(n) for n in range(4)])
        assert len(server.requests) == 2
    assert outcomes(games) == {Outcome.CORRECT_DETECTION: 4}


@pytest.mark.parametrize(
    ("error", "reason", "requests"),
    [(Status(500), "Unreachable: HTTP 500 (2 tries)", 2), (Status(404), "Refused: HTTP 404: ", 1)],
)
def test_a_server_that_stays_broken_or_refuses_voids_its_games(error: Exception, reason: str, requests: int) -> None:
    with serving(raising(error)) as server:
        games = reward_all(reward_manager("http", server.options(retries=1)), [played(n) for n in range(4)])
        assert len(server.requests) == requests
    assert outcomes(games) == {Outcome.VOID: 4}
    assert all(g.void and g.void.startswith(f"judge failed: {reason}") for g in games)


def test_a_slow_answer_counts_as_none_and_the_next_try_may_do() -> None:
    release = threading.Event()
    with serving(broken(lambda number: number == 0 and release.wait(30))) as server:
        games = reward_all(
            reward_manager("http", server.options(timeout_s=1.0, retries=1)), [played(n) for n in range(3)]
        )
        release.set()
        assert len(server.requests) == 2
    assert outcomes(games) == {Outcome.CORRECT_DETECTION: 3}


def test_a_judge_that_is_down_for_the_whole_run_voids_all_rewritten_notes_and_no_others() -> None:
    categories = ["adversarial_benign", "vanilla_harmful", "adversarial_harmful", "vanilla_benign"]
    games = [played(n, categories[n % 4]) for n in range(100)]
    server = JudgeServer(url=unused_url(), retries=0, batch_size=1, breaker_failures=3)
    manager = reward_manager("http", server)
    first, second = reward_all(manager, games), reward_all(manager, games)
    for judged in (first, second):
        assert outcomes(judged) == {Outcome.VOID: 50, Outcome.CORRECT_DETECTION: 25, Outcome.FALSE_POSITIVE: 25}
        assert all(g.judgement is None for g in judged if g.outcome is Outcome.VOID)
    reasons = Counter(g.void.split(":")[1].strip() for g in second if g.void)
    assert reasons == {"Unreachable": 50}


def test_an_open_circuit_asks_nothing_until_a_trial_and_one_success_closes_it() -> None:
    with serving(raising(Status(500), times=3)) as server:
        manager = reward_manager(
            "http", server.options(retries=0, batch_size=1, breaker_failures=2, breaker_seconds=1.0, concurrency=1)
        )
        reward_all(manager, [played(n) for n in range(10)])
        assert len(server.requests) == 2  # the other eight were not made
        time.sleep(1.05)
        reward_all(manager, [played(n) for n in range(10)])
        assert len(server.requests) == 3  # the trial, which fails
        time.sleep(1.05)
        (trial,) = reward_all(manager, [played()])
        assert trial.outcome is Outcome.CORRECT_DETECTION
        games = reward_all(manager, [played(n) for n in range(10)])
    assert outcomes(games) == {Outcome.CORRECT_DETECTION: 10}
