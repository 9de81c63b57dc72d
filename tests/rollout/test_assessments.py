"""Four assessments of one attack, as tokens: contexts, rewards in their places, credit, and room for all of them."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support import RUN, TOKENIZER, assessment_text, attack_text, extra_info, judge, play, run_with

from medserl_agentloop.core.advantages import ROLE_ESTIMATORS, Baselines, RoleBatch
from medserl_agentloop.core.columns import context_ids, stacked
from medserl_agentloop.core.config import ConfigError, CreditSettings, SelfPlayConfig
from medserl_agentloop.core.encoding import ChatEncoder
from medserl_agentloop.core.trajectory import GAME_KEY, SelfPlayOutput
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.judges import LabelJudge
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord
from medserl_agentloop.games.medical.types import Role

K = 4
SAID = [assessment_text("harmful"), assessment_text("safe"), "FIRST-SECRET", assessment_text("harmful", "Nothing.")]
FOUR = run_with(selfplay__assessments=K)
ROLES = [role.value for role in Role]


class Counting(LabelJudge):
    asked = 0

    async def judge(self, record: MedicalRecord) -> Judgement:
        Counting.asked += 1
        return await super().judge(record)


def scored(*said: str, run: Any = FOUR, category: str = "adversarial_benign") -> tuple[SelfPlayOutput, dict[str, Any]]:
    replies = [attack_text(), *said] if category.startswith("adversarial") else list(said)
    output, _, _ = play(replies, category, run)
    return output, judge(output, run)


def ends(output: SelfPlayOutput) -> list[int]:
    """Where each turn's last token is, in the order of play."""
    return [end for _, _, end in output.turn_ends]


def test_every_assessor_reads_the_prompt_of_a_single_one_and_nothing_else() -> None:
    _, _, one = play([attack_text(), SAID[0]])
    output, record, four = play([attack_text(), *SAID], run=FOUR)
    assert [call.prompt_ids for call in four.calls] == [one.calls[0].prompt_ids, *[one.calls[1].prompt_ids] * K]
    assert output.context_lengths == [len(call.prompt_ids) + len(call.output.token_ids) for call in four.calls]
    contexts = [token for call in four.calls for token in (*call.prompt_ids, *call.output.token_ids)]
    assert [*output.prompt_ids, *output.response_ids] == contexts
    assert [len(game.further_assessments) for game in record.by_assessment] == [K - 1] * K
    assert [game.assessment.response for game in record.by_assessment if game.assessment] == SAID


def test_each_assessment_is_paid_at_its_own_last_token_and_the_judge_is_asked_once() -> None:
    Counting.asked = 0
    output, columns = scored(*SAID, run=run_with(selfplay__assessments=K, selfplay__judge=f"{__name__}:Counting"))
    assert Counting.asked == 1
    record = MedicalRecord.model_validate(columns["extra_fields"][GAME_KEY])
    right, wrong, unreadable, elsewhere = (game.reward(Role.ASSESSOR) for game in record.by_assessment)
    assert right == 1.25 and wrong == -1.0 and elsewhere == 0.75
    assert unreadable is not None and unreadable < wrong
    attacker = record.reward(Role.ATTACKER)
    assert attacker == pytest.approx(sum(record.rewards[Role.ATTACKER].values()))
    assert record.rewards[Role.ATTACKER]["game"] == pytest.approx((-1 + 1 + 0 - 1) / K)
    scores = columns["rm_scores"].tolist()
    assert [scores[end] for end in ends(output)] == pytest.approx([attacker, right, wrong, unreadable, elsewhere])
    assert sum(score != 0 for score in scores) == 1 + K


def test_untouched_notes_are_assessed_as_often_and_evaluation_rows_once() -> None:
    _, record, engine = play(SAID, "vanilla_harmful", FOUR)
    assert len(engine.calls) == len(record.by_assessment) == K
    _, record, engine = play(SAID[:1], "vanilla_harmful", FOUR, split="eval")
    assert len(engine.calls) == len(record.by_assessment) == 1


