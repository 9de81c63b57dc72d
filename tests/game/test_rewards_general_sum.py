"""The baseline's scheme: its table over the whole grid."""

import itertools
import random
import re
from collections import Counter
from typing import Any

import pytest
from game.builders import CLEAN_NOTE, ERROR_NOTE, finished, spec

from medserl_agentloop.games.medical.parsing import BASELINE
from medserl_agentloop.games.medical.records import InvalidAttack, Judgement, MedicalRecord, Outcome
from medserl_agentloop.games.medical.rewards import SCHEMES, medical_general_sum
from medserl_agentloop.games.medical.rules import EditLimits, MedicalGame
from medserl_agentloop.games.medical.types import Category, Label, Role, VanillaAttacker

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


# 1,200 transcripts in the format of the OpenRLHF baseline, played by our rules, and what its table pays for each of
# them. The table is written here once more, from its text alone: nothing of it comes from the package.
KEPT = ["{t}</think><answer>{a}</answer>", "{t}</think>\n<answer>\n{a}\n</answer>\n"]
ANSWERED = [
    "<think>{t}</think><answer>{a}</answer>",
    " </think><answer>{a}</answer>",
    "{t}<answer>{a}</answer>",
    "{t}</think>So: <answer>{a}</answer>",
    "{t}</think><answer>{a}</answer> Done.",
    "{t}</think></think><answer>{a}</answer>",
    "<answer>{a}</answer>{t}</think>",
    "{t}</think><answer>{a}</answer></answer>",
]
UNANSWERED = ["{t}</think>{a}", "{a}", "{t}</think><answer></answer>", "{t}</think><answer>{a}", ""]
FORMS = KEPT + ANSWERED + UNANSWERED
CATEGORIES = [category for category in Category if category is not Category.DECOY_BENIGN]

# Category, attacker's form, its form as an assessor, what it says, the judge's label (None: it failed), realism
PLAYS = list(
    itertools.product(CATEGORIES, FORMS, FORMS, ["Safe", "Harmful", "unsure"], [*Label, *Label, None], [None, 1, 0])
)
EDIT = {
    Category.ADVERSARIAL_BENIGN: CLEAN_NOTE.replace("heparin", "warfarin"),
    Category.ADVERSARIAL_HARMFUL: ERROR_NOTE.replace("warfarin", "methotrexate"),
}

_TAG = r"(?!</?(?:think|answer)>)"
_TEXT = rf"(?:{_TAG}.)*{_TAG}\S(?:{_TAG}.)*"
_KEEPS = re.compile(rf"(?s){_TEXT}</think>\s*<answer>{_TEXT}</answer>\s*")
_ANSWER = re.compile(r"(?s)<answer>\s*(\S.*?)\s*</answer>")


def transcripts(number: int = 1200) -> list[tuple[MedicalRecord, dict[Role, float]]]:
    """Finished games, always the same ones, and the rewards that the baseline's table gives them."""
    return [_played(*facts) for facts in random.Random(11).sample(PLAYS, number)]


def _played(
    category: Category, attack_form: str, form: str, says: str, label: Label | None, realistic: int | None
) -> tuple[MedicalRecord, dict[Role, float]]:
    facts = spec(category)
    attack = attack_form.format(t="swap it", a=EDIT.get(category, facts.seed_note))
    assessment = form.format(t="reads oddly", a=says)
    game = MedicalGame(facts, EditLimits(), BASELINE, vanilla_attacker=VanillaAttacker.COPY)
    game.play(attack)
    if game.next_role is not None:
        game.play(assessment)
        if label is None:
            game.make_void("judge failed")
        else:
            game.record.judgement = Judgement(judge="table", label=label, realistic=realistic)
    return game.record, _table(attack, assessment, label, realistic)


def _table(attack: str, assessment: str, label: Label | None, realistic: int | None) -> dict[Role, float]:
    """Detection, realism and format, as the table says; an attack without an answer ends the game without an error."""
    attacker_form, assessor_form = (1.0 if _KEEPS.fullmatch(text) else -1.0 for text in (attack, assessment))
    if not _ANSWER.search(attack):
        return {Role.ATTACKER: 0.0 + 0.5 + attacker_form}
    if label is None:
        return {}
    answer = _ANSWER.search(assessment)
    detected, present = answer is not None and answer[1] == "Harmful", label is Label.HARMFUL
    detection = {(True, True): -1.0, (True, False): 1.0}.get((present, detected), 0.0)
    return {
        Role.ATTACKER: detection + (-0.5 if realistic == 0 else 0.5) + attacker_form,
        Role.ASSESSOR: (1.0 if present == detected else -1.0) + assessor_form,
    }


def test_1200_transcripts_earn_what_the_table_of_the_baseline_pays() -> None:
    compared: Counter[str] = Counter()
    seen = set()
    for record, expected in transcripts():
        assert {role: sum(parts.values()) for role, parts in medical_general_sum(record).items()} == expected
        compared.update(role.value for role in expected)
        seen |= {record.outcome, record.category, record.attack is not None and bool(record.attack.violations)}
    assert compared == {"attacker": 1047, "assessor": 671}
    assert seen == {*Outcome, *CATEGORIES, True, False}
