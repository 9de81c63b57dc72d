"""Kuhn poker, the second game: its rules, its known solution, and a player with two turns in one conversation."""

import asyncio
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from rollout.opponent_server import opponent_server
from support import TOKENIZER

from experiments.kuhn_poker.exploitability import Policy, information_sets, nash_conv, policy_of
from experiments.kuhn_poker.run import PAGE, read, table
from experiments.pages import with_table
from medserl_agentloop.core.trajectory import GAME_KEY
from medserl_agentloop.games.kuhn_poker import ACTIONS, KuhnGame, KuhnRecord, winnings
from medserl_agentloop.testing.mock_engine import MockSGLangEngine
from medserl_agentloop.testing.tiny import build_agent_loop, compose_run, tiny_model

RUN = compose_run("+recipes=kuhn_poker")


def equilibrium(alpha: float) -> Policy:
    """Kuhn's family of solutions, for alpha from 0 to 1/3."""
    first = {("J", ""): alpha, ("Q", ""): 0.0, ("K", ""): 3 * alpha}
    later = {("J", "check bet"): 0.0, ("Q", "check bet"): alpha + 1 / 3, ("K", "check bet"): 1.0}
    facing_a_bet = {("J", "bet"): 0.0, ("Q", "bet"): 1 / 3, ("K", "bet"): 1.0}
    after_a_check = {("J", "check"): 1 / 3, ("Q", "check"): 0.0, ("K", "check"): 1.0}
    return {**first, **later, **facing_a_bet, **after_a_check}


UNIFORM = dict.fromkeys(information_sets(), 0.5)


@pytest.mark.parametrize(
    ("policy", "loses"), [(UNIFORM, 11 / 12), *((equilibrium(alpha), 0.0) for alpha in (0.0, 0.1, 1 / 3))]
)
def test_the_known_solutions_cannot_be_exploited_and_uniform_play_can(policy: Policy, loses: float) -> None:
    assert nash_conv(policy) == pytest.approx(loses, abs=1e-12)


WON = {"check check": -1, "bet fold": 1, "bet call": -2, "check bet fold": -1, "check bet call": -2}


@pytest.mark.parametrize(("moves", "won"), [*WON.items(), ("", None), ("check bet", None)])
def test_what_the_first_player_wins_with_the_lower_card(moves: str, won: int | None) -> None:
    assert winnings(("J", "K"), tuple(moves.split())) == won


@given(
    st.sampled_from(list(permutations("JQK", 2))),
    st.lists(st.text(max_size=6) | st.sampled_from(["check", "bet", "fold", "Call "])),
)
def test_every_game_ends_and_what_one_wins_the_other_loses(cards: tuple[str, str], said: list[str]) -> None:
    game = KuhnGame(cards)
    for text in [*said, "check", "bet", "call", "fold"]:
        if not game.over:
            game.play(text)
    assert game.over
    assert game.record.reward("first") == -(game.record.reward("second") or 0)
    assert set(game.record.moves) <= {*ACTIONS[True], *ACTIONS[False], "illegal"}


def play(*replies: str, run: Any = RUN) -> tuple[Any, KuhnRecord, MockSGLangEngine]:
    engine = MockSGLangEngine(list(replies), TOKENIZER)

    async def game() -> Any:
        loop = build_agent_loop(engine, TOKENIZER, run)
        facts = {"index": 0, "first": "Q", "second": "K"}
        return await loop.run({"temperature": 1.0, "logprobs": True}, extra_info=facts, uid="u", global_steps=1)

    output = asyncio.run(game())
    return output, KuhnRecord.model_validate(output.extra_fields[GAME_KEY]), engine


def test_a_later_turn_continues_its_own_conversation_and_no_other() -> None:
    _, record, engine = play("check", "bet", "call")
    opening, other, later = engine.calls
    assert record.moves == ("check", "bet", "call")
    own_turn = opening.prompt_ids + opening.output.token_ids
    assert later.prompt_ids[: len(own_turn)] == own_turn
    assert TOKENIZER.decode(later.prompt_ids).endswith(
        "The other says bet. fold or call?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "You hold K" not in TOKENIZER.decode(later.prompt_ids)
    assert "You hold Q" not in TOKENIZER.decode(other.prompt_ids)


def test_an_opponent_remembers_its_own_conversation() -> None:
    run = RUN.copy()
    with opponent_server() as server:
        server.answer = lambda messages: "check" if len(messages) == 1 else "call"
        run.selfplay.train = "second"
        OmegaConf.update(run, "selfplay.opponent", {"kind": "endpoint", "url": server.url, "model": "frozen"})
        _, record, _ = play("bet", run=run)
    assert record.moves == ("check", "bet", "call")
    said = [message["content"] for message in server.chats[1]["messages"]]
    assert said == ["You hold Q. check or bet?", "check", "The other says bet. fold or call?"]


def test_a_model_has_a_policy_at_every_information_set() -> None:
    model = tiny_model(len(TOKENIZER))
    policy = policy_of(model, TOKENIZER)
    assert policy.keys() == set(information_sets())
    assert all(0 <= chance <= 1 for chance in policy.values())
    assert len(set(policy.values())) > 6  # cards and moves make a difference


def test_the_page_shows_what_was_measured() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page, "nash_conv", table(read())) == page, "run python -m experiments.kuhn_poker.run"
