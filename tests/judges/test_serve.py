"""``medserl judge serve``: the /judge protocol over a real socket, for our clients and the
original's.
"""

import json
import re
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from invoking import invoke
from judges.games import harmful, played, reward_all, reward_manager
from judges.test_llm import PAIR, PRESENT
from serving import LocalServer, Status, completion, serving

from medserl_agentloop.games.medical.case import Category, GameSpec, Label
from medserl_agentloop.games.medical.config import JudgeServer
from medserl_agentloop.games.medical.judges import LabelJudge
from medserl_agentloop.games.medical.judges.llm import LlmJudge
from medserl_agentloop.games.medical.records import Judgement
from medserl_agentloop.medical_team.protocol import MAX_BYTES, create_app

QUERY = {
    "game_idx": 7,
    "medical_note": "He takes 9 g.",
    "assessment": "Safe",
    "game_category": "adversarial_benign",
}
TYPES = {name: type(value) for name, value in harmful().items()}
"""The answer about one game, as the original server declares it: nothing is left out, nothing is
null.
"""


def ask(url: str, *queries: dict[str, Any], timeout: float = 5.0) -> dict[int, Any]:
    """Ask as the original client does (its remote_judge.py), whose keys are game numbers."""
    answer = httpx.post(
        f"{url}/judge", json={"queries": queries, "score_key": "labels"}, timeout=timeout
    )
    answer.raise_for_status()
    return {int(index): labels for index, labels in answer.json().items()}


