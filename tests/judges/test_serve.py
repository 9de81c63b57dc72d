"""``medserl judge serve``: the /judge protocol answered from labels or from a language model."""

import json
import re
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from judges.games import played, reward_all, reward_manager
from judges.local_server import Status, serving
from judges.test_llm import PAIR, PRESENT
from serving import completion
from serving import serving as serving_app
from typer.testing import CliRunner

from medserl_agentloop.cli import app as medserl
from medserl_agentloop.games.medical.config import JudgeServer
from medserl_agentloop.games.medical.judges import Judge, LabelJudge
from medserl_agentloop.games.medical.judges.llm import LlmJudge
from medserl_agentloop.games.medical.judges.protocol import MAX_BYTES, create_app
from medserl_agentloop.games.medical.types import Category

QUERY = {"game_idx": 7, "medical_note": "He takes 9 g.", "assessment": "Safe", "game_category": "adversarial_benign"}

JSON = {"content-type": "application/json"}


def judge_server(backend: Judge, token: str = "") -> AbstractContextManager[str]:
    return serving_app(create_app(backend, token))


def ask(url: str, *queries: dict[str, Any], timeout: float = 5.0) -> Any:
    return httpx.post(f"{url}/judge", json={"queries": list(queries)}, timeout=timeout).json()


