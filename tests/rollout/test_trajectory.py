"""The columns that reach verl: each role's reward on its own last token, nothing for void games."""

from typing import Any

import pytest
import torch
from support import assessment_text, attack_text, judge, play, run_with

from medserl_agentloop.core.trajectory import GAME_KEY
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord
from medserl_agentloop.games.medical.types import Role


def test_rewards_sit_on_the_last_token_of_each_role() -> None:
    output, _, engine = play([attack_text(), assessment_text()])
    columns = judge(output)
    record = MedicalRecord.model_validate(columns["extra_fields"][GAME_KEY])
    attacker_end = len(engine.calls[0].output.token_ids) - 1
    expected = torch.zeros(len(output.response_ids))
    expected[attacker_end] = record.reward(Role.ATTACKER)
    expected[-1] = record.reward(Role.ASSESSOR)
    assert torch.equal(columns["rm_scores"], expected)
    assert record.reward(Role.ATTACKER) != 0 != record.reward(Role.ASSESSOR)
    assert columns["rm_scores"].sum().item() == pytest.approx(output.reward_score)


def test_columns_have_the_dtypes_and_lengths_verl_needs() -> None:
    columns = judge(play([attack_text(), assessment_text()])[0])
    length = columns["responses"].shape
    for name, dtype in {
        "response_mask": torch.int64,
        "role_ids": torch.int64,
        "rm_scores": torch.float32,
        "rollout_log_probs": torch.float32,
    }.items():
        assert columns[name].shape == length, name
        assert columns[name].dtype == dtype, name


def test_an_invalid_attack_rewards_the_attacker_alone() -> None:
    columns = judge(play(["nothing"])[0])
    assert columns["rm_scores"][:-1].eq(0).all()
    assert columns["rm_scores"][-1] == -2.5  # invalid -2, format -0.5


def test_reward_extra_info_holds_numbers_and_texts_only() -> None:
    """verl's validation averages numbers, leaves texts alone, and fails on lists."""
    info = judge(play([attack_text(), assessment_text()])[0])["extra_fields"]["reward_extra_info"]
    assert info["acc"] == 1.0
    assert all(value is None or isinstance(value, (float, str)) for value in info.values())


class BrokenJudge:
    name = "broken"

    async def judge(self, record: MedicalRecord) -> Judgement:
        raise TimeoutError("the judge is down")


class AbstainingJudge:
    name = "abstaining"

    async def judge(self, record: MedicalRecord) -> Judgement:
        return Judgement(judge=self.name, label=None)


@pytest.mark.parametrize("broken", [BrokenJudge, AbstainingJudge])
def test_a_judge_that_fails_or_abstains_voids_the_game(broken: Any) -> None:
    run = run_with(selfplay__judge=f"{__name__}:{broken.__name__}")
    columns = judge(play([attack_text(), assessment_text()])[0], run)
    assert columns["response_mask"].eq(0).all()
    assert columns["rm_scores"].eq(0).all()
    assert MedicalRecord.model_validate(columns["extra_fields"][GAME_KEY]).void is not None


def test_an_output_without_a_judged_game_is_refused() -> None:
    output = play([attack_text(), assessment_text()])[0]
    output.reward_score = 1.0
    with pytest.raises(ValueError, match="PerTurnRewardManager"):
        output.as_dict()


def test_the_reward_manager_refuses_trajectories_that_are_no_games() -> None:
    output = play([attack_text(), assessment_text()])[0]
    del output.extra_fields[GAME_KEY]
    with pytest.raises(ValueError, match="agent_name=medserl_selfplay"):
        judge(output)
