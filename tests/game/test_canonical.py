"""The comparison of two notes: dressing makes no difference, and everything else does."""

import re
from collections.abc import Callable
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from note_files import OFFICIAL, PAIRS, medec_file

from medserl_agentloop.data.reader import read_files
from medserl_agentloop.games.medical.canonical import canonical_words, says_the_same, visible
from medserl_agentloop.games.medical.edits import is_copy

DRESSED = [
    # numbers
    ("81 "
     "mg", "81.0 "
           "mg"), ("38.5 C", "38.50 C"), ("5,000 units", "5000 units"), ("1,234,567", "1234567"),
    (".5 "
     "mg", "0.5 mg"), ("08:30", "8:30"), ("three days", "3 days"), ("5½ tablets", "5 1/2 tablets"),
    ("10² cells", "10^2 cells"), ("\uff15\uff10 mg", "50 mg"), ("5 000 units", "5000 units"),
    ("5\u2009250 units", "5,250 units"), ("5\u00b75 mg", "5.5 mg"),
    ("\u0665\u0660 "
     "mg", "50 mg"), ("\u096b mg", "5 mg"), ("650 mg", "6.5e2 mg"), ("650 mg", "6.5 x 10^2 mg"),
    ("650 mg", "6 5 0 mg"), ("50 mg", "5 0 mg"), ("10\u2075 cells", "100,000 cells"), ("+4.0", "4"),
    ("warfarin", "w a r f a r i "
                 "n"), ("heparin", "heparin\u00b9"), ("type 2 diabetes", "type II diabetes"),
    ("gout. 2. He "
     "rests", "gout. 3. He rests"), ("daily: 1) heparin, 2) rest", "daily: 3) heparin, 4) rest"),
    # number words
    ("50 mg", "fifty mg"), ("25 mg", "twenty-five mg"), ("120 mg", "one hundred and twenty mg"),
    ("100 mg", "a hundred mg"), ("5,000 units", "5 thousand units"),
    ("2506 units", "two thousand five hundred and six units"),
    ("1,500,000 cells", "1.5 million cells"), ("a 35-year-old man", "a thirty-five-year-old man"),
    ("the second dose", "the 2nd dose"), ("five six", "5 6"),
    # calculations
    ("5 "
     "mg", "10/2 "
           "mg"), ("0.5 "
                   "mg", "1/2 "
                         "mg"), ("5.5 "
                                 "mg", "5\u00bd mg"), ("5 mg", "3 + 2 mg"), ("6 mg", "1+2+3 mg"),
    # ranges and limits
    ("5-10 mg", "5 to 10 mg"), ("5-10 mg", "between five and 10 mg"), (">140", "greater than 140"),
    (">= 140", "at least 140"), ("\u2264 140", "no more than 140"), ("<140", "less than 140"),
    # units
    ("81 "
     "mg", "81mg"), ("81 "
                     "mg", "81 "
                           "milligrams"), ("0.5 "
                                           "g", "500 mg"), ("1,000 mcg", "1 mg"), ("5 µg", "5 mcg"),
    ("5 "
     "\u03bcg", "5 "
                "micrograms"), ("2 "
                                "L", "2,000 "
                                     "cc"), ("96/min", "96 per minute"), ("10 mg/dL", "10 mg / dl"),
    ("98/62 mm Hg", "98/62 mmHg"), ("38.5 C", "38.5°C"), ("38.5 C", "38.5 degrees Celsius"),
    ("98 %", "98 percent"), ("24 hr", "24 hours"), ("5 IU", "5 units"), ("24 kg/m²", "24 kg/m2"),
    ("60 "
     "min", "1 "
            "h"), ("7 "
                   "days", "1 week"), ("every 1.5 hours", "every 90 minutes"), ("1 g/dL", "10 g/L"),
    ("1 "
     "mg/mL", "1 "
              "g/L"), ("5 "
                       "mg/dL", "50 mg per litre"), ("5 mmol/L", "5 mM"), ("5 \u00b5M", "5 umol/L"),
    ("120/80 BP 81 "
     "mg", "120/80 blood pressure 0.081 g"), ("Day 3 aspirin 0.5 g", "Day 3 aspirin 500 mg"),
    # case
    ("He has GOUT", "he has gout"), ("Stra\u00dfe", "STRASSE"),
    # hyphens
    ("a 35-year-old man", "a 35 year old man"), ("x-ray", "x\u2011ray"), ("follow-up", "followup"),
    ("follow-up", "follow up"), ("Streptococcus pneumoniae", "Strepto-coccus pneumoniae"),
    ("type 2 diabetes", "type-2 diabetes"), ("5\u201310 mg", "5-10 mg"), ("5 - 10 mg", "5-10 mg"),
    ("fever, cough", "fever \u2014 cough"), ("fever, cough", "fever--cough"),
    # white space and punctuation
    ("He has\n\n gout.", "He  has gout"), ("She_receives_heparin", "She receives heparin"),
    ("fever,cough", "fever; cough"), ("He has gout.He rests", "He has gout. He rests"),
    ("**500** units", "500 units"), ("\u2022 He rests", "He rests"), ("> 140", ">140"),
    ("Coumadin\u2122 5 "
     "mg", "Coumadin 5 mg"), ("the \u2039worst\u203a headache", "the worst headache"),
    ("He\u00b7rests", "He rests"), ("the \u300cworst\u300d headache", "the worst headache"),
    ("the \u201cworst\u201d "
     "headache", 'the "worst" headache'), ("the patient\u2019s arm", "the patient's arm"),
    # look-alikes
    ("aspirin", "\u0430sp\u0456rin"), ("aspirin", "\u0391spirin"), ("COPD", "\u0421\u041e\u0420D"),
    ("a cough", "\u0430 cough"), ("aspirin", "asp\u0131rin"), ("aspirin", "asp\u00edrin"),
    ("aspirin", "\U0001d41a\U0001d42c\U0001d429\U0001d422\U0001d42b\U0001d422\U0001d427"),
    ("aspirin", "\uff41\uff53\uff50\uff49\uff52\uff49\uff4e"), ("office", "o\ufb03ce"),
    ("TNF-\u03b1", "TNF-alpha"),
    # other alphabets
    ("asp\u026arin", "aspirin"), ("\u1d00sp\u026a\u0280\u026a\u0274", "aspirin"),
    ("a\u2ca5p\u2c93rin", "acpirin"),
    ("\u0261out", "gout"), ("w\u00e5rf\u00e4rin", "warfarin"), ("hepar\u0268n", "heparin"),
    # HTML and LaTeX
    ("&gt; 140", "> 140"), ("5&nbsp;mg", "5 mg"), ("&#53; mg", "5 mg"), ("5 &micro;g", "5 mcg"),
    ("&#x35; mg", "5 mg"),
    ("$5$ "
     "mg", "5 "
           "mg"), ("5\\,mg", "5 "
                             "mg"), ("$\\geq "
                                     "140$", ">= 140"), ("5 $\\mu g$", "5 mcg"), ("98\\%", "98 %"),
    ("\\textbf{5} "
     "mg", "5 mg"), ("$38.5^{\\circ}$C", "38.5 C"), ("$10^{9}$", "10^9"), ("$\\frac{1}{2}$", "1/2"),
    ("$\\alpha$", "\u03b1"), ("5~mg", "5 mg"),
    # dates
    ("March 5, 2020", "5 March 2020"), ("Mar 5th 2020", "03/05/2020"), ("2020-03-05", "3/5/2020"),
    ("on Sept. "
     "9", "on 9th of September"), ("March 5, 2020", "03/05/20"), ("March 5, 2020", "2020/03/05"),
    ("March 5, "
     "2020", "5-Mar-2020"), ("March 5, "
                             "2020", "03-05-2020"), ("March 5, 2020", "March the 5th, 2020"),
    # abbreviations
    ("twice daily", "b.i.d."), ("three times a day", "TID"), ("every 8 hours", "q8h"),
    ("daily", "every 24 "
              "hours"), ("daily", "once a day"), ("QD", "every day"), ("q12h", "2 times per day"),
    ("weekly", "every 7 "
               "days"), ("left arm", "L arm"), ("right arm", "R. arm"), ("left arm", "lt arm"),
    ("by mouth as needed", "PO prn"), ("blood pressure 120/80", "BP 120/80"),
    ("38.5, blood pressure 81 mg", "38.5, BP 81 mg"), ("an electrocardiogram", "an EKG"),
    ("without "
     "fever", "w/o "
              "fever"), ("with "
                         "fever", "w/ fever"), ("with 2 days of fever", "w/ two days of fever"),
    ("hypertension & gout", "HTN and gout"), ("cannot walk", "can't walk"),
    ("A 52-year-old woman", "A 52 y/o woman"), ("myocardial infarction", "MI"),
]  # fmt: skip
OTHER = [
    ("81 "
     "mg", "8.1 "
           "mg"), ("81 "
                   "mg", "810 "
                         "mg"), ("1.5 mg", "15 mg"), ("1,5 mg", "15 mg"), ("0,500 mg", "500 mg"),
    ("5.000 "
     "mg", "5,000 "
           "mg"), ("1,200 mg", "1, 200 mg"), ("5 µg", "5 mg"), ("5 mg", "5 g"), ("5 mg", "5 mL"),
    ("500 "
     "mg", "0.05 "
           "g"), ("1-2 g", "1-2000 mg"), ("1 to 2 g", "1 to 2000 mg"), ("1 - 2 g", "1 - 2000 mg"),
    ("2 x 3 "
     "cm", "2 x 30 "
           "mm"), ("5 cm³", "50 mm³"), ("10² cells", "102 cells"), ("10\u2075 cells", "105 cells"),
    ("5½ "
     "tablets", "51/2 "
                "tablets"), ("5½ tablets", "5 tablets"), ("0.5 mg", "5 mg"), ("120/80", "12/080"),
    ("120/80", "80/120"), ("1 "
                           "2", "12"), ("24 "
                                        "hours", "24 "
                                                 "days"), ("5 units", "5 mg"), ("38.5 C", "38.5 F"),
    ("5 "
     "mg/kg", "5 "
              "mg"), (">140", "<140"), (">=140", ">140"), ("\u2265140", "\u2264140"), ("\u2260 5",
              "= 5"),
    ("K+ "
     "4.1", "K "
            "4.1"), ("nitrite "
                     "+", "nitrite "
                          "-"), ("nitrite", "nitrite -"), ("base excess -5", "base excess 5"),
    ("BE-5", "BE 5"), ("\u2191 dose", "\u2193 dose"), ("hyperkalemia", "hypokalemia"),
    ("hyper-tension", "hypo-tension"), ("afebrile", "a febrile"), ("asymptomatic", "a symptomatic"),
    ("is not "
     "able", "is "
             "notable"), ("does not smoke", "does smoke"), ("does not smoke", "doesn't smoke not"),
    ("with "
     "fever", "without fever"), ("w/ fever", "w/o fever"), ("b.i.d.", "t.i.d."), ("q6h", "q8h"),
    ("once daily", "twice daily"), ("PO", "IV"), ("left", "right"), ("heparin", "warfarin"),
    ("type 1 diabetes", "type 2 diabetes"), ("CD4", "CD8"), ("TNF-\u03b1", "TNF-\u03b2"),
    ("macrocytic", "microcytic"), ("base excess "
                                   "\u20135", "base excess "
                                              "5"), ("base excess \u2014 5", "base excess 5"),
    ("base excess "
     "--5", "base excess "
            "5"), ("excess\u20135", "excess 5"), ("(\u20135)", "(5)"), ("HIV \u2013", "HIV"),
    ("HIV (\u2013), RPR "
     "+", "HIV, RPR +"), ("HIV \u2013ve", "HIV ve"), ("5 mM", "5 mm"), ("5 \u00b5M", "5 \u00b5m"),
    ("2 500 mg "
     "tablets", "2,500 mg "
                "tablets"), ("5\u00b75 mg", "55 mg"), ("1 g/dL", "1 g/L"), ("1-2 g/dL", "1-20 g/L"),
    ("60 min", "60 h"),
    ("60/min", "1/h"), ("1 "
                        "day", "1 week"), ("5 March 2020", "5 May 2020"), ("3/5/2020", "5/3/2020"),
    ("3/5/2020", "3/5/2021"), ("&lt;140", "&gt;140"), ("$\\leq "
                                                       "140$", "$\\geq 140$"), ("10^{9}", "109"),
    ("\u0665 mg", "6 mg"), ("COPD \u2013 stable", "COPD stable"),
    ("~5 mg", "5 mg"), ("q 8 h", "q 6 h"), ("\u1369 mg", "1 mg"),
    ("n\u0336o\u0336t\u0336 well", "not well"),  # struck through
    ("8/2 "
     "mg", "4/1 "
           "mg"), ("120/80 mm "
                   "Hg", "60/40 mm Hg"), ("120/80 mm Hg", "1.5 mm Hg"), ("2 x 3 cm", "6 cm"),
    ("1 5 mg "
     "tablet", "15 mg tablet"), ("6.5e2 mg", "6.5e3 mg"), ("two hundred mg", "two thousand mg"),
    ("one hundred "
     "mg", "one hundred and five mg"), ("5 or 6 mg", "5-6 mg"), ("5 and 10 mg", "5-10 mg"),
    ("more than "
     "5", "at least "
          "5"), ("more than 5", "less than 5"), ("L arm", "R arm"), ("5 L saline", "5 left saline"),
    ("every 24 hours", "every 12 hours"), ("daily", "weekly"), ("2nd dose", "3rd dose"),
    ("temperature: 38. He "
     "rests", "temperature: 39. He rests"), ("stage 2) disease", "stage 3) disease"),
    ("(3) lesions", "(4) lesions"), ("03/05/20", "05/03/20"),
    ("10/0 mg", "10 mg"),
    ("\u043d\u0435", "\u043d\u0430"), ("\u4e2d\u6587", "\u82f1\u6587"), ("G2P1", "G1P2"), ("1:1000",
    "1:10000"),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), DRESSED)