@cache
def two_games() -> tuple[RoleBatch, list[list[int]]]:
    """Two games on one note with four assessments each, from verl's columns, and where each turn ends."""
    games = [scored(*SAID), scored(*SAID[2:], *SAID[:2])]
    width = max(len(output.response_ids) for output, _ in games)

    def padded(name: str) -> torch.Tensor:
        return torch.stack([torch.nn.functional.pad(c[name], (0, width - len(c[name]))) for _, c in games])

    mask = padded("response_mask")
    batch = RoleBatch(
        rewards=padded("rm_scores"),
        mask=mask,
        role_ids=padded("role_ids"),
        roles=ROLES,
        groups=["note", "note"],
        kinds=["adversarial_benign"] * 2,
        conversations=stacked(
            [context_ids(columns["context_lengths"], len(output.response_ids)) for output, columns in games], mask
        ),
        repeated_roles=interaction(assessments=K).repeated_roles,
        values=torch.zeros(mask.shape),
    )
    return batch, [ends(output) for output, _ in games]


def interaction(**changes: Any) -> MedicalGameInteraction:
    return MedicalGameInteraction(MedicalConfig(**changes))


def advantages(name: str, how: str, batch: RoleBatch) -> torch.Tensor:
    settings = CreditSettings.model_validate({"normalize": dict.fromkeys(ROLES, how)})
    return ROLE_ESTIMATORS[name](batch, settings, Baselines()).advantages


@pytest.mark.parametrize("turn", range(1, 1 + K))
@pytest.mark.parametrize(
    ("name", "how", "own_share", "others_share"),
    [
        *((name, "none", 1.0, 0.0) for name in ("role_rae", "role_reinforce_pp", "role_gae")),
        ("role_rloo", "none", 1.0, 1 / (K - 1)),
        ("role_grpo", "mean", 1 - 1 / K, 1 / K),
    ],
)
def test_a_reward_moves_its_own_assessment_and_through_a_shared_baseline_those_of_the_same_note_alone(
    name: str, how: str, own_share: float, others_share: float, turn: int
) -> None:
    batch, places = two_games()
    assert batch.conversations is not None
    rewards = batch.rewards.clone()
    rewards[0, places[0][turn]] += 3.0
    moved = advantages(name, how, replace(batch, rewards=rewards)) - advantages(name, how, batch)
    assessors = (batch.role_ids == Role.ASSESSOR.id) & (batch.mask > 0)
    assessors[1] = False
    own = assessors & (batch.conversations == turn)
    assert torch.allclose(moved[own], torch.tensor(3.0 * own_share), atol=1e-5)
    assert torch.allclose(moved[assessors & ~own], torch.tensor(-3.0 * others_share), atol=1e-5)
    assert not moved[~assessors].any()  # neither the attacker's tokens nor the answers to another attack's note


def test_the_longest_game_fits_into_its_plan() -> None:
    long = "a" * 4000  # a token per character
    game = MedicalGameInteraction(SelfPlayConfig.from_run(FOUR), ChatEncoder(TOKENIZER))
    row = extra_info("adversarial_benign")
    first = game.next_turn(game.new_game(row))
    assert first is not None
    prompt, response = game.plan(row, first.prompt.filled(), ChatEncoder(TOKENIZER))
    run = run_with(
        selfplay__assessments=K,
        actor_rollout_ref__rollout__response_length=response,
        actor_rollout_ref__rollout__prompt_length=prompt,
    )
    output, record, _ = play([attack_text(), *[long] * K], run=run)
    assert record.void is None
    assert [game.assessment.tokens for game in record.by_assessment if game.assessment] == [400] * K
    assert len(output.response_ids) <= response


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"selfplay__assessments": 2, "selfplay__context": "shared"}, "Set selfplay.context=isolated"),
        ({"selfplay__reward": "learnable"}, "Set selfplay.assessments to 2 or more"),
        ({"selfplay__assessments": 0}, "selfplay.assessments"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SelfPlayConfig.from_run(run_with(**changes))
    assert SelfPlayConfig.from_run(run_with(selfplay__assessments=2, selfplay__reward="learnable"))
    assert SelfPlayConfig.from_run(RUN).assessments == 1
