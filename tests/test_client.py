"""A server that is slow, breaks, refuses, answers nonsense or repeats the key, as everyone who asks
one meets it.
"""

import asyncio
import logging
import socket
import time
from base64 import b64encode
from contextlib import ExitStack
from typing import Any

import pytest
from serving import Line, LocalServer, Status, completion

from medserl_agentloop.core import client as core_client
from medserl_agentloop.core.chat import ChatClient, ServedModel
from medserl_agentloop.core.client import (
    CHAT_PATH,
    BadAnswer,
    CircuitBreaker,
    NoAnswer,
    Refused,
    ServerOptions,
    Unreachable,
    _is_this_machine,
    blocking,
)
from medserl_agentloop.core.encoding import as_think
from medserl_agentloop.core.interaction import Reply

KEY, PASSWORD, QUOTED = "sk-TOPSECRET-0123", "p@ss/w:rd?#", "p%40ss%2Fw%3Ard%3F%23"


def ask(url: str, **changes: Any) -> Any:
    client = ServerOptions(url=url, **{"timeout_s": 5.0, "retries": 0, **changes}).client()
    return blocking(client.post("/path", {"text": "x\udfffy"}))


def answering(answer: Any, times: int = 10**6) -> LocalServer:
    """A server that gives this answer so many times, and then the number of the request."""
    return LocalServer(lambda number, body: answer if number < times else number)


def http_answer(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status.encode(), len(body), body)


# --- retries, time-outs, refusals ---


@pytest.mark.parametrize(
    ("error", "reason"),
    [(Status(503), "HTTP 503: .*as the test"), (Status(429), "HTTP 429"), (Line(), "ReadError")],
)
def test_failing_server_gets_the_same_request_until_tries_are_over(error: Any, reason: str) -> None:
    with answering(error, times=1) as server:
        assert ask(server.url, retries=1) == 1
        assert server.requests[0] == server.requests[1] == {"text": "x\udfffy"}
    with answering(error) as server:
        with pytest.raises(Unreachable, match=rf"^{reason}.* \(2 tries\)$"):
            ask(server.url, retries=1)
        assert len(server.requests) == 2


@pytest.mark.parametrize("status", [301, 401, 422])
def test_refusal_quotes_the_server_and_is_not_retried(status: int) -> None:
    with answering(Status(status)) as server:
        with pytest.raises(Refused, match=f"^HTTP {status}: .*as the test wants it") as refusal:
            ask(server.url, retries=3)
        assert refusal.value.status == status and len(server.requests) == 1


@pytest.mark.parametrize(
    "answer", [http_answer(b" " * 1000), b"HTTP/1.1 200 OK\r\nx-a: " + b"a" * 1000]
)
def test_one_deadline_holds_for_an_answer_that_drips_in(answer: bytes) -> None:
    with answering(Line(answer, drip_s=0.02)) as server:
        started = time.monotonic()
        with pytest.raises(Unreachable, match="Timeout"):
            ask(server.url, timeout_s=0.4)
        assert time.monotonic() - started < 15  # the whole answer takes 20 s


def test_wait_for_a_place_is_no_timeout_and_bounds_requests_in_flight() -> None:
    def reply(number: int, body: Any) -> Any:
        time.sleep(0.4)
        return number

    with LocalServer(reply) as server:
        options = ServerOptions(url=server.url, concurrency=2, timeout_s=1.5, retries=0)
        client = options.client()

        async def ask_all() -> list[Any]:
            return await asyncio.gather(*(client.post("/path", {}) for _ in range(5)))

        # One event loop after another.
        assert sorted(asyncio.run(ask_all()) + asyncio.run(ask_all())) == list(range(10))
        assert server.most_at_once == 2


def test_an_empty_account_is_asked_once() -> None:
    words = {"error": {"message": "You exceeded your current quota, check your billing details."}}
    with answering(Status(429, words)) as server:
        with pytest.raises(Refused, match="your current quota"):
            ask(server.url, retries=3)
        assert len(server.requests) == 1


# --- chat: servers say the same in other words ---


