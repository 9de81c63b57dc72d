"""The judge reads the presented note while the assessor does, wherever it is served."""

import asyncio
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from game.builders import CLEAN_NOTE, HARMFUL_ANSWER, attack_text
from omegaconf import OmegaConf
from serving import LocalServer, completion
from support import assessment_text, play, run_with
from support import attack_text as attack_on_note
from verl.experimental.reward_loop.reward_loop import RewardLoopManager
from verl.trainer.ppo.v1 import PPOTrainerSync

from medserl_agentloop.core.encoding import Message
from medserl_agentloop.core.interaction import NoReplyError, Reply, Turn, play_game
from medserl_agentloop.core.trainer import SelfPlayTrainer
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


def test_the_agent_loop_asks_a_judge_that_verl_serves(monkeypatch: Any) -> None:
    run = run_with(selfplay__judge="llm")
    OmegaConf.update(run, "reward.reward_model.model_path", "models/judge")
    with LocalServer(lambda number, body: completion(PRESENT)) as server:
        address = server.url.removeprefix("http://")
        trainer = object.__new__(SelfPlayTrainer)
        trainer.config, trainer.roles = run, {}
        trainer.selfplay = SimpleNamespace(credit=SimpleNamespace(loss="batch"))
        trainer.actor_rollout_wg = SimpleNamespace(set_loss_fn=lambda loss: None)

        def set_up(trainer: Any) -> None:
            trainer.reward_loop_manager = object.__new__(RewardLoopManager)
            trainer.reward_loop_manager.reward_router_address = address

        monkeypatch.setattr(PPOTrainerSync, "_setup", set_up)
        monkeypatch.setattr(SelfPlayTrainer, "_certify", lambda trainer: None)
        trainer._setup()
        _, record, _ = play([attack_on_note(), assessment_text()], run=run)
    assert [body["model"] for body in server.requests] == ["models/judge"]
    assert record.judgement is not None and record.judgement.label is Label.HARMFUL
