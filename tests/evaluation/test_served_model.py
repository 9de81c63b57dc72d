"""A served model as a player: what it is asked, and why there may be no reply. tests/test_chat.py has the rest."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from evaluation.chat_server import MODEL, ChatServer
from evaluation.mock_server import mock_server
from game.builders import CLEAN_NOTE

from medserl_agentloop.core.chat import PATH, ServedModel
from medserl_agentloop.core.interaction import NoReplyError, Reply
from medserl_agentloop.evaluation.play import server_options
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.types import Category, Role

T = TypeVar("T")
MESSAGES = load_profile().messages(Role.ASSESSOR, Category.VANILLA_BENIGN, CLEAN_NOTE)


def turn(note: str = CLEAN_NOTE, **changes: Any) -> Any:
    return replace(load_profile().turn(Role.ASSESSOR, Category.VANILLA_BENIGN, note), max_tokens=77, **changes)


def ask(url: str, use: Callable[[ServedModel], Awaitable[T]], **fields: Any) -> T:
    async def asked() -> T:
        http = server_options(url, MODEL, timeout_s=5.0, retries=1).client(PATH)
        return await use(ServedModel(http, **fields))

    return asyncio.run(asked())


def reply(server: ChatServer, note: str = CLEAN_NOTE, **fields: Any) -> Reply:
    one = turn(note)
    return ask(server.url, lambda player: player.reply(one, one.prompt.filled()), **fields)


def test_the_model_gets_the_profile_s_messages_and_the_turn_s_budget(server: ChatServer) -> None:
    reply(server, temperature=0.3)
    reply(server, max_tokens=9)
    first, second = server.requests
    assert first["messages"] == MESSAGES
    assert (first["model"], first["temperature"], first["max_tokens"]) == (MODEL, 0.3, 77)
    assert set(first) == {"model", "messages", "temperature", "max_tokens"}
    assert second["max_tokens"] == 9


def test_a_drawn_turn_s_seed_follows_the_seed_the_note_the_game_and_the_conversation(server: ChatServer) -> None:
    def draw(one: Any, number: int, seed: int) -> int:
        drawn: Any = {"number": number, "budget": 5, "temperature": 0.5, "seed": seed}
        ask(server.url, lambda player: player.sample(one, one.prompt.filled(), **drawn))
        body = server.requests[-1]
        assert (body["max_tokens"], body["temperature"]) == (5, 0.5) and 0 <= body["seed"] < 2**31
        return int(body["seed"])

    first, again = draw(turn(), 0, 1), draw(turn(), 0, 1)
    others = {draw(turn(), 0, 2), draw(turn("b"), 0, 1), draw(turn(), 1, 1), draw(turn(conversation="1"), 0, 1)}
    assert first == again and len({first, *others}) == 5


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_address_may_come_with_its_path_or_without(server: ChatServer, suffix: str) -> None:
    one = turn(prefix="Sure. ")
    answer = ask(server.url + suffix, lambda player: player.reply(one, one.prompt.filled()))
    assert answer == Reply("?", tokens=12, prefill="Sure. ")


@pytest.mark.parametrize(
    ("answer", "reason"), [(500, r"^assessor: HTTP 500 \(2 tries\)$"), (400, "^assessor: HTTP 400: .*no luck")]
)
def test_no_usable_answer_is_no_reply_and_says_why(server: ChatServer, answer: int, reason: str) -> None:
    server.answer = lambda role, prompt: answer
    with pytest.raises(NoReplyError, match=reason):
        reply(server)


def test_a_turn_ends_where_the_profile_says_stop_and_keeps_the_string() -> None:
    with mock_server(lambda prompt: "<answer>verdict: safe</answer> and on and on") as engine:
        whole, stopped = (
            ask(engine.url, lambda player, one=one: player.reply(one, one.prompt.filled()))
            for one in (turn(), turn(stop=("</answer>",)))
        )
    assert whole.text.endswith("and on and on")
    assert stopped.text == "<answer>verdict: safe</answer>"
    first, second = engine.requests
    assert "stop" not in first and second["stop"] == ["</answer>"]


# --- before the first game ---


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
        ask(server.url, ServedModel.check)