def chat(answer: Any, prompt: str = "Hello", path: str = "/v1") -> tuple[Reply, LocalServer]:
    with answering(answer) as server:
        options = ServerOptions(url=server.url + path, model="m", timeout_s=5.0, retries=0)
        client = ChatClient(options.client(CHAT_PATH))
        messages = [{"role": "user", "content": prompt}]
        return blocking(client.complete(messages, {})), server


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/chat/completions"])
def test_an_address_may_lack_its_v1_or_name_the_path(path: str) -> None:
    _, server = chat(completion("Hi"), path=path)
    assert server.paths == ["/v1/chat/completions"]


@pytest.mark.parametrize("finish", ["stop", "end_turn", "STOP", "eos", "", None])
def test_a_whole_answer_ends_in_any_word(finish: str | None) -> None:
    reply, _ = chat(completion("Hi", finish=finish))
    assert (reply.text, reply.truncated) == ("Hi", False)


@pytest.mark.parametrize("finish", ["length", "max_tokens", "MAX_TOKENS"])
def test_an_answer_that_its_budget_cut_says_so(finish: str) -> None:
    assert chat(completion("Hi", finish=finish))[0].truncated


@pytest.mark.parametrize(
    "answer",
    [
        completion("Hi", finish="content_filter"),
        completion("Hi", finish="SAFETY"),
        completion("Hi", finish="abort"),
        completion(""),
        {"error": {"message": "overloaded"}},
        {"choices": []},
    ],
)
def test_an_answer_that_is_none_is_bad(answer: Any) -> None:
    with pytest.raises(BadAnswer):
        chat(answer)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("<think>a</think>b", "<think>a</think>b"),
        ("[THINK]a[/THINK]b", "<think>a</think>b"),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
            "<think>a</think>b",
        ),
        ("<|channel>thought\na<channel|>b", "<think>a</think>b"),
        ("<unused94>thought\na<unused95>b", "<think>a</think>b"),
        ("analysisa.assistantfinalb", "<think>a.</think>b"),
        ("analysis of the note", "analysis of the note"),
        ("[THINK]a[/THINK]", "<think>a</think>"),
        ("[THINK]cut off after [1]", "<think>cut off after [1]"),
        ("b [THINK]a[/THINK]", "b [THINK]a[/THINK]"),
    ],
)
def test_reasoning_has_one_pair_of_marks_whatever_the_family(text: str, read: str) -> None:
    assert as_think(text) == read
    assert chat(completion(text))[0].text == read


