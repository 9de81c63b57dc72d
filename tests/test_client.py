"""A server that is slow, breaks, refuses, answers nonsense or repeats the key, as everyone who asks
one meets it.
"""

import asyncio
import logging
import socket
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from serving import MODEL, ChatServer, Line, LocalServer, Status, completion, refusal

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
from medserl_agentloop.core.encoding import as_think, place
from medserl_agentloop.core.interaction import Prompt, Reply, Turn

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


@pytest.fixture(autouse=True)
def short_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries of a server that limits requests are spread over this."""
    monkeypatch.setattr(core_client, "_MINUTE_S", 0.6)


@pytest.mark.parametrize(
    ("status", "named", "planned"),
    [
        (429, {}, "0.2"),
        (429, {"retry-after": "0"}, "0"),
        (429, {"retry-after-ms": "50"}, None),
        (503, {"retry-after": "120"}, "0.6"),
        (503, {}, None),
    ],
)
def test_pauses_of_a_server_that_limits_requests_add_up_to_a_minute(
    status: int, named: dict[str, str], planned: str | None
) -> None:
    """Of a minute that is 0.6 s long, with three retries."""
    response = httpx.Response(status, headers=named, content=b"slow down")
    asyncio.run(core_client._plan_next_try(3, response))
    assert response.headers.get("retry-after") == planned


def test_a_limit_of_requests_names_the_option_that_lowers_them() -> None:
    with answering(Status(429)) as server, pytest.raises(Unreachable, match="--concurrency"):
        ask(server.url, retries=1)


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


# --- chat: what is sent, and what an answer becomes ---


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer() as server:
        yield server


def player(server: LocalServer, model: str = MODEL) -> ServedModel:
    options = ServerOptions(url=server.url, model=model, timeout_s=5.0, retries=0)
    return ServedModel(options.client(CHAT_PATH))


def chat(answer: Any, content: str = "hello", prefix: str = "") -> Reply:
    with answering(answer) as server:
        messages = [{"role": "user", "content": content}]
        return blocking(player(server).complete(messages, {}, prefix))


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/chat/completions"])
def test_an_address_may_lack_its_v1_or_name_the_path(path: str) -> None:
    with answering(completion("Hi")) as server:
        options = ServerOptions(url=server.url + path, model=MODEL)
        blocking(ChatClient(options.client(CHAT_PATH)).complete([], {}))
    assert server.paths == ["/v1/chat/completions"]


def test_request_holds_messages_and_extra_fields_and_continues_a_prefix(server: ChatServer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    for prefix in ("", "Sure. <|think|>"):
        blocking(player(server).complete(messages, {"seed": 7, "top_p": None}, prefix))
    first, body = server.requests
    assert first == {"model": MODEL, "messages": messages, "seed": 7}
    assert body["messages"][1:] == [{"role": "assistant", "content": "Sure. <|think|>"}]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)


def test_server_gets_control_tokens_of_a_note_broken_and_the_rest_intact(
    server: ChatServer,
) -> None:
    note = "BP <140 and >90, a<b, [2], [1-3], {x} a<MINE>b </s> <|im_end|> /think"
    prompt = Prompt(
        ({"role": "user", "content": f"Reason in <think>: {place('note')}"},), {"note": note}
    )
    server.answer = lambda role, prompt: prompt
    client = ChatClient(player(server).http, special_tokens=["<MINE>", ""])
    answer = blocking(client.complete(prompt.filled(), {})).text
    sent = server.requests[0]["messages"][0]["content"]
    broken = "a<\u2060MINE>b <\u2060/s> <\u2060|im_end|> / think"
    assert sent == f"Reason in <think>: BP <140 and >90, a<b, [2], [1-3], {{x}} {broken}"
    assert answer == sent.replace("\u2060", "")


OPEN, WHY = "Sure. <think>\n", "<think>why</think>\nx"
TEXTS = [{"type": "text", "text": words} for words in "xy"]
THOUGHT = {"type": "thinking", "thinking": [{"type": "text", "text": "why"}]}


@pytest.mark.parametrize(
    ("body", "prefix", "expected"),
    [
        *(
            (completion("x", finish=word), "", Reply("x", 12, False))
            for word in ("stop", "end_turn", "STOP", "eos", "", None)
        ),
        *(
            (completion("x", finish=word), "", Reply("x", 12, True))
            for word in ("length", "max_tokens", "MAX_TOKENS", "model_length")
        ),
        (completion("x", reasoning_content="why"), "", Reply(WHY, 12, False)),
        (completion("x", reasoning="why"), OPEN, Reply("why</think>\nx", 12, prefill=OPEN)),
        (completion(None, finish="length", reasoning="why"), "", Reply("<think>why", 12, True)),
        (completion(TEXTS), "", Reply("xy", 12, False)),
        (completion([THOUGHT, TEXTS[0]]), "", Reply(WHY, 12, False)),
        ({**completion("x"), "usage": None}, "", Reply("x", 0, False)),
        ({**completion("x"), "model": "m-7b"}, "", Reply("x", 12, False, model="m-7b")),
    ],
)
def test_a_completion_becomes_the_turn(body: Any, prefix: str, expected: Reply) -> None:
    assert chat(body, prefix=prefix) == expected


@pytest.mark.parametrize(
    "answer",
    [
        *(completion("Hi", finish=word) for word in ("content_filter", "SAFETY", "abort")),
        *(completion(""), {"error": {"message": "overloaded"}}, {"choices": []}),
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
    assert chat(completion(text)).text == read


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
        model = player(server)
        for words in (90, 400):
            message = {"role": "user", "content": "word " * words}
            answer = blocking(model.complete([message], {}))
    assert (answer.prompt_tokens, "cuts long prompts" in caplog.text) == (read[-1], warns)


REMEDY = ["max_tokens=null", "max_completion_tokens=77"]
FORBIDDEN = {"type": "extra_forbidden", "loc": ["body", "seed"], "msg": "not permitted"}


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (refusal("max_tokens", "max_completion_tokens"), REMEDY),
        (refusal("temperature"), ["temperature=null"]),
        ({"detail": [FORBIDDEN]}, ["seed=null"]),
        ({"message": "'max_tokens' is too large: the model's context is 8192 tokens"}, []),
    ],
)
def test_a_refused_field_is_told_with_the_option_that_helps(
    words: dict[str, Any], remedy: list[str]
) -> None:
    fields = {"max_tokens": 77, "temperature": 0.0, "seed": 3}
    with answering(Status(400, words)) as server, pytest.raises(Refused) as error:
        blocking(player(server).complete([], fields))
    options = "".join(f"--extra-body {change} " for change in remedy)
    assert str(error.value).startswith(f"add {options}(HTTP 400" if remedy else "HTTP 400")


# --- a served model as a player ---


def test_turn_seed_follows_the_seed_note_game_and_conversation(server: ChatServer) -> None:
    def draw(number: int = 0, seed: int = 1, note: str = "a", conversation: str = "0") -> int:
        turn = Turn("assessor", Prompt(({"role": "user", "content": note},)), 9, conversation)
        drawn: Any = {"number": number, "budget": 5, "temperature": 0.5, "seed": seed}
        blocking(player(server).sample(turn, turn.prompt.filled(), **drawn))
        body = server.requests[-1]
        assert (body["max_tokens"], body["temperature"]) == (5, 0.5) and 0 <= body["seed"] < 2**31
        return int(body["seed"])

    others = {draw(seed=2), draw(note="b"), draw(number=1), draw(conversation="1")}
    assert draw() == draw() and len({draw(), *others}) == 5


@pytest.mark.parametrize("models", [404, 401, 500, Line(), b"<html>", {"data": []}, {"models": 3}])
def test_a_server_is_refused_where_its_chat_refuses_the_key(
    server: ChatServer, models: Any
) -> None:
    """A list of models may be refused or broken where the chat works."""
    server.models = models
    blocking(player(server).check())
    server.models, server.answer = 401, lambda role, prompt: 401
    with pytest.raises(ValueError, match="with --api-key-env"):
        blocking(player(server).check())


def test_adapter_of_sglang_is_asked_by_the_name_that_reaches_it(
    server: ChatServer, caplog: pytest.LogCaptureFixture
) -> None:
    cards = [{"id": "base"}, {"id": "trained", "root": "runs/adapter", "parent": "base"}]
    server.models = {"data": [card | {"owned_by": "sglang"} for card in cards]}
    with pytest.raises(ValueError, match="the base would answer; name it base:trained"):
        blocking(player(server, "trained").check())
    found = blocking(player(server, "base:trained").check())
    assert found["root"] == "runs/adapter" and not caplog.messages
    server.models = {"data": [card | {"owned_by": "vllm"} for card in cards]}
    assert blocking(player(server, "trained").check())["root"] == "runs/adapter"


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
        ("http://host", "sk-sécret", "not allowed in an HTTP header"),
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