def test_dressing_says_the_same(a: str, b: str) -> None:
    a, b = (f"He rests. He receives {text} today." for text in (a, b))
    assert says_the_same(a, b) and says_the_same(b, a), (canonical_words(a), canonical_words(b))


@pytest.mark.parametrize(("a", "b"), OTHER)
def test_changes_of_the_medicine_are_not_the_same_statement(a: str, b: str) -> None:
    assert not says_the_same(a, b) and not says_the_same(b, a), canonical_words(a)
    assert not says_the_same(f"He receives {a} today.", f"He receives {b} today.")


def test_default_ignorable_code_points_are_not_seen() -> None:
    assert says_the_same(
        "aspirin", "asp\u00ad\u034f\u115f\u180e\u200b\u3164\ufe0f\ufff0\U000e0041irin"
    )
    assert not says_the_same("aspirin", "aspirin \u533b")


KNOWN = ["fever", "cough", "38.5", "81 mg", "no", "heparin", "x-ray", "twice daily", "120/80", "BP"]
DRESSABLE = [
    "five",
    "hundred",
    "thousand",
    "6.5e2",
    "2/4 mg",
    "every 12 hours",
    "q24h",
    "L arm",
    "1)",
    "2nd",
]

amounts = st.decimals(min_value=0, max_value=10**6, places=3)


