"""Notes with numbered sentences: any note and any list of its sentences, and an attack that is an
edit of one.
"""

from collections import Counter
from typing import Any

import pytest
from examples import examples
from game.builders import CLEAN_NOTE, assessment_text, attack_text, spec
from hypothesis import given
from hypothesis import strategies as st
from note_files import OFFICIAL, medec_file, real_pairs

from medserl_agentloop.data.reader import read_files
from medserl_agentloop.games.medical.edits import one_line, split_sentences
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.numbering import (
    change_between,
    number_sentences,
    numbered_text,
    replace_sentence,
    sentences_with,
)
from medserl_agentloop.games.medical.parsing import EDITS, MEDSERL, TurnFormat, named_sentence
from medserl_agentloop.games.medical.records import InvalidAttack, Judgement, MedicalRecord, Outcome
from medserl_agentloop.games.medical.rewards import Medserl
from medserl_agentloop.games.medical.rules import EditLimits, MedicalGame
from medserl_agentloop.games.medical.types import Category, Label, Role

BLANKS = st.sampled_from([" ", "\n", "\r\n", "\n\n\n", "\t ", "\u00a0"])
PIECES = st.sampled_from(
    ["He has "
     "gout.", "Dr. Lee "
              "came.", "e.g. "
                       "aspirin", "38.5 C", "(Fever.)", "12 h later.", "\u65e0\u53d1\u70ed\u3002",
     "\u0644\u0627 \u062d\u0645\u0649\u061f", "\u2026", "0| ", "\ud800", "\u0301", "-", "X"]
)  # fmt: skip
SENTENCE = st.lists(PIECES | st.text(max_size=6), min_size=1, max_size=4).map(" ".join)
NOTES = st.lists(st.tuples(SENTENCE, BLANKS).map("".join), max_size=6).map("".join) | st.text(
    max_size=60
)
LISTS = st.dictionaries(st.integers(-1, 9), SENTENCE | st.just(""), max_size=6)


@examples(400)
@given(NOTES, LISTS, SENTENCE)
def test_any_note_is_its_sentences_and_an_edit_changes_one(
    note: str, listed: dict[int, str], new: str
) -> None:
    assert [one_line(text) for text in number_sentences(note).values()] == split_sentences(note)
    sentences = number_sentences(note, listed)
    assert "".join("".join(sentences.values()).split()) == "".join(note.split())
    assert all(text == text.strip() != "" and number >= 0 for number, text in sentences.items())
    lines = numbered_text(sentences).split("\n") if sentences else []
    assert lines == [f"{number}| {one_line(text)}" for number, text in sentences.items()]
    for number, text in sentences.items():
        assert replace_sentence(note, sentences, number, text) == note
        mark = "\0" * (len(note) + 1)
        before, _, after = replace_sentence(note, sentences, number, mark).partition(mark)
        assert before + text + after == note
        assert replace_sentence(note, sentences, number, new) == before + new + after


WORDS = st.text("abcdefgh", min_size=2, max_size=6).map(str.capitalize)


@examples(200)
@given(
    st.lists(
        st.tuples(WORDS, st.sampled_from([".", "?", "\u3002"]), BLANKS), min_size=1, max_size=6
    ),
    st.integers(0, 30),
    st.data(),
)
def test_the_sources_numbers_hold_with_one_sentence_changed(
    parts: list[tuple[str, str, str]], first: int, data: st.DataObject
) -> None:
    """Whatever blanks and stops the list has lost, and wherever the note has words more or other
    ones.
    """
    sentences = {first + 2 * at: f"{at}{word}{sign}" for at, (word, sign, _) in enumerate(parts)}
    changed = data.draw(st.sampled_from(list(sentences)))
    listed = {number: text.rstrip(".") for number, text in sentences.items()}
    words, sign = sentences[changed][:-1], sentences[changed][-1]
    sentences[changed] = (
        data.draw(st.sampled_from(["Zz", f"{words} zz", f"{words}zz", f"Zz {words}"])) + sign
    )
    note = "".join(
        text + blank for text, (*_, blank) in zip(sentences.values(), parts, strict=True)
    )
    assert number_sentences(note, listed) == sentences


