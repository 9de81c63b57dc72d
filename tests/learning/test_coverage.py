"""The reward for kinds of error that are seldom put in."""

import copy

import pytest
from game.builders import finished
from hypothesis import given
from hypothesis import strategies as st

from experiments.learning.coverage import Coverage, KindShares
from medserl_agentloop.games.medical.case import Label, Role
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord, Outcome
from medserl_agentloop.games.medical.rewards import Medserl, reward_game

KINDS = ("dose", "drug", "management")


@given(st.lists(st.sampled_from(KINDS), max_size=200))
def test_surprise_is_zero_on_average_and_larger_for_the_rarer_kind(attacks: list[str]) -> None:
    shares = KindShares()
    for kind in (*KINDS, *attacks):
        shares.surprise(kind)
    surprise = {kind: copy.deepcopy(shares).surprise(kind) for kind in KINDS}
    counts = shares.counts
    assert sum(counts[kind] * surprise[kind] for kind in KINDS) == pytest.approx(0.0, abs=1e-9)
    assert sorted(KINDS, key=surprise.__getitem__, reverse=True) == sorted(
        KINDS, key=counts.__getitem__
    )


def test_kind_is_forgotten_as_others_come() -> None:
    shares = KindShares()
    for kind in ["dose"] * 100 + ["drug"] * 300:
        shares.surprise(kind)
    assert shares.counts["dose"] == pytest.approx(1.0, abs=0.2) and shares.counts["drug"] > 40


def attack_with(kind: str | None, category: str = "adversarial_benign") -> MedicalRecord:
    harmful = category == "adversarial_benign"
    judgement = Judgement(
        judge="oracle", label=Label.HARMFUL if harmful else Label.SAFE, error_type=kind
    )
    outcome = Outcome.MISSED_ERROR if harmful else Outcome.CORRECT_REJECTION
    return finished(outcome, category=category, judgement=judgement)


def test_attacks_that_count_earn_medserl_and_coverage() -> None:
    bonuses = []
    for attack in [attack_with(kind) for kind in ["dose"] * 20 + ["drug"]]:
        rewards = Coverage().rewards(attack)
        bonuses.append(rewards[Role.ATTACKER].pop("coverage"))
        assert rewards == Medserl().rewards(attack)
    assert bonuses[-1] > 2.0 > bonuses[-2], "the first drug error after twenty of dose"


@pytest.mark.parametrize(
    "record", [attack_with(None), attack_with("dose", "decoy_benign")], ids=["unnamed", "decoy"]
)
def test_an_attack_without_a_kind_and_a_rewording_earn_medserl(record: MedicalRecord) -> None:
    assert Coverage(decoy=1.0).rewards(record) == Medserl(decoy=1.0).rewards(record)
    reward_game(record, Coverage())
    assert record.rewards
