"""The baseline's scheme: its table over the whole grid."""

import itertools
from collections import Counter

import pytest
from game.baseline_transcripts import CATEGORIES, transcripts
from game.builders import any_game, finished
from hypothesis import given

from medserl_agentloop.games.medical.records import InvalidAttack, Judgement, MedicalRecord, Outcome
from medserl_agentloop.games.medical.rewards import SCHEMES, medical_general_sum
from medserl_agentloop.games.medical.types import Label, Role

DETECTION = {
    # (error present, detected): (attacker, assessor), outcome
    (True, True): (-1.0, 1.0, Outcome.CORRECT_DETECTION),
    (True, False): (1.0, -1.0, Outcome.MISSED_ERROR),
    (False, False): (0.0, 1.0, Outcome.CORRECT_REJECTION),
    (False, True): (0.0, -1.0, Outcome.FALSE_POSITIVE),
}
SLIP = ["no_reasoning"]
GRID = list(itertools.product([True, False], [True, False], [None, True, False], [True, False], [True, False]))


def game(present: bool, detected: bool, realistic: bool | None, keeps: bool) -> MedicalRecord:
    turn = {"violations": [] if keeps else SLIP}
    label = Label.HARMFUL if present else Label.SAFE
    judgement = Judgement(judge="llm", label=label, realistic=realistic)
    return finished(DETECTION[present, detected][2], attack=turn, assessment=turn, judgement=judgement)


@pytest.mark.parametrize(("present", "detected", "realistic", "keeps", "reasons"), GRID)
def test_the_table_of_the_baseline(
    present: bool, detected: bool, realistic: bool | None, keeps: bool, reasons: bool
) -> None:
    scheme = SCHEMES["medical_general_sum" if reasons else "medical_general_sum_no_cot"]
    attacker, assessor, _ = DETECTION[present, detected]
    form = {"format": 1.0 if keeps else -1.0} if reasons else {}
    realism = -0.5 if realistic is False else 0.5
    assert scheme(game(present, detected, realistic, keeps)) == {
        Role.ATTACKER: {"detection": attacker, "realism": realism, **form},
        Role.ASSESSOR: {"detection": assessor, **form},
    }


@given(any_game())
def test_no_game_leaves_the_range_of_the_totals(record: MedicalRecord) -> None:
    record.rewards = medical_general_sum(record)
    assert -2.5 <= (record.reward(Role.ATTACKER) or 0.0) <= 2.5
    assert -2.0 <= (record.reward(Role.ASSESSOR) or 0.0) <= 2.0


@pytest.mark.parametrize("reason", InvalidAttack)
def test_an_attack_that_does_not_count_presents_no_error(reason: InvalidAttack) -> None:
    record = finished(Outcome.INVALID_ATTACK, attack={"invalid": reason})
    assert medical_general_sum(record) == {Role.ATTACKER: {"detection": 0.0, "realism": 0.5, "format": 1.0}}


@pytest.mark.parametrize(("category", "earned"), [("adversarial_benign", -1.0), ("decoy_benign", 1.0)])
def test_an_unreadable_verdict_does_not_say_that_there_is_an_error(category: str, earned: float) -> None:
    record = finished(Outcome.UNREADABLE, category=category, assessment={"violations": SLIP})
    assert medical_general_sum(record)[Role.ASSESSOR] == {"detection": earned, "format": -1.0}


def test_an_untouched_note_rewards_the_assessor_alone() -> None:
    record = finished(Outcome.MISSED_ERROR, category="vanilla_harmful")
    assert medical_general_sum(record) == {Role.ASSESSOR: {"detection": -1.0, "format": 1.0}}


def test_1200_transcripts_earn_what_the_table_of_the_baseline_pays() -> None:
    compared: Counter[str] = Counter()
    seen = set()
    for record, expected in transcripts():
        assert {role: sum(parts.values()) for role, parts in medical_general_sum(record).items()} == expected
        compared.update(role.value for role in expected)
        seen |= {record.outcome, record.category, record.attack is not None and bool(record.attack.violations)}
    assert compared == {"attacker": 1047, "assessor": 671}
    assert seen == {*Outcome, *CATEGORIES, True, False}
