"""The turns of the profile ``baseline``: what is read, and every departure by its name."""

import pytest

from medserl_agentloop.games.medical.parsing import BASELINE
from medserl_agentloop.games.medical.types import Label


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
