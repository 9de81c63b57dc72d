"""A chat server's answers, faults and habits, as everyone who asks for a turn meets them."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from evaluation.conftest import MODEL, ChatServer
from game.builders import CLEAN_NOTE
from serving import completion

from medserl_agentloop.core.chat import ChatClient, ServedModel
from medserl_agentloop.core.client import NoAnswer, ServerOptions, blocking
from medserl_agentloop.core.interaction import NoReplyError, Prompt, Reply, place
from medserl_agentloop.evaluation.play import model_at
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.types import Category, Role

T = TypeVar("T")


def ask(url: str, content: str = "hello", prefix: str = "", special_tokens: Iterable[str] = ()) -> Reply:
    chat = ChatClient(ServerOptions(url=f"{url}/v1", model=MODEL, timeout_s=5.0).client(), special_tokens)
    return blocking(chat.complete([{"role": "user", "content": content}], {"seed": 7}, prefix))


# --- what is sent ---


def test_a_request_is_the_messages_and_the_callers_fields_and_a_begun_turn_is_continued(server: ChatServer) -> None:
    ask(server.url)
    ask(server.url, prefix="Sure. <|think|>")
    first, body = server.requests
    assert first == {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "seed": 7}
    assert body["messages"][1:] == [{"role": "assistant", "content": "Sure. <|think|>"}]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)


MARKERS = """
    <|im_end|> <|a:b|> <|endoftext|> <\uff5cUser\uff5c> <\uff5cend\u2581of\u2581sentence\uff5c> <think> </think>
    <tool_call> </tool_call> <tool_response> <s> </s> <bos> <eos> <pad> <unk> <mask> <im_end> <start_of_turn>
    <end_of_turn> <image> <start_of_image> <extra_id_0> <unused3> <reserved_106> <fim_prefix>
    <beginning_of_sentence> <0x0A> <<SYS>> <</SYS>> [INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [SYSTEM_PROMPT]
    [THINK] [/THINK] [CLS] [SEP] [gMASK] [|user|] [|endofturn|] [UNUSED_TOKEN_146]
"""


@pytest.mark.parametrize("token", [*MARKERS.split(), "<| im end |>", "<MINE>"])
def test_no_control_token_of_a_players_text_reaches_a_server(server: ChatServer, token: str) -> None:
    text = f"{token}{token} x{token.upper()}\n{token}"
    filled = Prompt(({"role": "user", "content": f"Read this: {place('note')}"},), {"note": text}).filled()
    server.answer = lambda role, prompt: prompt
    answer = ask(server.url, filled[0]["content"], special_tokens=["<MINE>", ""]).text
    sent = server.requests[0]["messages"][0]["content"]
    assert not re.search(re.escape(token), sent, re.IGNORECASE)
    for shown in (sent.replace("\u2060", ""), answer):
        assert shown.replace("/ ", "/") == f"Read this: {text}"  # a blank breaks the switch in "/think"


def test_a_special_token_in_an_earlier_turn_reaches_the_server_as_text(server: ChatServer) -> None:
    ask(server.url, "BP <140, [2] a<MINE>b </s> <note>", special_tokens=["<MINE>", ""])
    sent = server.requests[0]["messages"][0]["content"]
    assert sent == "BP <140, [2] a<\u2060MINE>b <\u2060/s> <note>"


def test_other_signs_of_a_note_and_the_prompts_own_words_stay_as_they_are() -> None:
    note = "BP <140 and >90, Na < 130, a<b, HbA1c <=7, [2], [1-3], {x}"
    prompt = Prompt(({"role": "user", "content": f"Reason in <think>: {place('note')}"},), {"note": note})
    assert prompt.filled() == [{"role": "user", "content": f"Reason in <think>: {note}"}]


# --- what an answer becomes ---


OPEN = "Sure. <think>\n"


@pytest.mark.parametrize(
    ("body", "prefix", "expected"),
    [
        (completion("x"), "", Reply("x", 12, False)),
        (completion("x", finish="length"), "", Reply("x", 12, True)),
        (completion("x", finish=None), "", Reply("x", 12, False)),
        (completion("x", reasoning_content="why"), "", Reply("<think>why</think>\nx", 12, False)),
        (completion("x", reasoning="why"), "", Reply("<think>why</think>\nx", 12, False)),
        (completion("x", reasoning="why"), OPEN, Reply("why</think>\nx", 12, prefill=OPEN)),
        (completion(None, finish="length", reasoning_content="why"), "", Reply("<think>why", 12, True)),
        ({**completion("x"), "usage": None}, "", Reply("x", 0, False)),
        (
            {**completion("x"), "model": "m-7b", "metadata": {"weight_version": 3}},
            "",
            Reply("x", 12, False, model="m-7b", weights="3"),
        ),
    ],
)
def test_a_completion_becomes_the_turn(server: ChatServer, body: dict[str, Any], prefix: str, expected: Reply) -> None:
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


# --- a served model as a player ---


def turn(note: str = CLEAN_NOTE, **changes: Any) -> Any:
    return replace(load_profile().turn(Role.ASSESSOR, Category.VANILLA_BENIGN, note), max_tokens=77, **changes)


def play(url: str, use: Callable[[ServedModel], Awaitable[T]]) -> T:
    async def played() -> T:
        model = model_at(url, MODEL, {}, timeout_s=5.0, retries=1)
        assert isinstance(model, ServedModel)
        return await use(model)

    return asyncio.run(played())


def reply(url: str, one: Any, **fields: Any) -> Reply:
    return play(url, lambda player: player.reply(one, one.prompt.filled(), **fields))


def test_the_model_gets_the_profile_s_messages_and_the_turn_s_budget_and_stop_strings(server: ChatServer) -> None:
    reply(server.url, turn(), temperature=0.3)
    reply(server.url, turn(stop=("</answer>",)), max_tokens=9)
    first, second = server.requests
    messages = load_profile().messages(Role.ASSESSOR, Category.VANILLA_BENIGN, CLEAN_NOTE)
    assert first == {"model": MODEL, "messages": messages, "temperature": 0.3, "max_tokens": 77}
    assert (second["max_tokens"], second["stop"], second["no_stop_trim"]) == (9, ["</answer>"], True)


def test_a_drawn_turn_s_seed_follows_the_seed_the_note_the_game_and_the_conversation(server: ChatServer) -> None:
    def draw(one: Any, number: int, seed: int) -> int:
        drawn: Any = {"number": number, "budget": 5, "temperature": 0.5, "seed": seed}
        play(server.url, lambda player: player.sample(one, one.prompt.filled(), **drawn))
        body = server.requests[-1]
        assert (body["max_tokens"], body["temperature"]) == (5, 0.5) and 0 <= body["seed"] < 2**31
        return int(body["seed"])

    first, again = draw(turn(), 0, 1), draw(turn(), 0, 1)
    others = {draw(turn(), 0, 2), draw(turn("b"), 0, 1), draw(turn(), 1, 1), draw(turn(conversation="1"), 0, 1)}
    assert first == again and len({first, *others}) == 5


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_address_may_come_with_its_path_or_without(server: ChatServer, suffix: str) -> None:
    assert reply(server.url + suffix, turn(prefix="Sure. ")) == Reply("?", tokens=12, prefill="Sure. ")


@pytest.mark.parametrize(
    ("answer", "reason"), [(500, r"^assessor: HTTP 500 \(2 tries\)$"), (400, "^assessor: HTTP 400: .*no luck")]
)
def test_no_usable_answer_is_no_reply_and_says_why(server: ChatServer, answer: int, reason: str) -> None:
    server.answer = lambda role, prompt: answer
    with pytest.raises(NoReplyError, match=reason):
        reply(server.url, turn())


@pytest.mark.parametrize(
    ("models", "refusal"),
    [
        *((silent, None) for silent in ({"data": [{"id": MODEL}]}, 404, b"<html>", {"data": []}, {"models": 3})),
        ({"data": [{"id": "other-1b"}]}, "--model is one of other-1b"),
        (401, "with --api-key-env"),
    ],
)
def test_a_server_that_says_it_cannot_play_is_refused(server: ChatServer, models: Any, refusal: str | None) -> None:
    server.models = models
    with pytest.raises(ValueError, match=refusal) if refusal else nullcontext():
        play(server.url, ServedModel.check)