@contextmanager
def command(before: str = "") -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The command itself in a process of its own, on a free port; code that runs ``before`` may
    change limits.
    """
    code = f"{before}\nfrom medserl_agentloop.cli import app; app()"
    words = [sys.executable, "-c", code, "judge", "serve", "--backend", "labels", "--port", "0"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    for line in process.stderr:
        if found := re.search(r"running on (http://\S+)", line):
            threading.Thread(
                target=process.stderr.read, daemon=True
            ).start()  # or its log fills the pipe
            break
    else:
        pytest.fail("the server did not start")
    yield found.group(1), process
    process.terminate()
    process.wait(30)


@pytest.fixture(scope="module")
def labels_command() -> Iterator[str]:
    with command() as (url, _):
        yield url


def test_games_through_the_command_get_what_the_labels_judge_gives(labels_command: str) -> None:
    categories = list(Category)
    games = [
        played(n, categories[n % 5], verdict="safe" if n % 3 else "harmful") for n in range(50)
    ]
    server = JudgeServer(url=labels_command)
    by_http, by_labels = (
        reward_all(reward_manager(judge, server), games) for judge in ("http", "labels")
    )
    assert [(g.outcome, g.rewards) for g in by_http] == [(g.outcome, g.rewards) for g in by_labels]
    assert Counter(g.judgement.judge for g in by_http if g.judgement) == {"http": 30, "labels": 20}
    assert {g.judgement.realistic for g in by_http if g.judgement} == {None}


@pytest.mark.parametrize(
    ("assessment", "detected"),
    [
        ("Harmful", True),
        ("safe\n", False),
        ("maybe", False),
        ("<answer>\nverdict: harmful\n</answer>", True),
    ],
)
def test_assessor_verdict_is_read_from_its_words(
    labels_command: str, assessment: str, detected: bool
) -> None:
    expected = harmful(error_detected=detected, assessor_correct=detected, judge_reasoning="")
    more = {"abstained": False, "realism_judged": False}
    assert ask(labels_command, {**QUERY, "assessment": assessment})[7] == expected | more


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"game_category": "nonesuch"}, "nonesuch"),
        ({"game_category": None}, "names no game_category"),  # for labels it is no question
        ({"medical_note": "x " * 60_000}, "longer than 100000 characters"),
    ],
)
def test_a_query_without_an_answer_costs_its_game_alone(
    labels_command: str, change: dict[str, Any], reason: str
) -> None:
    answers = ask(labels_command, QUERY, {**QUERY, "game_idx": 8, **change})
    assert (answers[7]["error_present"], answers[8]["error_present"]) == (True, False)
    assert answers[8]["is_parsing_error"] is True and reason in answers[8]["judge_reasoning"]


class Says:
    """A judge that always says the same, or fails."""

    def __init__(self, name: str, said: Judgement | None) -> None:
        self.name, self.said = name, said

    async def judge(self, presented: str, original: str, spec: GameSpec) -> Judgement:
        if self.said is None:
            raise RuntimeError("out of order")
        return self.said


BACKENDS = (
    LabelJudge(),
    Says(
        "sceptic", Judgement(judge="sceptic", label=Label.HARMFUL, realistic=False, reason="absurd")
    ),
    Says("abstainer", Judgement(judge="abstainer", label=None, reason="no dose is given")),
    Says("broken", None),
)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("assessment", ["Harmful", ""])
def test_the_original_client_reads_every_answer(backend: Any, assessment: str) -> None:
    with serving(create_app(backend)) as url:
        labels = ask(url, {**QUERY, "original_note": "He takes 1 g.", "assessment": assessment})[7]
    failed = backend.name in ("abstainer", "broken")
    assert {name: type(labels[name]) for name in TYPES} == TYPES
    assert labels["is_parsing_error"] is failed is not labels["error_present"]
    assert labels["error_realistic"] is (backend.name != "sceptic")
    assert (
        labels["error_detected"]
        is labels["assessor_correct"]
        is (assessment == "Harmful" and not failed)
    )


def test_language_model_reads_changed_notes_of_any_category_and_no_others() -> None:
    def reply(number: int, body: Any) -> Any:
        text = body["messages"][0]["content"]
        if "BROKEN" in text:
            return completion("no JSON")
        return completion(PRESENT.replace("present", "abstain") if "UNCLEAR" in text else PRESENT)

    queries = [
        {**QUERY, "game_idx": 0, "original_note": "He takes 1 g."},
        {**QUERY, "game_idx": 1, "medical_note": "BROKEN"},
        {**QUERY, "game_idx": 2, "medical_note": "UNCLEAR"},
        {
            **QUERY,
            "game_idx": 3,
            "game_category": "vanilla_benign",
        },  # the original's default, also of changed notes
        {
            **QUERY,
            "game_idx": 4,
            "original_note": "He takes 1 g.",
            "game_category": "vanilla_benign",
        },
    ]
    with (
        LocalServer(reply) as model,
        serving(create_app(LlmJudge(model.model_options(), PAIR))) as url,
    ):
        answers = ask(url, *queries)
    assert len(model.requests) == 4  # an untouched note is decided by its label
    assert any(
        "O1*| He takes 1 g." in str(body) and "E1*| He takes 9 g." in str(body)
        for body in model.requests
    )
    assert (answers[0]["error_present"], answers[0]["judge_reasoning"]) == (
        True,
        "the dose is too high",
    )
    assert [(answers[n]["is_parsing_error"], answers[n]["abstained"]) for n in (1, 2)] == [
        (True, False),
        (True, True),
    ]
    assert [answers[n]["error_present"] for n in (3, 4)] == [False, True]


def test_health_tells_that_the_model_is_down() -> None:
    with LocalServer(lambda number, body: Status(500)) as model:
        backend = LlmJudge(model.model_options(), PAIR)
        with serving(create_app(backend)) as url:
            assert httpx.get(f"{url}/health").status_code == 200
            for _ in range(5):
                assert ask(url, QUERY)[7]["is_parsing_error"]
            assert httpx.get(f"{url}/health").status_code == 503


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ('{"queries": NaN}', 422),
        ('{"queries": "\\ud800"}', 422),
        ('{"queries": ' + "[" * 100_000, 400),
        (b"\xff\xfe", 422),
        (json.dumps({"queries": [QUERY, QUERY]}), 422),  # two games of one index
        (json.dumps({"queries": [{**QUERY, "medical_note": "x" * MAX_BYTES}]}), 413),
        (iter([b"{}"]), 411),  # without a length
    ],
)
def test_a_request_that_cannot_be_read_is_refused(
    labels_command: str, body: Any, status: int
) -> None:
    answer = httpx.post(
        f"{labels_command}/judge", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == status and answer.json()["detail"]


def test_with_a_token_only_those_who_have_it_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TEST_KEY", "t0ken")
    with serving(create_app(LabelJudge(), token="t0ken")) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        for wrong in (b"", b"Bearer token", b"Basic t0ken", b"\xe9"):
            refused = httpx.post(
                f"{url}/judge", json={"queries": []}, headers={"authorization": wrong}
            )
            assert refused.status_code == 401
        assert ask(url.replace("//", "//anyone:t0ken@")) == {}
        server = JudgeServer(url=url, api_key_env="JUDGE_TEST_KEY")
        (game,) = reward_all(reward_manager("http", server), [played()])
    assert game.judgement and game.judgement.judge == "http"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("labels --host 0.0.0.0", "--host 0.0.0.0 lets other machines in"),
        (
            "labels --host judge.example",
            "name an environment variable that holds a key in --token-env",
        ),
        ("labels --port 70000", "Invalid value for '--port'"),
        (
            "labels --token-env sk-SECRET",
            "--token-env names an environment variable that is not set",
        ),
        ("llm --url http://localhost/v1", "needs --url and --model"),
        (
            "llm --url http://localhost/v1 --model m --set votes=3",
            "votes is not a key of this node",
        ),
        ("llm --url http://anna:SECRET/@host --model m", "expected http://host:port"),
    ],
)
def test_a_server_that_cannot_work_or_lets_anybody_in_is_refused(words: str, message: str) -> None:
    result = invoke("judge", "serve", "--backend", *words.split())
    assert result.exit_code == 2 and message in result.output and "SECRET" not in result.output


LIMITS = """
import resource
from medserl_agentloop.medical_team import protocol
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
protocol.REQUEST_S = 1.0
"""
HALF = (b"", b"POST /ju", b"POST /judge HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")


@pytest.mark.slow
def test_half_open_requests_block_neither_others_nor_the_server_stopping() -> None:
    with command(LIMITS) as (url, process), ExitStack() as open_sockets:
        parts = httpx.URL(url)
        for number in range(400):
            peer = open_sockets.enter_context(socket.create_connection((parts.host, parts.port)))
            peer.sendall(HALF[number % 3])
        assert ask(url, QUERY, timeout=20)[7]["error_present"] is True
        process.terminate()
        process.wait(30)