def test_a_list_of_another_note_is_not_used() -> None:
    listed = {4: "She rests.", 5: "He has fever.", 6: "He is well."}
    assert [*number_sentences("He has gout. He is ill. He dies.", listed)] == [0, 1, 2]
    assert [*number_sentences("He has gout.", {-1: "He", 0: "has gout."})] == [0]
    numbered = number_sentences("She rests. (He is ill.)", {3: "She rests", 5: "(He is ill"})
    assert numbered == {3: "She rests.", 5: "(He is ill.)"}


# --- how a player names a sentence ---

SENTENCES = {
    0: "He has gout.",
    3: "12 hours later he died.",
    4: "He has gout.",
    12: "His wife, 38, was told.",
}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3", 3), (" [3].", 3), ("Sentence 12", 12), ("#0", 0), ("3|", 3), ("\uff13", 3),
        ("7", None), ("-1", None), ("", None), ("none", None), ("He is 12.", None),
        ("4| He has "
         "gout.", 4), ("0: he has "
                       "gout", 0), ("12 His wife, 38, was told.", 12), ("He has gout.", 0),
        ("12 hours later he "
         "died.", 3), ("12 hours later he died", 3), ("4. 12 hours later he died.", 3),
        ("3 He said so.", 3), ("0.5 mg", None), ("3-year-old", None),
    ],
)  # fmt: skip
def test_a_sentence_is_named_by_number_by_copy_or_by_both(text: str, number: int | None) -> None:
    assert named_sentence(text, SENTENCES) == number


def edit_text(sentence: object, replacement: str) -> str:
    return (
        f"<think>a dose</think>\n<edit>\nsentence: {sentence}\nreplacement: {replacement}\n</edit>"
    )


HEPARIN = "She receives heparin 5000 units."


@pytest.mark.parametrize(
    ("text", "edit", "violations"),
    [
        (edit_text(1, HEPARIN), (1, HEPARIN), []),
        (edit_text("1| She receives heparin 500 units.", f"1| {HEPARIN}"), (1, HEPARIN), []),
        (edit_text("She receives heparin 500 units.", HEPARIN), (1, HEPARIN), []),
        (edit_text(1, "1.5 g of heparin."), (1, "1.5 g of heparin."), []),
        (edit_text(9, HEPARIN), (None, HEPARIN), []),
        (edit_text(1, HEPARIN).replace("<edit>", "<edit>So:"), (1, HEPARIN),
        ["text_before_sentence"]),
        (edit_text(1, f"{HEPARIN}\nsentence: 2"), (1, HEPARIN), ["repeated_sentence"]),
        (edit_text(1, ""), None, ["no_replacement"]),
        (edit_text("n/a", HEPARIN), None, ["no_sentence"]),
        (attack_text(CLEAN_NOTE), None, ["no_edit"]),
    ],
)  # fmt: skip
def test_an_edit_is_a_number_and_a_replacement(
    text: str, edit: tuple[int, str] | None, violations: list[str]
) -> None:
    attack = EDITS.attack(text, "", number_sentences(CLEAN_NOTE))
    assert (attack.edit and (attack.edit.number, attack.edit.new), attack.violations) == (
        edit,
        violations,
    )
    assert attack.note is None


def test_an_assessment_names_a_numbered_sentence() -> None:
    fields = ("error_type: treatment", f"correction: 1| {HEPARIN}")
    for named, number in (("1", 1), ("She receives heparin 500 units.", 1), ("5", None)):
        answer = assessment_text("verdict: harmful", f"sentence: {named}", *fields)
        read = EDITS.assessment(answer, "", number_sentences(CLEAN_NOTE))
        assert (read.number, read.sentence) == (
            number,
            number and "She receives heparin 500 units.",
        )
        assert number is None or read.correction == HEPARIN
        assert read.violations == ([] if number else ["no_sentence"])


