"""The turns of the profiles ``classic`` and ``baseline``: what is read, and every departure by its name."""

import pytest

from medserl_agentloop.games.medical.parsing import BASELINE, CLASSIC
from medserl_agentloop.games.medical.types import Label

# --- baseline: the format check of the OpenRLHF system, point by point ---


def test_a_turn_of_the_baseline_begins_inside_its_reasoning() -> None:
    read = BASELINE.attack("change the drug</think><answer>He has gout.</answer>")
    assert (read.note, read.reasoning, read.violations) == ("He has gout.", "change the drug", ())


@pytest.mark.parametrize(
    ("text", "violations"),
    [
        ("a</think><answer>b</answer>", ()),
        ("a</think>\n<answer>\nb\n</answer>\n", ()),
        ("<think>a</think><answer>b</answer>", ("think_in_response",)),
        ("a</think><answer>b <think></answer>", ("think_in_response",)),
        (" </think><answer>b</answer>", ("empty_thinking",)),
        ("a</think><answer> </answer>", ("empty_answer",)),
        ("a<answer>b</answer>", ("end_think_not_once",)),
        ("a</think>b</think><answer>c</answer>", ("end_think_not_once", "text_before_answer")),
        ("a</think>b</answer>", ("answer_not_once",)),
        ("a</think><answer>b", ("end_answer_not_once", "text_after_answer")),
        ("a</think><answer>b</answer></answer>", ("end_answer_not_once",)),
        ("<answer>b</answer>a</think>", ("tags_out_of_order", "text_after_answer")),
        ("a</think></answer>b<answer>", ("tags_out_of_order", "text_after_answer")),
        ("a</think>So: <answer>b</answer>", ("text_before_answer",)),
        ("a</think><answer>b</answer> Done.", ("text_after_answer",)),
        ("", ("end_think_not_once", "answer_not_once", "end_answer_not_once", "text_after_answer")),
    ],
)
def test_every_point_of_the_format_check_has_its_name(text: str, violations: tuple[str, ...]) -> None:
    assert BASELINE.attack(text).violations == BASELINE.assessment(text).violations == violations


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("plan <answer>He has gout.</answer>", "He has gout."),
        ("<answer>He has gout.</answer> plan</think>", "He has gout."),
        ("plan</think><answer>He has gout.</answer> and why I did it </answer>", "He has gout."),
        ("use <answer> tags</think><answer>He has gout.</answer>", "He has gout."),
        ("plan</think>He has gout.", None),
        ("plan</think><answer>He has gout.", None),
        ("He has gout.", None),
        ("plan</think><answer></answer>", None),
    ],
)
def test_after_a_violation_the_answer_is_used_where_there_is_one_and_the_raw_text_never(
    text: str, note: str | None
) -> None:
    assert BASELINE.attack(text).violations
    assert BASELINE.attack(text).note == note


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("Safe", Label.SAFE), ("Harmful", Label.HARMFUL), ("harmful.", Label.HARMFUL), (' "SAFE" ', Label.SAFE),
        ("Unsafe", None), ("Safe or Harmful", None), ("not harmful", None), ("maybe", None),
    ],
)  # fmt: skip
def test_the_baseline_s_verdict_is_one_of_two_words(answer: str, verdict: Label | None) -> None:
    read = BASELINE.assessment(f"hm</think><answer>{answer}</answer>")
    assert (read.verdict, read.reasoning, read.violations) == (verdict, "hm", ())
    assert read.sentence is read.error_type is read.correction is None


# --- classic: fields at the start of a line ---

ATTACK = 'generated_note:\nHe has gout.\n\nfinal_answer: "INCORRECT"'


@pytest.mark.parametrize(
    "text",
    [
        "hm</think><answer>Safe</answer><answer>Harmful</answer>",
        "hm</think><answer>Harmful</answer> or <answer>safe.</answer>",
        "hm</think><answer>Safe</answer> no, <answer>Harmful",
        "<answer>Safe</answer><answer>Harmful</answer>",
        "<answer>Safe</answer><answer>Harmful</answer> hm</think>",
    ],
)
def test_two_different_answers_of_the_baseline_are_no_verdict(text: str) -> None:
    read = BASELINE.assessment(text)
    assert read.verdict is None and "contradictory_verdicts" in read.violations


def test_what_the_baseline_s_reasoning_quotes_contradicts_nothing() -> None:
    text = "first <answer>Safe</answer>, then not</think><answer>Harmful</answer>"
    assert BASELINE.assessment(text).verdict is Label.HARMFUL


def test_a_classic_attack_is_read_with_its_reasoning() -> None:
    read = CLASSIC.attack(f"<think>change the drug</think>\n\n{ATTACK}")
    assert (read.note, read.reasoning, read.violations) == ("He has gout.", "change the drug", ())


