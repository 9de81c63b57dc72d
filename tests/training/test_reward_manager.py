"""The reward manager scores with the scheme that the run names, one of a user's included."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from game.builders import HARMFUL_ANSWER, game
from support import TOKENIZER, run_with
from verl import DataProto

from medserl_agentloop.core.metrics import game_metrics
from medserl_agentloop.core.reward_manager import PerTurnRewardManager
from medserl_agentloop.core.trajectory import GAME_KEY
from medserl_agentloop.games.kuhn_poker import KuhnRecord
from medserl_agentloop.games.medical.records import MedicalRecord
from medserl_agentloop.games.medical.rewards import medical_general_sum
from medserl_agentloop.games.medical.types import Role
from medserl_agentloop.testing.tiny import compose_run


def answer_to(record: Any, run: Any) -> dict[str, Any]:
    """What verl gets for one finished game."""
    fields = np.array([{GAME_KEY: record.to_json()}], dtype=object)
    data = DataProto.from_dict(non_tensors={"tool_extra_fields": fields})
    return asyncio.run(PerTurnRewardManager(run, TOKENIZER).run_single(data))


def scored(reward: str) -> tuple[MedicalRecord, dict[str, Any]]:
    played = game("vanilla_harmful")
    played.play(HARMFUL_ANSWER)
    answer = answer_to(played.record, run_with(selfplay__reward=reward))
    return MedicalRecord.model_validate(answer["reward_extra_info"][GAME_KEY]), answer


def test_a_run_of_the_baseline_s_scheme_gets_its_components() -> None:
    record, answer = scored("medical_general_sum")
    assert record.rewards == medical_general_sum(record) == {Role.ASSESSOR: {"detection": 1.0, "format": 1.0}}
    assert (record.scheme, answer["reward_score"]) == ("medical_general_sum", 2.0)


def test_a_user_s_scheme_is_named_by_its_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run_rewards.py").write_text(
        "from medserl_agentloop.games.medical.types import Role\n"
        "def flat(record): return {Role.ASSESSOR: {'flat': 0.25}}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    record, answer = scored("run_rewards:flat")
    assert record.rewards == {Role.ASSESSOR: {"flat": 0.25}}
    assert (record.scheme, answer["reward_extra_info"]["assessor_reward"]) == ("run_rewards:flat", 0.25)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_makes_its_game_void(number: float) -> None:
    record = KuhnRecord(cards=("Q", "K"), rewards={"first": {"chips": 1.0}, "second": {"chips": number}})
    answer = answer_to(record, compose_run("+recipes=kuhn_poker"))
    scored = KuhnRecord.model_validate(answer["reward_extra_info"][GAME_KEY])
    assert (scored.void, scored.rewards, answer["reward_score"]) == (f"reward 'chips' is no number: {number}", {}, 0)
    assert game_metrics([scored], ["first"])["selfplay/void/no_number"] == 1