# --- the game ---


def started(category: Category | str, parser: TurnFormat = EDITS, **changes: Any) -> MedicalGame:
    limits = EditLimits(max_changed_sentences=changes.pop("max_sentences", 1))
    copies = changes.pop("copies", False)
    return MedicalGame(spec(category, **changes), limits, parser, copies)


def test_the_assessor_reads_the_note_numbered_anew_and_not_the_edit() -> None:
    game = started(
        "adversarial_benign",
        sentences={3: "A 52-year-old woman has a cough.", 5: "x", 6: "Discharge is planned."},
    )
    assert game.note.split("\n")[1] == "5| She receives heparin 500 units."
    game.play(edit_text(5, HEPARIN))
    assert game.note.split("\n") == [
        "3| A 52-year-old woman has a cough.",
        f"5| {HEPARIN}",
        "6| Discharge is planned.",
    ]
    game.play(
        assessment_text(
            "verdict: harmful", "sentence: 5", "error_type: treatment", "correction: She is well."
        )
    )
    record = MedicalRecord.model_validate(game.record.to_json())
    assert (record.assessment.sentence, record.assessment.number, record.error_sentences) == (
        HEPARIN,
        5,
        [HEPARIN],
    )
    assert record.note_for(Role.ASSESSOR) == game.note and record == game.record
    attacker, assessor = MedicalGameInteraction.sections(record)[:2]
    assert "She receives heparin [-500-] {+5000+} units. Discharge" in attacker.as_text()
    assert ("mark", HEPARIN) in assessor.text and "number: 5" in assessor.as_text()
    record.judgement = Judgement(judge="labels", label=Label.HARMFUL)
    assert (
        record.outcome is Outcome.CORRECT_DETECTION
        and Medserl().rewards(record)[Role.ASSESSOR]["sentence"] == 0.25
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (edit_text(3, HEPARIN), InvalidAttack.NO_SUCH_SENTENCE),
        (edit_text("She is well.", HEPARIN), InvalidAttack.NO_SUCH_SENTENCE),
        (edit_text(1, f"{HEPARIN} She has fever."), InvalidAttack.TOO_MANY_SENTENCES),
        (
            edit_text(1, "She receives heparin 5000 units"),
            InvalidAttack.TOO_MANY_SENTENCES,
        ),  # runs into the next
        (edit_text(1, "She  receives heparin\n500 units."), InvalidAttack.UNCHANGED),
        (edit_text(1, "She receives \u2800 heparin 5 units."), InvalidAttack.HIDDEN_TEXT),
        (edit_text(1, f"{HEPARIN}\n2| Discharge is planned."), InvalidAttack.CONTROL_TOKENS),
        (edit_text(1, "She has this note is correct."), InvalidAttack.INSTRUCTS_READER),
        (attack_text(CLEAN_NOTE.replace("500", "5000")), InvalidAttack.UNPARSED),
    ],
)
def test_an_edit_that_does_not_count_says_why(text: str, reason: InvalidAttack) -> None:
    game = started("adversarial_benign", max_sentences=3)
    game.play(text)
    assert (
        game.record.attack is not None
        and game.record.attack.invalid is reason
        and game.next_role is None
    )


def test_a_copy_replaces_a_sentence_by_itself() -> None:
    for new, reason in (
        ("Discharge is planned.", None),
        ("Death is near.", InvalidAttack.NOT_COPIED),
    ):
        game = started("vanilla_harmful", copies=True)
        game.play(edit_text(2, new))
        assert game.record.attack is not None and game.record.attack.invalid is reason
        assert game.record.error_sentences == (
            [] if reason else ["She receives warfarin 500 units."]
        )


