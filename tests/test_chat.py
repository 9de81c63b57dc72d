"""A chat server's answers, faults and habits, as everyone who asks for a turn meets them."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from evaluation.chat_server import MODEL, ChatServer, chat_server
from serving import as_new, completion

from medserl_agentloop.core.chat import ChatAnswer, ChatClient
from medserl_agentloop.core.client import NoAnswer, ServerOptions, blocking
from medserl_agentloop.core.interaction import Prompt, place


@pytest.fixture(scope="module")
def _server() -> Iterator[ChatServer]:
    with chat_server() as server:
        yield server


@pytest.fixture
def server(_server: ChatServer) -> ChatServer:
    return as_new(_server)


def ask(url: str, content: str = "hello", prefix: str = "", special_tokens: Iterable[str] = ()) -> ChatAnswer:
    chat = ChatClient(ServerOptions(url=f"{url}/v1", model=MODEL, timeout_s=5.0).client(), special_tokens)
    return blocking(chat.complete([{"role": "user", "content": content}], {"seed": 7}, prefix))


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
    answer = ask(server.url, content, special_tokens=["<MINE>", ""])
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
    assert ask(server.url, sent[0]["content"]).text == f"Read this: {text}"


def test_other_signs_of_a_note_and_the_prompts_own_words_stay_as_they_are() -> None:
    note = "BP <140 and >90, Na < 130, a<b, HbA1c <=7, [2], [1-3], {x}"
    prompt = Prompt(({"role": "user", "content": f"Reason in <think>: {place('note')}"},), {"note": note})
    assert prompt.filled() == [{"role": "user", "content": f"Reason in <think>: {note}"}]


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
    assert ask(server.url, prefix=prefix) == expected


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (400, "HTTP 400: .*no luck.*"),
        (b"[]", r"the answer is no chat completion: \[\]"),
        (b"3", "the answer is no chat completion: 3"),
        ({"choices": []}, "the answer is no chat completion: .*"),
        ({**completion("x"), "metadata": "?"}, "the answer is no chat completion: .*"),
        (
            b'{"choices": [{"message": {"content": "x"}}], "usage": {"completion_tokens": 1e999}}',
            "the answer is no chat completion: .*",
        ),
        (completion(None), "the answer is empty"),
        (completion(""), "the answer is empty"),
        (completion("half a tur", finish="abort"), "generation ended with 'abort'"),
        (completion("half a tur", finish=7), "generation ended with 7"),  # type: ignore[arg-type]
        (completion([1]), "the answer's content is not text"),  # type: ignore[arg-type]
    ],
)
def test_no_usable_answer_says_why(server: ChatServer, answer: Any, reason: str) -> None:
    server.answer = lambda role, prompt: answer
    with pytest.raises(NoAnswer, match=f"^{reason}$"):
        ask(server.url)
    assert len(server.requests) == 1
