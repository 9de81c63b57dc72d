"""The judge reads the presented note while the assessor does."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from game.builders import CLEAN_NOTE, HARMFUL_ANSWER, attack_text
from omegaconf import OmegaConf
from serving import LocalServer, completion
from support import TOKENIZER, assessment_text, play, run_with, scored
from support import attack_text as attack_on_note
from verl.trainer.ppo.reward import load_reward_manager

from medserl_agentloop.core.interaction import Message, NoReplyError, Reply, Turn, play_game
from medserl_agentloop.core.trajectory import GAME_KEY
from medserl_agentloop.games.medical.case import Category, GameSpec, Label, Role
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.records import MedicalRecord

PRESENT = '{"reason": "the dose", "error": "present", "realistic": true}'
PATIENCE_S = 10  # far more than two events take; only a failing test waits so long


class Players:
    """An attacker that injects an error, and an assessor that answers once the judge is asked."""

    name = ""

    def __init__(self, judge_is_asked: threading.Event, *, gives_up: bool = False) -> None:
        self.begun, self._judge_is_asked = threading.Event(), judge_is_asked
        self._gives_up = gives_up

    async def reply(self, turn: Turn, messages: Sequence[Message]) -> Reply:
        if turn.role == Role.ATTACKER:
            return Reply(attack_text(CLEAN_NOTE.replace("500 units", "5 grams")))
        self.begun.set()
        assert await asyncio.to_thread(self._judge_is_asked.wait, PATIENCE_S)
        if self._gives_up:
            raise NoReplyError("the assessor is gone")
        return Reply(HARMFUL_ANSWER)


def play_with(server: LocalServer, players: Players) -> MedicalRecord:
    config = MedicalConfig(judge="llm", judge_server=server.model_options(timeout_s=PATIENCE_S))
    interaction = MedicalGameInteraction(config)
    game = interaction.start(GameSpec(Category.ADVERSARIAL_BENIGN, Label.HARMFUL, CLEAN_NOTE))
    asyncio.run(play_game(interaction, game, dict.fromkeys(interaction.roles, players)))
    return game.record


def test_a_game_lasts_as_long_as_the_slower_of_judge_and_assessor() -> None:
    """Each of them answers only once the other one was asked."""
    asked = threading.Event()
    players = Players(asked)

    def reply(number: int, body: Any) -> Any:
        asked.set()
        assert players.begun.wait(PATIENCE_S)
        return completion(PRESENT)

    with LocalServer(reply) as server:
        record = play_with(server, players)
    assert record.void is None and record.judgement is not None
    assert record.judgement.label is Label.HARMFUL and record.assessment is not None


def test_the_question_about_a_game_without_an_assessment_is_cancelled() -> None:
    asked, over = threading.Event(), threading.Event()

    def reply(number: int, body: Any) -> Any:
        asked.set()
        over.wait(PATIENCE_S)
        return completion(PRESENT)

    with LocalServer(reply) as server:
        record = play_with(server, Players(asked, gives_up=True))
        over.set()
    assert (record.void, record.judgement) == ("the assessor is gone", None)


@pytest.mark.parametrize("served_by_verl", [False, True])
def test_the_reward_manager_asks_only_a_judge_that_verl_serves(served_by_verl: bool) -> None:
    with LocalServer(lambda number, body: completion(PRESENT)) as server:
        run = run_with(selfplay__judge="llm")
        address = {}
        if served_by_verl:
            for key, value in (("enable", True), ("model_path", "models/judge")):
                OmegaConf.update(run, f"reward.reward_model.{key}", value)
            address["reward_router_address"] = server.url.removeprefix("http://")
        else:
            run.selfplay.judge_server = server.model_options().model_dump()
        output, record, _ = play([attack_on_note(), assessment_text()], run=run)
        assert (record.judgement is None) == served_by_verl
        assert len(server.requests) == int(not served_by_verl)
        manager = load_reward_manager(run, TOKENIZER, **address)
        answer = asyncio.run(scored(manager, output.extra_fields[GAME_KEY]))
        assert len(server.requests) == 1
    assert answer["reward_extra_info"][GAME_KEY].judgement.label is Label.HARMFUL
