"""Validation games against a frozen model: who plays which role, on which rows, and what is logged."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from rollout.opponent_server import OpponentServer, opponent_server
from support import REWRITTEN, ROW, TOKENIZER, assessment_text, attack_text, extra_info, run_with

from medserl_agentloop.core.config import ConfigError
from medserl_agentloop.core.dataset import add_yardstick
from medserl_agentloop.core.metrics import yardstick_metrics
from medserl_agentloop.core.run_check import check_run
from medserl_agentloop.core.trajectory import GAME_KEY
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.records import MedicalRecord
from medserl_agentloop.games.medical.types import Role
from medserl_agentloop.testing.mock_engine import MockSGLangEngine
from medserl_agentloop.testing.tiny import build_agent_loop, compose_run


@pytest.fixture(scope="module")
def server() -> Iterator[OpponentServer]:
    with opponent_server() as server:
        server.answer = lambda messages: (
            attack_text() if "You are the attacker" in messages[-1]["content"] else assessment_text()
        )
        yield server


def play(server: OpponentServer, source: str, replies: list[str]) -> tuple[set[int], MedicalRecord]:
    """Roles whose tokens are in the trajectory, and the record."""
    run = run_with(selfplay__yardstick__url=server.url, selfplay__yardstick__games=2)

    async def game() -> Any:
        loop = build_agent_loop(MockSGLangEngine(replies, TOKENIZER, log_prob=-1.0), TOKENIZER, run)
        sampling = {"temperature": 1.0, "logprobs": True}
        return await loop.run(sampling, extra_info=extra_info("adversarial_benign"), data_source=source, **ROW)

    output = asyncio.run(game())
    return set(output.role_ids) - {0}, MedicalRecord.model_validate(output.extra_fields[GAME_KEY])


@pytest.mark.parametrize(
    ("role", "reply", "frozen"),
    [(Role.ATTACKER, attack_text(), "assessor"), (Role.ASSESSOR, assessment_text(), "attacker")],
)
def test_the_policy_plays_one_role_and_the_yardstick_the_other(
    server: OpponentServer, role: Role, reply: str, frozen: str
) -> None:
    roles, record = play(server, f"yardstick/{role.value}", [reply])
    assert roles == {role.id} and record.presented_note == REWRITTEN and record.assessment is not None
    assert record.opponent is not None
    assert record.opponent.model_dump() == {"role": frozen, "kind": "yardstick", "version": "frozen-7b"}


def test_all_other_rows_are_the_policy_s_in_both_roles(server: OpponentServer) -> None:
    roles, record = play(server, "medec_ms/adversarial_benign", [attack_text(), assessment_text()])
    assert roles == {Role.ATTACKER.id, Role.ASSESSOR.id} and record.opponent is None


def test_rows_that_both_roles_play_are_added_once_for_each_role() -> None:
    categories = ["vanilla_benign", "adversarial_benign", "vanilla_harmful", "adversarial_benign", "adversarial_benign"]
    rows = [{"data_source": "toy", "extra_info": extra_info(c, index=n)} for n, c in enumerate(categories)]
    dataset = SimpleNamespace(dataframe=Dataset.from_list(rows))
    interaction = MedicalGameInteraction(MedicalConfig())
    add_yardstick(dataset, interaction, 2)
    added = list(dataset.dataframe)[5:]
    assert [row["data_source"] for row in added] == ["yardstick/attacker"] * 2 + ["yardstick/assessor"] * 2
    assert [row["extra_info"]["index"] for row in added] == [1, 3, 1, 3]
    with pytest.raises(ConfigError, match="has 7 rows that begin with the attacker's turn"):
        add_yardstick(dataset, interaction, 8)


def test_the_numbers_are_means_by_role_and_other_rows_are_left_out() -> None:
    sources = ["toy", "yardstick/attacker", "yardstick/attacker", "yardstick/assessor"]
    facts = {"undetected": [1.0, 1.0, 0.0, None], "answer": ["a", "b", "c", "d"]}
    assert yardstick_metrics(sources, facts) == {
        "selfplay/yardstick/attacker/games": 2.0,
        "selfplay/yardstick/attacker/undetected": 0.5,
        "selfplay/yardstick/assessor/games": 1.0,
    }
    assert yardstick_metrics(["toy"], {"undetected": [1.0]}) == {}


SET = ("selfplay.yardstick.games=8", "selfplay.yardstick.url=http://localhost:1", "trainer.test_freq=10")


def test_a_run_with_a_yardstick_composes() -> None:
    assert check_run(compose_run("+recipes=quickstart", *SET)).yardstick.games == 8


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.test_freq=-1", "is played by validation"),
        ("selfplay.context=shared", "selfplay.context=shared is one conversation"),
        ("selfplay.yardstick.url=null", "selfplay.yardstick.url"),
    ],
)
def test_a_yardstick_that_nobody_can_play_is_refused(override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_run(compose_run("+recipes=quickstart", *SET, override))