@pytest.mark.parametrize(
    ("read", "warns"),
    [([100, 9], True), ([2048, 2048], True), ([100, 500], False), ([0, 0], False)],
)
def test_a_server_that_cuts_prompts_is_named(
    read: list[int], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It read fewer tokens than there are words, or as many of a long prompt as of a short one."""

    def reply(number: int, body: Any) -> Any:
        return completion("Hi") | {"usage": {"prompt_tokens": read[number]}}

    with LocalServer(reply) as server:
        client = ChatClient(ServerOptions(url=server.url, model="m").client(CHAT_PATH))
        for words in (90, 400):
            message = {"role": "user", "content": "word " * words}
            answer = blocking(client.complete([message], {}))
    assert (answer.prompt_tokens, "cuts long prompts" in caplog.text) == (read[-1], warns)


@pytest.mark.parametrize("listens", [True, False])
def test_a_server_that_does_not_answer_is_said_within_20_s(
    listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket whose queue of connections is full, and one that accepts and says nothing."""
    monkeypatch.setattr(core_client, "_GET_S", 1.0)
    monkeypatch.setattr(core_client, "_CONNECT_S", 1.0)
    with socket.socket() as silent, ExitStack() as waiting:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        if not listens:
            for _ in range(3):
                other = waiting.enter_context(socket.socket())
                other.setblocking(False)
                other.connect_ex(silent.getsockname())
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        model = ServedModel(ServerOptions(url=url, model="m").client(CHAT_PATH))
        started = time.monotonic()
        with pytest.raises(ValueError, match=f"^no server answers at {url}/v1"):
            blocking(model.check())
        assert time.monotonic() - started < 10


# --- the breaker ---


def test_circuit_opens_after_losses_in_a_row_and_tries_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(core_client.time, "monotonic", lambda: now)
    breaker = CircuitBreaker(2)

    async def ask(error: Exception | None = None) -> None:
        async with breaker.watching():
            if error is not None:
                raise error

    def lose() -> None:
        with pytest.raises(Unreachable, match="gone"):
            asyncio.run(ask(Unreachable("gone")))

    for _ in range(3):
        lose()
        asyncio.run(ask())
    lose()
    lose()
    for _ in range(2):  # a trial that ends in nothing, e.g. is cancelled, makes room for the next
        with pytest.raises(Unreachable, match="2 requests in a row and counts as down"):
            asyncio.run(ask())
        now += 30
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(ask(asyncio.CancelledError()))
    now += 30
    for _ in range(2):
        asyncio.run(ask())


# --- proxies ---


@pytest.mark.parametrize("variable", ["http_proxy", "all_proxy"])
def test_loopback_goes_past_every_proxy_which_would_read_the_key(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_KEY", KEY)
    monkeypatch.setenv(
        variable, "socks5://127.0.0.1:9"
    )  # not even built: httpx lacks a package for it
    with LocalServer(lambda number, body: number) as server:
        for number, host in enumerate(("127.0.0.1", "localhost", "0.0.0.0")):
            assert ask(server.url.replace("127.0.0.1", host), api_key_env="TEST_KEY") == number
    names = ("localhost.", "localhost.localdomain", "::1", "10.0.0.1", "mylocalhost")
    assert [*map(_is_this_machine, names)] == [True] * 3 + [False] * 2


# --- keys and passwords ---


def test_keys_and_passwords_are_sent_as_the_server_wants_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    basic = b64encode(f"anna:{PASSWORD}".encode()).decode()
    with LocalServer(lambda number, body: number) as server:
        ask(server.url)
        for key in (f"{KEY}\n", f"Basic {basic}"):
            monkeypatch.setenv("TEST_KEY", key)
            ask(server.url, api_key_env="TEST_KEY")
        ask(server.url.replace("//", f"//anna:{QUOTED}@"))
        sent = [headers.get("authorization") for headers in server.headers]
    assert sent == [None, f"Bearer {KEY}", f"Basic {basic}", f"Basic {basic}"]


def repeated(secret: str) -> dict[str, bytes]:
    """Ways in which a server can repeat what it was sent."""
    body = f'"you sent {secret}"'.encode()
    return {
        "refusal": http_answer(body, "401 Unauthorized"),
        "down": http_answer(body, "503 Unavailable"),
        "status line": http_answer(body, f"404 {secret}"),
        "redirect": http_answer(body, f"302 X\r\nlocation: http://127.0.0.1:9/{secret}"),
        "no http": body,
        "no json": http_answer(b"x" * 190 + body),
        "answer": http_answer(body),
    }


@pytest.mark.parametrize("way", repeated(""))
@pytest.mark.parametrize("secret", [KEY, PASSWORD])
def test_a_secret_is_never_shown_whatever_a_server_repeats(
    way: str, secret: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("TEST_KEY", KEY)
    with answering(Line(repeated(secret)[way])) as server:
        url = server.url.replace("//", f"//anna:{QUOTED}@") if secret == PASSWORD else server.url
        try:
            words = ask(url, api_key_env="TEST_KEY" if secret == KEY else None)
            assert way == "answer"
        except NoAnswer:
            with pytest.raises(NoAnswer) as caught:
                ask(url, api_key_env="TEST_KEY" if secret == KEY else None)
            words = f"{caught.value!r} {caught.getrepr(style='short')}"
    for hidden in (secret, QUOTED):
        assert hidden not in f"{words} {caplog.text}"


def test_a_short_key_is_no_reason_to_change_what_a_model_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Local servers are often given a key such as "none", which is also a word."""
    monkeypatch.setenv("TEST_KEY", "none")
    with answering("none of it") as server:
        assert ask(server.url, api_key_env="TEST_KEY") == "none of it"


@pytest.mark.parametrize(
    ("url", "key", "says"),
    [
        *((u, "k", "expected http") for u in ("http://u:p/cret@host", "cret:1", "ftp://u:cret@h")),
        ("http://host", "sk-sécret", "no HTTP header can hold"),
        ("http://host", "", "is not set"),
    ],
)
def test_an_address_and_a_key_that_cannot_be_used_are_not_repeated(
    url: str, key: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("sk-TEST-secret", key)
    with pytest.raises(ValueError, match=says) as error:
        ServerOptions(url=url, api_key_env="sk-TEST-secret").client()
    assert "cret" not in str(error.value)
