"""A chat server's answers, faults and habits, as everyone who asks for a turn meets them."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest
from fastapi.responses import StreamingResponse
from play.chat_server import MODEL, ChatServer, chat_server
from serving import as_new, completion

from medserl_agentloop.core.chat import ChatAnswer, ChatClient
from medserl_agentloop.core.client import NoAnswer, ServerOptions
from medserl_agentloop.core.interaction import Prompt, place


@pytest.fixture(scope="module")
def _server() -> Iterator[ChatServer]:
    with chat_server() as server:
        yield server


@pytest.fixture
def server(_server: ChatServer) -> ChatServer:
    return as_new(_server)


def client(url: str, **changes: Any) -> ChatClient:
    usual = {"timeout_s": 5.0, "retries": 2, "concurrency": 4, "backoff_s": 0.01}
    special_tokens = changes.pop("special_tokens", ())
    return ChatClient(ServerOptions(url=f"{url}/v1", model=MODEL, **{**usual, **changes}).client(), special_tokens)


def ask(url: str, content: str = "hello", prefix: str = "", times: int = 1, **changes: Any) -> list[ChatAnswer]:
    async def answers() -> list[ChatAnswer]:
        chat = client(url, **changes)
        async with aclosing(chat.http):
            requests = (
                chat.complete([{"role": "user", "content": content}], {"seed": 7}, prefix) for _ in range(times)
            )
            return await asyncio.gather(*requests)

    return asyncio.run(answers())


# --- what is sent ---


def test_a_request_is_the_messages_and_the_callers_fields(server: ChatServer) -> None:
    ask(server.url)
    assert server.requests == [{"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "seed": 7}]


def test_a_turn_that_the_prompt_begins_is_continued(server: ChatServer) -> None:
    ask(server.url, prefix="Sure. <|think|>")
    (body,) = server.requests
    assert body["messages"][1:] == [{"role": "assistant", "content": "Sure. <|think|>"}]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)


@pytest.mark.parametrize(
    "token", ["<|im_end|>", "<|a:b|>", "<\uff5cUser\uff5c>", "</s>", "<end_of_turn>", "[/INST]", "<MINE>"]
)
def test_a_special_token_reaches_the_server_as_text_and_comes_back_as_written(server: ChatServer, token: str) -> None:
    server.answer = lambda role, prompt: prompt
    content = f"BP <140, [2] a{token}{token}b <note>"
    (answer,) = ask(server.url, content, special_tokens=["<MINE>", ""])
    sent = server.requests[0]["messages"][0]["content"]
    assert token not in sent
    assert sent.replace("\u2060", "") == answer.text == content


MARKERS = """
    <|im_end|> <|a:b|> <|endoftext|> <\uff5cUser\uff5c> <\uff5cend\u2581of\u2581sentence\uff5c> <think> </think>
    <tool_call> </tool_call> <tool_response> <s> </s> <bos> <eos> <pad> <unk> <mask> <im_end> <start_of_turn>
    <end_of_turn> <image> <start_of_image> <extra_id_0> <unused3> <reserved_106> <fim_prefix>
    <beginning_of_sentence> <0x0A> <<SYS>> <</SYS>> [INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [SYSTEM_PROMPT]
    [THINK] [/THINK] [CLS] [SEP] [gMASK] [|user|] [|endofturn|] [UNUSED_TOKEN_146]
"""


@pytest.mark.parametrize("token", [*MARKERS.split(), "<| im end |>"])
def test_no_control_token_of_a_players_text_reaches_a_server(server: ChatServer, token: str) -> None:
    text = f"{token}{token} x{token.upper()}\n{token}"
    sent = Prompt(({"role": "user", "content": f"Read this: {place('note')}"},), {"note": text}).filled()
    assert not re.search(re.escape(token), sent[0]["content"], re.IGNORECASE)
    assert sent[0]["content"].replace("\u2060", "") == f"Read this: {text}"
    server.answer = lambda role, prompt: prompt
    assert ask(server.url, sent[0]["content"])[0].text == f"Read this: {text}"


def test_other_signs_of_a_note_and_the_prompts_own_words_stay_as_they_are() -> None:
    note = "BP <140 and >90, Na < 130, a<b, HbA1c <=7, [2], [1-3], {x}"
    prompt = Prompt(({"role": "user", "content": f"Reason in <think>: {place('note')}"},), {"note": note})
    assert prompt.filled() == [{"role": "user", "content": f"Reason in <think>: {note}"}]


def test_lone_surrogates_travel_and_do_not_come_back(server: ChatServer) -> None:
    """Notes and a model's JSON may hold them; no tokenizer takes them."""
    server.answer = lambda role, prompt: json.dumps(completion("a\ud800b\U0001f642")).encode()
    (answer,) = ask(server.url, "x\udfffy")
    assert server.requests[0]["messages"][0]["content"] == "x\udfffy"
    assert answer.text == "a?b\U0001f642"


# --- what an answer becomes ---


@pytest.mark.parametrize(
    ("body", "prefix", "expected"),
    [
        (completion("x"), "", ChatAnswer("x", 12, False)),
        (completion("x", finish="length"), "", ChatAnswer("x", 12, True)),
        (completion("x", finish=None), "", ChatAnswer("x", 12, False)),
        (completion("x", reasoning_content="why"), "", ChatAnswer("<think>why</think>\nx", 12, False)),
        (completion("x", reasoning="why"), "", ChatAnswer("<think>why</think>\nx", 12, False)),
        (completion("x", reasoning="why"), "Sure. <think>\n", ChatAnswer("why</think>\nx", 12, False)),
        (completion(None, finish="length", reasoning_content="why"), "", ChatAnswer("<think>why", 12, True)),
        ({**completion("x"), "usage": None}, "", ChatAnswer("x", 0, False)),
        (
            {**completion("x"), "model": "m-7b", "metadata": {"weight_version": 3}},
            "",
            ChatAnswer("x", 12, False, model="m-7b", weights="3"),
        ),
    ],
)
def test_a_completion_becomes_the_turn_as_the_model_wrote_it(
    server: ChatServer, body: dict[str, Any], prefix: str, expected: ChatAnswer
) -> None:
    server.answer = lambda role, prompt: body
    assert ask(server.url, prefix=prefix) == [expected]


@pytest.mark.parametrize(
    ("answer", "reason", "details", "requests"),
    [
        (500, "HTTP 500", r" \(3 tries\)", 3),
        (429, "HTTP 429", r" \(3 tries\)", 3),
        (400, "HTTP 400", ": .*no luck.*", 1),
        (b"<html>", "the answer is not JSON", ": '<html>'", 1),
        (b"[" * 100_000, "the answer is not JSON", ": .{202}", 1),
        (b"[]", "the answer is no chat completion", r": \[\]", 1),
        (b"3", "the answer is no chat completion", ": 3", 1),
        ({"choices": []}, "the answer is no chat completion", ": .*", 1),
        ({**completion("x"), "metadata": "?"}, "the answer is no chat completion", ": .*", 1),
        (
            b'{"choices": [{"message": {"content": "x"}}], "usage": {"completion_tokens": 1e999}}',
            "the answer is no chat completion",
            ": .*",
            1,
        ),
        (completion(None), "the answer is empty", "", 1),
        (completion(""), "the answer is empty", "", 1),
        (completion("half a tur", finish="abort"), "generation ended with 'abort'", "", 1),
        (completion([1]), "the answer's content is not text", "", 1),  # type: ignore[arg-type]
    ],
)
def test_no_usable_answer_says_why_with_the_servers_words_apart(
    server: ChatServer, answer: Any, reason: str, details: str, requests: int
) -> None:
    server.answer = lambda role, prompt: answer
    with pytest.raises(NoAnswer, match=f"^{reason}{details}$") as caught:
        ask(server.url)
    assert caught.value.reason == reason
    assert len(server.requests) == requests


# --- a server in trouble ---


def test_a_server_that_comes_back_is_asked_again(server: ChatServer) -> None:
    answers: list[Any] = [503, 429, "here"]
    server.answer = lambda role, prompt: answers.pop(0)
    assert [answer.text for answer in ask(server.url)] == ["here"]


def test_a_server_that_is_gone_is_said_to_be() -> None:
    with pytest.raises(NoAnswer, match=r"^ConnectError: .+ \(2 tries\)$") as caught:
        ask("http://127.0.0.1:9", retries=1)
    assert caught.value.reason == "ConnectError"


def test_a_server_that_drips_is_given_up(server: ChatServer) -> None:
    def drip() -> Iterator[bytes]:
        for _ in range(20):
            time.sleep(0.1)
            yield b" "

    server.answer = lambda role, prompt: StreamingResponse(drip())
    with pytest.raises(NoAnswer, match=r"^ReadTimeout: no answer within 0\.3 s \(1 try\)$"):
        ask(server.url, timeout_s=0.3, retries=0)


def test_no_more_requests_are_in_flight_than_allowed_and_the_wait_for_a_place_is_no_time_out(
    server: ChatServer,
) -> None:
    flying = most = 0

    def answer(*_: Any) -> str:
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        time.sleep(0.4)
        flying -= 1
        return "hello"

    server.answer = answer
    assert len(ask(server.url, times=12, concurrency=2, timeout_s=2.0, retries=0)) == 12
    assert most == 2


def test_a_client_serves_one_event_loop_after_another(server: ChatServer) -> None:
    chat = client(server.url)

    async def once() -> str:
        async with aclosing(chat.http):
            return (await chat.complete([{"role": "user", "content": "hello"}], {})).text

    assert [asyncio.run(once()) for _ in range(2)] == ["?", "?"]
