"""The baseline's scheme: 1,200 transcripts in its format earn what its table pays."""

import itertools
import random
import re
from collections import Counter

from game.builders import CLEAN_NOTE, ERROR_NOTE, spec

from medserl_agentloop.games.medical.parsing import BASELINE
from medserl_agentloop.games.medical.records import Judgement, MedicalRecord, Outcome
from medserl_agentloop.games.medical.rewards import SCHEMES, medical_general_sum
from medserl_agentloop.games.medical.rules import EditLimits, MedicalGame
from medserl_agentloop.games.medical.types import Category, Label, Role, VanillaAttacker

# They are played by our rules. The table is written here once more, from its text: nothing of it is the package's.
# Those that keep the format, those that have an answer, and those that have none.
FORMS = [
    "{t}</think><answer>{a}</answer>", "{t}</think>\n<answer>\n{a}\n</answer>\n",
    "<think>{t}</think><answer>{a}</answer>", " </think><answer>{a}</answer>", "{t}<answer>{a}</answer>",
    "{t}</think>So: <answer>{a}</answer>", "{t}</think><answer>{a}</answer> Done.",
    "{t}</think></think><answer>{a}</answer>", "<answer>{a}</answer>{t}</think>",
    "{t}</think><answer>{a}</answer></answer>",
    "{t}</think>{a}", "{a}", "{t}</think><answer></answer>", "{t}</think><answer>{a}", "",
]  # fmt: skip
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
        paid = medical_general_sum(record)
        assert {role: sum(parts.values()) for role, parts in paid.items()} == expected
        plain = SCHEMES["medical_general_sum_no_cot"](record)
        assert {role: {**parts, "format": paid[role]["format"]} for role, parts in plain.items()} == paid
        compared.update(role.value for role in expected)
        seen |= {record.outcome, record.category, record.attack is not None and bool(record.attack.violations)}
    assert compared == {"attacker": 1047, "assessor": 671}
    assert seen == {*Outcome, *CATEGORIES, True, False}
