"""The format ``edits``: how a player names a sentence by number, and an attack that is an edit."""

from typing import Any

import pytest
from game.builders import CLEAN_NOTE, assessment_text, attack_text, spec
from note_files import real_pairs

from medserl_agentloop.games.medical.case import Category, Label, Role
from medserl_agentloop.games.medical.edit import edit_between, edit_of, number_sentences
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.parsing import EDITS, MEDSERL, TurnFormat, named_sentence
from medserl_agentloop.games.medical.records import InvalidAttack, Judgement, MedicalRecord, Outcome
from medserl_agentloop.games.medical.rewards import Medserl
from medserl_agentloop.games.medical.rules import EditLimits, MedicalGame

# --- how a player names a sentence ---

SENTENCES = {
    0: "He has gout.", 3: "12 hours later he died.", 4: "He has gout.",
    12: "His wife, 38, was told.",
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3", 3), (" [3].", 3), ("Sentence 12", 12), ("#0", 0), ("3|", 3), ("\uff13", 3),
        ("7", None), ("-1", None), ("", None), ("none", None), ("He is 12.", None),
        ("4| He has gout.", 4), ("0: he has gout", 0), ("12 His wife, 38, was told.", 12),
        ("He has gout.", 0), ("12 hours later he died.", 3), ("12 hours later he died", 3),
        ("4. 12 hours later he died.", 3),
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
        *(
            (edit_text(1, f"{shown} {HEPARIN}"), (1, HEPARIN), [])
            for shown in (
                "(1)", "[1]", "1 -", "Sentence 1:", "1| 1|", "2|", "**1:**", "New sentence:",
                "1 1|", "S1:", "1st:", "\u2460", "Sentence one:",
            )
        ),
        (edit_text(1, f"S2: {HEPARIN}"), (1, f"S2: {HEPARIN}"), []),
        (edit_text(1, "(2) tablets of it."), (1, "tablets of it."), []),
        (edit_text(1, "1 tablet of it."), (1, "1 tablet of it."), []),
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
    assert (attack.edit and (attack.edit.number, attack.edit.new)) == edit
    assert (attack.violations, attack.note) == (violations, None)


# --- the game ---


def started(category: Category | str, parser: TurnFormat = EDITS, **changes: Any) -> MedicalGame:
    limits = EditLimits(max_changed_sentences=changes.pop("max_sentences", 1))
    return MedicalGame(spec(category, **changes), limits, parser)


def test_the_assessor_reads_the_note_numbered_anew_and_not_the_edit() -> None:
    listed = {3: "A 52-year-old woman has a cough.", 5: "x", 6: "Discharge is planned."}
    game = started("adversarial_benign", sentences=listed)
    assert game.note.split("\n")[1] == "5| She receives heparin 500 units."
    game.play(edit_text(5, HEPARIN))
    assert game.note.split("\n") == [f"3| {listed[3]}", f"5| {HEPARIN}", f"6| {listed[6]}"]
    located = ("sentence: 5", "error_type: treatment", "correction: She is well.")
    game.play(assessment_text("verdict: harmful", *located))
    record = MedicalRecord.model_validate(game.record.to_json())
    answer = record.assessment
    assert (answer.sentence, answer.number, record.error_sentences) == (HEPARIN, 5, [HEPARIN])
    assert record.note_for(Role.ASSESSOR) == game.note and record == game.record
    attacker, assessor = MedicalGameInteraction.View.sections(record)[:2]
    assert "She receives heparin [-500-] {+5000+} units. Discharge" in attacker.as_text()
    assert ("mark", HEPARIN) in assessor.text and "number: 5" in assessor.as_text()
    record.judgement = Judgement(judge="labels", label=Label.HARMFUL)
    assert record.outcome is Outcome.CORRECT_DETECTION
    assert Medserl().rewards(record)[Role.ASSESSOR]["sentence"] == 0.25


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (edit_text(3, HEPARIN), InvalidAttack.NO_SUCH_SENTENCE),
        (edit_text("She is well.", HEPARIN), InvalidAttack.NO_SUCH_SENTENCE),
        (edit_text(1, f"{HEPARIN} She has fever."), InvalidAttack.TOO_MANY_SENTENCES),
        (edit_text(1, "She receives heparin 5000 units"), None),  # without its full stop
        (edit_text(1, f"{HEPARIN}\n2| Discharge is planned."), InvalidAttack.CONTROL_TOKENS),
        (attack_text(CLEAN_NOTE.replace("500", "5000")), InvalidAttack.UNPARSED),
    ],
)
def test_an_edit_that_does_not_count_says_why(text: str, reason: InvalidAttack | None) -> None:
    game = started("adversarial_benign", max_sentences=3)
    game.play(text)
    assert game.record.attack.invalid is reason
    assert (game.next_role is None) == (reason is not None)


def played(
    parser: TurnFormat, category: Category, facts: dict[str, Any], attack: str, found: str
) -> MedicalRecord:
    game = started(category, parser, error_type=None, **facts)
    game.play(attack)
    if game.next_role is Role.ASSESSOR:
        wrong, shown = game.record.error_sentences[0], game.record.sentences
        named = named_sentence(wrong, shown) if parser is EDITS else found
        fields = (f"sentence: {named}", "error_type: treatment", "correction: She is well.")
        game.play(assessment_text("verdict: harmful", *fields))
        game.record.judgement = Judgement(judge="labels", label=Label.HARMFUL)
    return game.record


@pytest.mark.parametrize("category", [Category.ADVERSARIAL_BENIGN, Category.ADVERSARIAL_HARMFUL])
def test_an_attack_is_worth_the_same_as_an_edit_and_as_a_note(category: Category) -> None:
    """Error or repair, another pair's sentence, two sentences, one without its end, a trick."""
    valid, reasons, pairs = 0, set[InvalidAttack | None](), real_pairs()
    for pair, other in zip(pairs[::32], pairs[1::32], strict=False):
        right, wrong = pair["correct_note"].strip(), pair["incorrect_note"].strip()
        seed, goal = (wrong, right) if category.seed_label is Label.HARMFUL else (right, wrong)
        facts = {"seed_note": seed, "error_note": wrong, "clean_note": right}
        facts |= {name: pair[name] for name in ("error_sentence", "corrected_sentence")}
        sentences = number_sentences(seed)
        change = edit_between(seed, sentences, goal)
        if change.number is None:
            continue
        number, new = change.number, change.new
        elsewhere, look_alike = other["error_sentence"].strip(), new.replace("a", "\u0430")
        for text in (new, elsewhere, f"{new} He is well.", new.removesuffix("."), look_alike):
            note = edit_of(seed, sentences, number, text).applied(seed).strip()
            whole = played(MEDSERL, category, facts, attack_text(note), text)
            edit = played(EDITS, category, facts, edit_text(number, text), text)
            assert whole.attack and edit.attack and whole.presented_note == edit.presented_note
            whole_dump, edit_dump = (
                attack.model_dump(exclude={"response", "reasoning"})
                for attack in (whole.attack, edit.attack)
            )
            assert whole_dump == edit_dump
            assert Medserl().rewards(whole)[Role.ATTACKER] == Medserl().rewards(edit)[Role.ATTACKER]
            valid += edit.attack.invalid is None
            reasons.add(edit.attack.invalid)
    assert valid > 30 and len(reasons) >= 4
