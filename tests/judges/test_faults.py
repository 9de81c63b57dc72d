"""A judge's server that is slow, breaks, comes back or is gone: no game is lost, no result invented."""

import asyncio
import socket
import threading
import time
from collections import Counter
from typing import Any

import pytest
from judges.games import played, reward_all, reward_manager
from judges.local_server import Reset, Status, by_index, serving, unused_url

from medserl_agentloop.core.client import BadAnswer, CircuitBreaker, CircuitOpen, HttpClient, Refused, Unreachable
from medserl_agentloop.games.medical.judges import JudgeServer
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


@pytest.mark.parametrize("error", [Status(500), Status(503), Status(429), Reset()])
def test_a_server_that_recovers_costs_no_game(error: Exception) -> None:
    with serving(raising(error, times=2)) as server:
        games = reward_all(reward_manager("http", server.options(retries=2)), [played(n) for n in range(4)])
        assert len(server.requests) == 3
        assert server.requests[0] == server.requests[2]
    assert outcomes(games) == {Outcome.CORRECT_DETECTION: 4}


@pytest.mark.parametrize(
    ("error", "reason"),
    [(Status(500), "HTTP 500 (3 tries)"), (Status(429), "HTTP 429 (3 tries)"), (Reset(), "(3 tries)")],
)
def test_a_server_that_stays_broken_voids_its_games_after_all_tries(error: Exception, reason: str) -> None:
    with serving(raising(error)) as server:
        games = reward_all(reward_manager("http", server.options(retries=2)), [played(n) for n in range(4)])
        assert len(server.requests) == 3
    assert outcomes(games) == {Outcome.VOID: 4}
    assert all(g.void and g.void.startswith("judge failed: Unreachable: ") and reason in g.void for g in games)


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refused_request_is_not_made_again(status: int) -> None:
    with serving(raising(Status(status))) as server:
        (game,) = reward_all(reward_manager("http", server.options()), [played()])
        assert len(server.requests) == 1
    assert game.void is not None and f"HTTP {status}" in game.void


def test_a_slow_answer_counts_as_none_and_the_next_try_may_do() -> None:
    release = threading.Event()
    with serving(broken(lambda number: number == 0 and release.wait(30))) as server:
        games = reward_all(reward_manager("http", server.options(timeout_s=1.0)), [played(n) for n in range(3)])
        release.set()
        assert len(server.requests) == 2
    assert outcomes(games) == {Outcome.CORRECT_DETECTION: 3}


def test_a_server_that_never_answers_voids_its_games_in_time() -> None:
    release = threading.Event()
    with serving(broken(lambda number: release.wait(60))) as server:
        started = time.monotonic()
        games = reward_all(
            reward_manager("http", server.options(timeout_s=0.1, retries=1)), [played(n) for n in range(3)]
        )
        took = time.monotonic() - started
        release.set()
    assert took < 30
    assert outcomes(games) == {Outcome.VOID: 3}
    assert all(g.void and "no answer within 0.1 s (2 tries)" in g.void for g in games)


def test_a_judge_that_is_down_for_the_whole_run_voids_all_rewritten_notes_and_no_others() -> None:
    categories = ["adversarial_benign", "vanilla_harmful", "adversarial_harmful", "vanilla_benign"]
    games = [played(n, categories[n % 4]) for n in range(100)]
    server = JudgeServer(url=unused_url(), retries=1, backoff_s=0.01, batch_size=1, breaker_failures=3)
    manager = reward_manager("http", server)
    first, second = reward_all(manager, games), reward_all(manager, games)
    for judged in (first, second):
        assert outcomes(judged) == {Outcome.VOID: 50, Outcome.CORRECT_DETECTION: 25, Outcome.FALSE_POSITIVE: 25}
        assert all(g.judgement is None for g in judged if g.outcome is Outcome.VOID)
    reasons = Counter(g.void.split(":")[1].strip() for g in second if g.void)
    assert reasons == {"CircuitOpen": 50}


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


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def request(breaker: CircuitBreaker, end: BaseException | None = None) -> bool:
    """A request that ends with ``end``; whether it was a trial."""
    trial = False
    try:
        with breaker.request("http://host") as trial:
            if end is not None:
                raise end
    except (Unreachable, asyncio.CancelledError):
        pass
    return trial


def test_only_failures_in_a_row_open_the_circuit() -> None:
    breaker = CircuitBreaker(2, 10.0)
    for _ in range(5):
        request(breaker, Unreachable("gone"))
        request(breaker)
    assert not breaker.is_open and request(breaker) is False


def test_one_trial_at_a_time_and_a_cancelled_one_makes_room_for_the_next() -> None:
    clock = Clock()
    breaker = CircuitBreaker(1, 10.0, clock)
    before = breaker.request("http://host")
    before.__enter__()
    request(breaker, Unreachable("gone"))
    with pytest.raises(CircuitOpen):
        request(breaker)
    clock.now = 10.0
    with pytest.raises(asyncio.CancelledError), breaker.request("http://host") as trial:
        assert trial is True
        # A request of before, whose end says nothing about the trial.
        before.__exit__(Unreachable, Unreachable("gone"), None)
        with pytest.raises(CircuitOpen):
            request(breaker)
        raise asyncio.CancelledError
    assert request(breaker, Unreachable("gone")) is True
    clock.now = 19.0
    with pytest.raises(CircuitOpen):
        request(breaker)


def test_a_cancelled_trial_does_not_keep_the_circuit_open_for_ever() -> None:
    release = threading.Event()

    async def cancel_the_trial(client: HttpClient) -> Any:
        with pytest.raises(Unreachable):
            await client.post("/judge", {})
        trial = asyncio.create_task(client.post("/judge", {}))
        while len(server.requests) < 2:
            await asyncio.sleep(0.01)
        trial.cancel()
        await asyncio.gather(trial, return_exceptions=True)
        release.set()
        return await client.post("/judge", {})

    def reply(number: int, body: Any) -> Any:
        if number == 0:
            raise Status(500)
        release.wait(5)
        return {"number": number}

    with serving(reply) as server:
        client = server.options(retries=0, breaker_failures=1, breaker_seconds=0).client("/judge")
        assert asyncio.run(cancel_the_trial(client)) == {"number": 2}


def test_an_answer_that_drips_in_is_cut_off_in_time() -> None:
    """httpx's own time-out starts anew with every byte."""
    listener = socket.create_server(("127.0.0.1", 0))

    def drip() -> None:
        connection, _ = listener.accept()
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        try:
            while True:
                connection.sendall(b"x")
                time.sleep(0.02)
        except OSError:
            connection.close()

    threading.Thread(target=drip, daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    client = JudgeServer(url=url, timeout_s=0.2, retries=0).client("/judge")
    with pytest.raises(Unreachable, match="no answer within"):
        asyncio.run(client.post("/judge", {}))
    listener.close()


def test_what_a_refusal_or_a_bad_answer_says_is_told() -> None:
    with serving(lambda number, body: b"<html>" if number else raising(Status(404))(0, body)) as server:
        client = server.options().client("/judge")
        with pytest.raises(Refused, match=r"HTTP 404: .*as the test wants it"):
            asyncio.run(client.post("/judge", {"queries": []}))
        with pytest.raises(BadAnswer, match="not JSON: '<html>'"):
            asyncio.run(client.post("/judge", {"queries": []}))
