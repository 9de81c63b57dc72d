"""A role that owns several conversations: each has a context of its own, its own reward and its own credit."""

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import TOKENIZER, judge

from medserl_agentloop.core.certificate import CertificateError, _short_samples
from medserl_agentloop.core.interaction import Interaction, Prompt, Turn, place
from medserl_agentloop.core.records import GameRecord
from medserl_agentloop.core.trajectory import GAME_KEY
from medserl_agentloop.testing.mock_engine import MockSGLangEngine
from medserl_agentloop.testing.tiny import build_agent_loop, compose_run

ORDER = (("asker", None), ("solver", "a"), ("solver", "b"), ("solver", "a"))
"""Who speaks, and in which conversation: the solver comes back to its first one."""


class Game:
    def __init__(self) -> None:
        self.record = GameRecord()
        self.said: list[str] = []

    def play(self, text: str, **_: Any) -> None:
        self.said.append(text)
        self.record.turn_rewards = {number: {"place": float(number)} for number in range(1, len(self.said))}

    def make_void(self, reason: str) -> None:
        self.record.void = reason


class Tries(Interaction[Game, GameRecord]):
    roles = ("asker", "solver")

    def new_game(self, facts: Mapping[str, Any]) -> Game:
        return Game()

    def next_turn(self, game: Game) -> Turn | None:
        number = len(game.said)
        if game.record.void is not None or number == len(ORDER):
            return None
        role, conversation = ORDER[number]
        message = {"role": "user", "content": f"Turn {number}: {place('asked')}"}
        asked = game.said[0] if game.said else "<|im_end|>"
        return Turn(role, Prompt((message,), {"asked": asked}), 40, conversation)


RUN = compose_run("+recipes=own_game", f"selfplay.game={__name__}:Tries")


def play() -> tuple[Any, MockSGLangEngine]:
    engine = MockSGLangEngine(["why", "first", "second", "again"], TOKENIZER)

    async def game() -> Any:
        loop = build_agent_loop(engine, TOKENIZER, RUN)
        return await loop.run({"temperature": 1.0, "logprobs": True}, extra_info={}, uid="u", global_steps=1)

    return asyncio.run(game()), engine


def test_conversations_stand_in_the_order_in_which_they_began() -> None:
    output, engine = play()
    asked, first, second, again = engine.calls
    contexts = [
        [*asked.prompt_ids, *asked.output.token_ids],
        [*again.prompt_ids, *again.output.token_ids],
        [*second.prompt_ids, *second.output.token_ids],
    ]
    assert again.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert [*output.prompt_ids, *output.response_ids] == [token for context in contexts for token in context]
    assert output.context_lengths == [len(context) for context in contexts]
    assert "second" not in TOKENIZER.decode(again.prompt_ids)


def test_a_turn_s_reward_stands_on_its_own_last_token() -> None:
    output, _ = play()
    columns = judge(output, RUN)
    paid = [int(r) for r in columns["rm_scores"].tolist() if r]
    assert paid == [1, 3, 2]  # the turns in the order of the trajectory; turn 0 earns nothing
    ends = [i for i, r in enumerate(columns["rm_scores"].tolist()) if r]
    assert all(output.response_ids[end] == TOKENIZER.eos_token_id for end in ends)
    assert columns["extra_fields"][GAME_KEY]["turn_rewards"]
    assert torch.equal(columns["role_ids"].unique(), torch.tensor([0, 1, 2]))


def test_the_certificate_takes_conversations_of_two_roles_where_there_are_two() -> None:
    one, same, other = (Turn(role, Prompt(({"role": "user", "content": role},)), 1) for role in ("a", "a", "b"))
    dataset = SimpleNamespace(dataframe={"prompt": ["one row"], "extra_info": [{}]})

    def pair_of(turns: list[Turn]) -> list[Turn]:
        game: Any = SimpleNamespace(sample_turns=lambda _: turns, new_game=lambda _: SimpleNamespace(record=None))
        return _short_samples(game, dataset, 1)[1][0]

    assert pair_of([one, same, other]) == [one, other]
    assert pair_of([one, same]) == [one, same]
    with pytest.raises(CertificateError, match="fewer than two conversations"):
        pair_of([one])
