"""The baseline's scheme: its table over the whole grid."""

import itertools
from collections import Counter
from typing import Any

import pytest
from game.baseline_transcripts import CATEGORIES, transcripts
from game.builders import finished

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


UNREADABLE = {"outcome": Outcome.UNREADABLE, "assessment": {"violations": SLIP}}
REFUSED = {Role.ATTACKER: {"detection": 0.0, "realism": 0.5, "format": 1.0}}


@pytest.mark.parametrize(
    ("parts", "rewards"),
    [
        *(({"outcome": Outcome.INVALID_ATTACK, "attack": {"invalid": reason}}, REFUSED) for reason in InvalidAttack),
        # An unreadable verdict does not say that there is an error.
        (UNREADABLE, {Role.ASSESSOR: {"detection": -1.0, "format": -1.0}}),
        ({**UNREADABLE, "category": "decoy_benign"}, {Role.ASSESSOR: {"detection": 1.0, "format": -1.0}}),
        (
            {"outcome": Outcome.MISSED_ERROR, "category": "vanilla_harmful"},
            {Role.ASSESSOR: {"detection": -1.0, "format": 1.0}},
        ),
    ],
)
def test_a_game_without_an_attack_or_a_verdict_has_its_row_too(
    parts: dict[str, Any], rewards: dict[Role, dict[str, float]]
) -> None:
    record = finished(**parts)
    paid = medical_general_sum(record)
    if record.outcome is Outcome.UNREADABLE:
        del paid[Role.ATTACKER]
    assert paid == rewards


def test_1200_transcripts_earn_what_the_table_of_the_baseline_pays() -> None:
    compared: Counter[str] = Counter()
    seen = set()
    for record, expected in transcripts():
        assert {role: sum(parts.values()) for role, parts in medical_general_sum(record).items()} == expected
        compared.update(role.value for role in expected)
        seen |= {record.outcome, record.category, record.attack is not None and bool(record.attack.violations)}
    assert compared == {"attacker": 1047, "assessor": 671}
    assert seen == {*Outcome, *CATEGORIES, True, False}
