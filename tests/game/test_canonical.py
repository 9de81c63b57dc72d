"""The comparison of two notes: dressing makes no difference, and everything else does."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from note_files import OFFICIAL, PAIRS, medec_file

from medserl_agentloop.data.reader import read_files
from medserl_agentloop.games.medical.canonical import canonical_words, quotes_error, says_the_same

DRESSED = [
    ("81 mg, .5 mg", "81.0mg, 0.50 mg"), ("5,000 units at 08:30", "5000 units at 8:30"),
    ("5\u00bd tablets, 10\u00b2 cells", "5 1/2 tablets, 10^2 cells"),
    ("\uff15\uff10 mg", "\u0665\u0660 mg"), ("follow-up b.i.d.", "followup BID"),
    ("He has GOUT.He rests", "he  has\n\ngout; He rests"), ("5\u201310 mg", "5 - 10 mg"),
    ("a 35-year-old man's x-ray", "a 35 year old man\u2019s x\u2011ray"),
    ('the \u201cworst\u201d "headache"', "the **worst** \u300cheadache\u300d"),
    ("asp\u00edrin", "\U0001d41a\U0001d42c\U0001d429\U0001d422\U0001d42b\U0001d422\U0001d427"),
    ("aspirin", "asp\u00ad\u034f\u115f\u180e\u200b\u3164\ufe0f\ufff0\U000e0041irin"),  # not seen
]  # fmt: skip
OTHER = [
    ("81 mg", "8.1 mg"), ("1,5 mg", "15 mg"), ("5 \u00b5g", "5 mg"), ("10\u00b2 mg", "102 mg"),
    ("5\u00bd tablets", "51/2 tablets"), ("120/80", "12/080"), (">140", "<140"),
    ("\u2265140", "\u2264140"), ("nitrite +", "nitrite -"), ("BE-5", "BE 5"),
    ("HIV (\u2013)", "HIV"), ("base excess \u20135", "base excess 5"),
    ("\u2191 dose", "\u2193 dose"), ("afebrile", "a febrile"),
    ("n\u0336o\u0336t\u0336 well", "not well"),  # struck through
    ("\u043d\u0435", "\u043d\u0430"), ("\u4e2d\u6587", "\u82f1\u6587"), ("daily", "weekly"),
    ("twice daily", "b.i.d."),  # for the judge
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), DRESSED)
def test_dressing_says_the_same(a: str, b: str) -> None:
    assert says_the_same(a, b) and says_the_same(b, a), (canonical_words(a), canonical_words(b))


@pytest.mark.parametrize(("a", "b"), OTHER)
def test_changes_of_the_medicine_are_not_the_same_statement(a: str, b: str) -> None:
    assert not says_the_same(a, b) and not says_the_same(b, a), canonical_words(a)
    assert not says_the_same(f"He receives {a} today.", f"He receives {b} today.")


amounts = st.decimals(min_value=0, max_value=10**6, places=3)


@given(amounts, amounts)
def test_numbers_say_the_same_where_their_values_are_equal(a: Decimal, b: Decimal) -> None:
    assert says_the_same(f"He takes {a} mg.", f"He takes {b} mg.") == (a == b)
    assert says_the_same(f"He takes {a:f} mg.", f"He takes {a.normalize():f} mg.")
    assert says_the_same(f"He takes {a:,f} mg.", f"He takes {a:f}0mg.")


@given(st.text())
def test_a_note_says_what_it_says(note: str) -> None:
    assert says_the_same(note, note)
    assert says_the_same(note, f"  {note}\u200b\n")
    assert all(word and word == "".join(word.split()) for word in canonical_words(note))


@pytest.mark.parametrize(
    ("name", "errors", "known"), [(PAIRS, 1219, ["Norepinephrine"]), (OFFICIAL, 319, [])]
)
def test_no_error_of_medec_is_dressing_or_a_quote_of_its_correction(
    name: str, errors: int, known: list[str]
) -> None:
    cases = [case for case in read_files([medec_file(name)]).cases if case.error_note]
    assert len(cases) == errors
    right_and_wrong = [(case.corrected_sentence or "", case.error_sentence or "") for case in cases]
    for alike in (says_the_same, quotes_error):
        same = [wrong for right, wrong in right_and_wrong if alike(right, wrong)]
        assert [wrong.split()[0] for wrong in same] == known  # differs in letter case