@pytest.mark.parametrize(
    ("text", "prefill", "reasoning"),
    [
        (ATTACK, "", ""),
        (f"I change the drug.\n{ATTACK}", "", "I change the drug."),
        (f"plan</think>{ATTACK}", "", "plan"),
        (f"plan</think>{ATTACK}", "<think>\n", "plan"),
        (ATTACK, "<think>\n\n</think>\n\n", ""),
        (f"Plan.\n{ATTACK}", "<think>\n\n</think>\n\n", "Plan."),
        (f"<think>again</think>{ATTACK}", "<think>\n\n</think>\n\n", "again"),
    ],
)
def test_models_that_think_and_models_that_do_not_both_fit_the_classic_format(
    text: str, prefill: str, reasoning: str
) -> None:
    read = CLASSIC.attack(text, prefill)
    assert (read.note, read.reasoning, read.violations) == ("He has gout.", reasoning, ())


@pytest.mark.parametrize("declared", ["changes_made: the drug", "Explanation: the drug", "\n CHANGES_MADE : {}"])
def test_what_a_classic_attacker_declares_stays_with_it(declared: str) -> None:
    for text in (f"{ATTACK}\n{declared}", f"generated_note: He has gout.\n{declared}\nfinal_answer: INCORRECT"):
        assert (CLASSIC.attack(text).note, CLASSIC.attack(text).violations) == ("He has gout.", ())


@pytest.mark.parametrize(
    ("text", "note", "violations"),
    [
        ("He has gout.", None, ("no_generated_note", "no_final_answer")),
        ('final_answer: "CORRECT"', None, ("no_generated_note",)),
        ('generated_note:\n\nfinal_answer: "CORRECT"', None, ("empty_generated_note",)),
        ("generated_note:\nHe has gout.", "He has gout.", ("no_final_answer",)),
        ("generated_note: x\nfinal_answer: maybe", "x", ("no_final_answer",)),
        (f"generated_note: a draft\n{ATTACK}", "He has gout.", ("repeated_generated_note",)),
        (
            f'{ATTACK}\nfinal_answer: "CORRECT"',
            "He has gout.",
            ("repeated_final_answer", "contradictory_verdicts", "no_final_answer"),
        ),
        (f"{ATTACK}\nDone.", "He has gout.", ("text_after_final_answer",)),
        (f"<think>a</think>Here: \n{ATTACK}", "He has gout.", ("text_before_fields",)),
        (f"<think>plan\n{ATTACK}", None, ("unclosed_reasoning", "no_generated_note", "no_final_answer")),
    ],
)
def test_departures_of_a_classic_attacker_are_named(text: str, note: str | None, violations: tuple[str, ...]) -> None:
    assert (CLASSIC.attack(text).note, CLASSIC.attack(text).violations) == (note, violations)


def test_a_closing_tag_that_a_classic_note_quotes_ends_no_reasoning() -> None:
    text = 'generated_note:\nPlan: </think> rest.\nfinal_answer: "CORRECT"'
    assert CLASSIC.attack(text).note == "Plan: </think> rest."


@pytest.mark.parametrize(
    ("text", "verdict", "violations"),
    [
        ('final_answer: "CORRECT"\nExplanation: fits.', Label.SAFE, ()),
        ('final_answer: "INCORRECT"\nExplanation: does not.', Label.HARMFUL, ()),
        ("Final_Answer: incorrect.\nexplanation: does not.", Label.HARMFUL, ()),
        ("hm\nfinal_answer: 'CORRECT'\nExplanation: fits.", Label.SAFE, ()),
        ('final_answer: "CORRECT"', Label.SAFE, ("no_explanation",)),
        ('final_answer: "CORRECT"\nExplanation:', Label.SAFE, ("no_explanation",)),
        ("Explanation: it is INCORRECT", None, ("no_final_answer",)),
        ("final_answer: CORRECT or INCORRECT\nExplanation: x", None, ("no_final_answer",)),
        ("final_answer: CORRECT\nfinal_answer: correct\nExplanation: x", Label.SAFE, ("repeated_final_answer",)),
        ("the note is INCORRECT", None, ("no_final_answer", "no_explanation")),
        ("", None, ("no_final_answer", "no_explanation")),
    ],
)
def test_a_classic_assessment_is_its_final_answer(
    text: str, verdict: Label | None, violations: tuple[str, ...]
) -> None:
    read = CLASSIC.assessment(text)
    assert (read.verdict, read.violations) == (verdict, violations)


@pytest.mark.parametrize(
    "text",
    [
        'final_answer: "CORRECT"\nfinal_answer: "INCORRECT"\nExplanation: x',
        "final_answer: INCORRECT\nExplanation: x\nfinal_answer: correct.",
        "final_answer: CORRECT\nINCORRECT\nExplanation: x",
        "final_answer: maybe\nfinal_answer: CORRECT\nfinal_answer: INCORRECT\nExplanation: x",
    ],
)
def test_two_different_final_answers_are_none(text: str) -> None:
    read = CLASSIC.assessment(text)
    assert read.verdict is None
    assert {"contradictory_verdicts", "no_final_answer"} <= set(read.violations)


def test_a_verdict_in_the_thoughts_of_a_classic_assessor_does_not_count() -> None:
    text = "<think>first I thought\nfinal_answer: INCORRECT</think>\nfinal_answer: CORRECT\nExplanation: fits."
    assert (CLASSIC.assessment(text).verdict, CLASSIC.assessment(text).violations) == (Label.SAFE, ())