@given(amounts, amounts)
def test_numbers_say_the_same_where_their_values_are_equal(a: Decimal, b: Decimal) -> None:
    assert says_the_same(f"He takes {a} mg.", f"He takes {b} mg.") == (a == b)
    assert says_the_same(f"He takes {a:f} mg.", f"He takes {a.normalize():f} mg.")
    assert says_the_same(f"He takes {a:,f} mg.", f"He takes {a:f}0mg.")


@given(
    amounts,
    st.sampled_from(["kg", "g", "mg", "mcg", "ng"]),
    st.sampled_from(["kg", "g", "mg", "mcg", "ng"]),
)
def test_amounts_say_the_same_where_they_are_equal(amount: Decimal, one: str, other: str) -> None:
    grams = {
        "kg": Decimal(1000),
        "g": Decimal(1),
        "mg": Decimal("1e-3"),
        "mcg": Decimal("1e-6"),
        "ng": Decimal("1e-9"),
    }
    converted = amount * grams[one] / grams[other]
    assert says_the_same(
        f"He takes {amount:f} {one} daily.", f"He takes {converted:f} {other} daily."
    )
    assert says_the_same(f"Take {amount:f} {one} daily.", f"Take {amount:f} {other} daily.") == (
        one == other or not amount
    )


@given(st.text())
def test_a_note_says_what_it_says(note: str) -> None:
    assert says_the_same(note, note)
    assert says_the_same(note, f"  {note}\u200b\n")
    assert all(word and word == "".join(word.split()) for word in canonical_words(note))