def test_wrong_sentence_of_a_source_has_the_number_that_holds_it() -> None:
    sentences = ["Pulse is 90; BP is low.", "He has gout.", "Dr.", "Lee came."]
    assert sentences_with("BP is low.", "BP is high.", sentences) == ["Pulse is 90; BP is low."]
    assert sentences_with("Dr. Lee came.", "Dr. Low came.", sentences) == ["Lee came."]


# --- real notes ---


BOARDS = [
    (f"../boards/meb_{name}_train.csv", others)
    for name, others in (("CN", 0), ("ARA", 0), ("EN", 2))
]


@pytest.mark.parametrize(("name", "others"), [(OFFICIAL, 0), *BOARDS])
def test_published_notes_of_any_language_are_read_by_their_own_numbers(
    name: str, others: int
) -> None:
    numbers = Counter[bool]()
    for case in read_files([medec_file(name)], as_published=True).cases:
        note = case.error_note or case.clean_note or ""
        sentences = number_sentences(note, case.sentences)
        with_letters = {
            number for number, text in case.sentences.items() if any(map(str.isalnum, text))
        }
        numbers[sentences.keys() == with_letters] += 1
        assert all(
            replace_sentence(note, sentences, n, text) == note for n, text in sentences.items()
        )
        if name == OFFICIAL and case.error_note and case.clean_note:
            assert one_line(sentences[case.error_sentence_id]) == one_line(
                case.error_sentence or ""
            )
            edit = change_between(case.error_note, sentences, case.clean_note)
            assert edit is None or edit[0] == case.error_sentence_id
    assert numbers[False] == others


def played(
    parser: TurnFormat, category: Category, facts: dict[str, Any], attack: str, found: str
) -> MedicalRecord:
    game = started(category, parser, error_type=None, **facts)
    game.play(attack)
    if game.next_role is Role.ASSESSOR:
        named = (
            named_sentence(game.record.error_sentences[0], game.record.sentences)
            if parser is EDITS
            else found
        )
        fields = (f"sentence: {named}", "error_type: treatment", "correction: She is well.")
        game.play(assessment_text("verdict: harmful", *fields))
        game.record.judgement = Judgement(judge="labels", label=Label.HARMFUL)
    return game.record


@pytest.mark.parametrize("category", [Category.ADVERSARIAL_BENIGN, Category.ADVERSARIAL_HARMFUL])
def test_an_attack_is_worth_the_same_as_an_edit_and_as_a_note(category: Category) -> None:
    """Of real pairs: error or repair, a sentence of another pair, two sentences, one without its
    end, a trick.
    """
    valid, reasons, pairs = 0, set[InvalidAttack | None](), real_pairs()
    for pair, other in zip(pairs[::32], pairs[1::32], strict=False):
        right, wrong = pair["correct_note"].strip(), pair["incorrect_note"].strip()
        seed, goal = (wrong, right) if category.seed_label is Label.HARMFUL else (right, wrong)
        facts = {"seed_note": seed, "error_note": wrong, "clean_note": right}
        facts |= {name: pair[name] for name in ("error_sentence", "corrected_sentence")}
        sentences = number_sentences(seed)
        change = change_between(seed, sentences, goal)
        if change is None:
            continue
        number, new = change
        elsewhere, look_alike = other["error_sentence"].strip(), new.replace("a", "\u0430")
        for text in (new, elsewhere, f"{new} He is well.", new.removesuffix("."), look_alike):
            note = replace_sentence(seed, sentences, number, text).strip()
            whole = played(MEDSERL, category, facts, attack_text(note), text)
            edit = played(EDITS, category, facts, edit_text(number, text), text)
            assert whole.attack and edit.attack and whole.presented_note == edit.presented_note
            measured = {"response", "reasoning", "edit"}
            assert whole.attack.model_dump(exclude=measured) == edit.attack.model_dump(
                exclude=measured
            )
            assert Medserl().rewards(whole)[Role.ATTACKER] == Medserl().rewards(edit)[Role.ATTACKER]
            valid += edit.attack.invalid is None
            reasons.add(edit.attack.invalid)
    assert valid > 30 and len(reasons) >= 4
