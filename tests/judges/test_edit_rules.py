"""Edits by rule: each rule on its places, and on the places that it must leave alone."""

import random
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medserl_agentloop.evaluation.edit_rules import DRESSED, HARMLESS, UNKNOWABLE
from medserl_agentloop.games.medical.edits import compare_notes

EXAMPLES = {
    "number_format": "She takes aspirin 81 mg. > She takes aspirin 81.0 mg. | It is 38.5°C. > It is 38.50°C.",
    "digit_grouping": "Platelets are 150,000/mm3. > Platelets are 150000/mm3.",
    "unit_spelling": "She takes 81 mg. > She takes 81 milligrams. | She gets 1mg once. > She gets 1 milligram once.",
    "number_word": "It began 3 days ago. > It began three days ago. | For two weeks. > For 2 weeks.",
    "abbreviation": "An ECG is normal. > An electrocardiogram is normal. | Magnetic resonance imaging is done. > MRI "
    "is done. | Her blood pressure is low. > Her BP is low.",
    "spelling": "Diarrhea began. > Diarrhoea began. | There is no edema. > There is no oedema.",
    "hyphen": "A 52-year-old man. > A 52 year old man.",
    "case": "He has severe pain. > He has SEVERE pain.",
}
LEFT_ALONE = {
    "number_format": "Take 5-10 mg. | Pressure is 120/80 mm Hg. | Give 1,000 mg. | She is T4 mg. | On day 3.",
    "digit_grouping": "Grades 1, 2. | On 1,2,3. | Give 1000 mg.",
    "unit_spelling": "Creatinine is 1.2 mg/dL. | The mg is unknown. | A 5 mgx note.",
    "number_word": "It takes 2-3 days. | It lasted 1.5 days. | He has 3 children.",
    "abbreviation": "G-DVT-1 is new. | He has MS and PE. | BP is 120.",
    "spelling": "He is well. | Angioedema-like.",
    "hyphen": "A well-known man. | A year-old rumour.",
    "case": "Give 50 units. | A PE is seen.",
}


@pytest.mark.parametrize("rule", HARMLESS)
def test_a_rule_says_the_same_in_another_way_and_leaves_alone_what_it_cannot_be_sure_of(rule: str) -> None:
    for example in EXAMPLES[rule].split(" | "):
        note, expected = example.split(" > ")
        assert HARMLESS[rule](note, random.Random(0)) == expected
    for note in LEFT_ALONE[rule].split(" | "):
        assert HARMLESS[rule](note, random.Random(0)) is None, note


KNEE = "A 54-year-old man has a swollen left knee since 5 days ago. He takes ibuprofen at home. Gout is likely."


@pytest.mark.parametrize(
    ("rule", "changed", "left_alone"),
    [
        ("age", r"A 5[1267]-year-old man", [KNEE + " He is old for his age of 54.", "A 4-year-old boy has fever."]),
        ("side", "right knee", [KNEE + " The left knee is warm.", "Both knees are, the left hemisphere is not."]),
        ("time", r"since [2-46-9] days ago", [KNEE + " It began long ago."]),
        (
            "alternative",
            "takes naproxen at",
            ["He takes ibuprofen 400 mg at home.", "He takes ibuprofen at home. Stop ibuprofen."],
        ),
    ],
)
def test_a_rule_changes_one_fact_unless_something_else_in_the_note_decides_it(
    rule: str, changed: str, left_alone: list[str]
) -> None:
    after = UNKNOWABLE[rule](KNEE, random.Random(0))
    assert after is not None and re.search(changed, after)
    edit = compare_notes(KNEE, after)
    assert (edit.sentences, edit.words) == (1, 1)
    assert all(UNKNOWABLE[rule](note, random.Random(0)) is None for note in left_alone)


NOTE = "A 52-year-old woman has chest pain. She receives heparin 500 mg."


@pytest.mark.parametrize("rule", DRESSED)
def test_a_dressed_note_shows_a_reader_what_it_showed_before(rule: str) -> None:
    dressed = DRESSED[rule](NOTE, random.Random(1))
    assert dressed is not None and dressed != NOTE
    back = {"а": "a", "с": "c", "е": "e", "о": "o", "р": "p", "х": "x", "у": "y", "_": " "}  # noqa: RUF001
    visible = [c for c in unicodedata.normalize("NFKC", dressed) if unicodedata.category(c) not in ("Cf", "Mn")]
    assert "".join(back.get(c, c) for c in visible).split() == NOTE.split()


@given(st.text(st.sampled_from("aA b1,.-/mg°2 or and days ECG")), st.integers(0, 3))
def test_a_rule_changes_a_note_or_has_no_place_for_it(note: str, seed: int) -> None:
    for rule in (*HARMLESS.values(), *DRESSED.values()):
        edited = rule(note, random.Random(seed))
        assert edited != note
        assert edited == rule(note, random.Random(seed))