@given(
    st.lists(st.sampled_from([*KNOWN, *DRESSABLE, "at least", "to", "between", "and", "a"])).map(
        " ".join
    )
)
def test_canonical_words_are_their_own_canonical_words(note: str) -> None:
    said = canonical_words(note)
    assert (
        canonical_words(", ".join(said)) == said
    )  # without commas two of them might be read as one


@given(st.text(st.characters(codec="ascii", exclude_categories=["Cc"], exclude_characters="&")))
def test_plain_text_is_seen_as_it_is(note: str) -> None:
    assert visible(note) == note


words = st.sampled_from(KNOWN)
notes = st.lists(words, min_size=1, max_size=12).map(lambda found: f"Then {' '.join(found)} today.")
DRESSES: list[Callable[[str], str]] = [
    str.upper,
    str.title,
    lambda note: note.replace(" ", "\n  "),
    lambda note: note.replace(" ", " \u200b"),
    lambda note: note.replace("a", "\u0430").replace("o", "\u03bf"),
    lambda note: note.replace("-", "\u2010"),
    lambda note: re.sub(r"\b81\s+mg", "81.00mg", note),
    lambda note: note.replace("38.5", "38.50"),
    lambda note: note.replace("twice daily", "b.i.d."),
    lambda note: note.replace("BP", "blood pressure"),
    lambda note: note.replace("e", "e\u0301"),
    lambda note: f'"{note}"',
]


@given(notes, st.permutations(DRESSES), st.integers(1, len(DRESSES)))
def test_dresses_one_above_the_other_still_say_the_same(
    note: str, dresses: list[Callable[..., str]], n: int
) -> None:
    dressed = note
    for dress in dresses[:n]:
        dressed = dress(dressed)
    assert says_the_same(note, dressed), dressed


@given(notes, notes)
def test_other_words_are_never_the_same(a: str, b: str) -> None:
    assert says_the_same(a, b) == (a.replace("BP", "bp") == b.replace("BP", "bp"))


@pytest.mark.parametrize(
    ("name", "errors", "known"), [(PAIRS, 1219, ["Norepinephrine"]), (OFFICIAL, 319, [])]
)
def test_no_error_of_medec_is_dressing_or_a_copy(name: str, errors: int, known: list[str]) -> None:
    cases = read_files([medec_file(name)]).cases
    sentences = [
        (case.corrected_sentence or "", case.error_sentence or "")
        for case in cases
        if case.error_note
    ]
    assert len(sentences) == errors
    for alike in (says_the_same, is_copy):
        same = [error for right, error in sentences if alike(right, error)]
        assert [error.split()[0] for error in same] == known  # differs in letter case