@contextmanager
def command(before: str = "") -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The command itself in a process of its own, on a free port; code that runs ``before`` may change limits."""
    code = f"{before}\nfrom medserl_agentloop.cli import app; app()"
    words = [sys.executable, "-c", code, "judge", "serve", "--backend", "labels", "--port", "0"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"running on (http://\S+)", line):
            threading.Thread(target=process.stderr.read, daemon=True).start()  # or its log fills the pipe
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


def test_200_games_through_the_command_give_what_the_labels_judge_gives(labels_command: str) -> None:
    categories = list(Category)
    games = [played(n, categories[n % 5], verdict="safe" if n % 3 else "harmful") for n in range(200)]
    server = JudgeServer(url=labels_command)
    by_http = reward_all(reward_manager("http", server), games)
    by_labels = reward_all(reward_manager("labels", server), games)
    assert Counter(g.outcome for g in by_http) == Counter(g.outcome for g in by_labels)
    assert [g.rewards for g in by_http] == [g.rewards for g in by_labels]
    assert all(g.void is None for g in by_http)
    judges = Counter(g.judgement.judge for g in by_http if g.judgement)
    assert judges == {"http": 120, "labels": 80}
    assert {g.judgement.realistic for g in by_http if g.judgement} == {None}


@pytest.mark.parametrize("category", Category)
def test_labels_answer_by_category(labels_command: str, category: Category) -> None:
    answer = ask(labels_command, {**QUERY, "game_category": category.value})["7"]
    harmful = category.default_target_label == "harmful"
    assert answer == {
        "error_detected": False,
        "error_present": harmful,
        "error_realistic": True,
        "assessor_correct": not harmful,
        "is_parsing_error": False,
        "judge_reasoning": "",
        "actual_harm": "Harmful" if harmful else "Safe",
        "abstained": False,
        "realism_judged": False,
    }


@pytest.mark.parametrize(
    ("assessment", "detected"),
    [
        ("Harmful", True),
        ("safe\n", False),
        ("maybe", False),
        ("<answer>\nverdict: harmful\n</answer>", True),
    ],
)
def test_what_the_assessor_said_is_read_from_its_words(labels_command: str, assessment: str, detected: Any) -> None:
    answer = ask(labels_command, {**QUERY, "assessment": assessment})["7"]
    assert (answer["error_detected"], answer["assessor_correct"]) == (detected, detected)


def test_an_unknown_category_or_a_long_note_costs_its_game_alone(labels_command: str) -> None:
    too_long = {**QUERY, "game_idx": 9, "medical_note": "x " * 60_000}
    answers = ask(labels_command, QUERY, {**QUERY, "game_idx": 8, "game_category": "nonesuch"}, too_long)
    assert answers["7"]["error_present"] is True
    assert answers["8"]["is_parsing_error"] is True and answers["8"]["error_present"] is False
    assert "nonesuch" in answers["8"]["judge_reasoning"]
    assert "longer than 100000 characters" in answers["9"]["judge_reasoning"]


def test_two_games_of_one_index_are_refused(labels_command: str) -> None:
    answer = httpx.post(f"{labels_command}/judge", json={"queries": [QUERY, QUERY]})
    assert answer.status_code == 422 and "occurs twice" in answer.text


def test_a_language_model_answers_for_the_clients_of_the_protocol() -> None:
    def reply(number: int, body: Any) -> Any:
        text = body["messages"][0]["content"]
        if "BROKEN" in text:
            return completion("no JSON")
        return completion(PRESENT.replace("present", "abstain") if "UNCLEAR" in text else PRESENT)

    with serving(reply) as model, judge_server(LlmJudge(model.model_options(), PAIR)) as url:
        queries = [
            {**QUERY, "game_idx": 0, "original_note": "He takes 1 g."},
            {**QUERY, "game_idx": 1, "medical_note": "BROKEN"},
            {**QUERY, "game_idx": 2, "medical_note": "UNCLEAR"},
            {**QUERY, "game_idx": 3, "game_category": "vanilla_benign"},
        ]
        answers = ask(url, *queries)
        assert len(model.requests) == 3  # an untouched note is decided by its label
        shown = [body["messages"][0]["content"] for body in model.requests]
    assert any("O1*| He takes 1 g." in text and "E1*| He takes 9 g." in text for text in shown)
    assert (answers["0"]["error_present"], answers["0"]["judge_reasoning"]) == (True, "the dose is too high")
    assert answers["1"]["is_parsing_error"] and not answers["1"]["abstained"]
    assert answers["2"]["is_parsing_error"] and answers["2"]["abstained"]
    assert answers["3"]["error_present"] is False


def test_health_tells_that_the_model_is_down() -> None:
    def reply(number: int, body: Any) -> Any:
        raise Status(500)

    with serving(reply) as model:
        backend = LlmJudge(model.model_options(retries=0, breaker_failures=1), PAIR)
        with judge_server(backend) as url:
            assert httpx.get(f"{url}/health").status_code == 200
            assert ask(url, QUERY)["7"]["is_parsing_error"]
            assert httpx.get(f"{url}/health").status_code == 503


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "needs --url and --model"),
        (["--model", "m", "--set", "votes=3"], "votes is not a key of this node"),
        (["--model", "m", "--url", "http://anna:hunter2/@host"], "expected http://host:port"),
    ],
)
def test_an_llm_backend_that_cannot_work_is_refused(options: list[str], message: str) -> None:
    command = ["judge", "serve", "--backend", "llm", "--url", "http://localhost/v1", *options]
    result = CliRunner().invoke(medserl, command)
    assert result.exit_code == 2
    assert message in result.output and "hunter2" not in result.output


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ('{"queries": NaN}', 422),
        ('{"queries": "\\ud800"}', 422),
        ('{"queries": ' + "[" * 100_000, 400),
        (b"\xff\xfe", 422),
        (json.dumps({"queries": [{**QUERY, "medical_note": "x" * MAX_BYTES}]}), 413),
    ],
)
def test_a_request_that_cannot_be_read_is_refused(labels_command: str, body: str, status: int) -> None:
    answer = httpx.post(f"{labels_command}/judge", content=body, headers=JSON)
    assert answer.status_code == status and answer.json()["detail"]


def test_a_request_without_a_length_is_refused(labels_command: str) -> None:
    assert httpx.post(f"{labels_command}/judge", content=iter([b"{}"])).status_code == 411


def test_with_a_token_only_those_who_have_it_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TEST_KEY", "t0ken")
    with judge_server(LabelJudge(), token="t0ken") as url:
        assert httpx.get(f"{url}/health").status_code == 200
        for wrong in (b"", b"Bearer token", b"Basic t0ken", b"\xe9"):
            refused = httpx.post(f"{url}/judge", json={"queries": []}, headers={"authorization": wrong})
            assert refused.status_code == 401
        by_password = url.replace("//", "//anyone:t0ken@")
        assert httpx.post(f"{by_password}/judge", json={"queries": []}).status_code == 200
        server = JudgeServer(url=url, api_key_env="JUDGE_TEST_KEY")
        (game,) = reward_all(reward_manager("http", server), [played()])
    assert game.judgement and game.judgement.judge == "http"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 lets other machines in"),
        (["--host", "judge.example"], "name an environment variable that holds a key in --token-env"),
        (["--token-env", "sk-PASTED"], "--token-env names an environment variable that is not set"),
    ],
)
def test_other_machines_are_let_in_with_a_token_only(words: list[str], message: str) -> None:
    result = CliRunner().invoke(medserl, ["judge", "serve", "--backend", "labels", *words])
    assert result.exit_code == 2 and message in result.output and "PASTED" not in result.output


LIMITS = """
import resource
from medserl_agentloop.games.medical.judges import protocol
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
protocol.REQUEST_S = 1.0
"""
HALF = (b"", b"POST /ju", b"POST /judge HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")


@pytest.mark.slow
def test_400_half_open_requests_keep_nobody_out_and_the_server_from_stopping_neither() -> None:
    with command(LIMITS) as (url, process), ExitStack() as open_sockets:
        parts = httpx.URL(url)
        for number in range(400):
            peer = open_sockets.enter_context(socket.create_connection((parts.host, parts.port)))
            peer.sendall(HALF[number % 3])
        assert ask(url, QUERY, timeout=20)["7"]["error_present"] is True
        process.terminate()
        process.wait(30)
