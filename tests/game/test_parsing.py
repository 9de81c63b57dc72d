"""Reading untrusted model text: what counts as a note or an answer, and every way to break the format."""

import pytest
from examples import examples
from game.builders import assessment_text, attack_text
from hypothesis import example, given
from hypothesis import strategies as st

from medserl_agentloop.games.medical.parsing import MEDSERL
from medserl_agentloop.games.medical.types import ErrorType, Label

GOOD_FIELDS = ("verdict: harmful", "sentence: Wrong.", "error_type: diagnosis", "correction: Right.")
PIECES = ["<think>", "</think>", "<note>", "</note>", "<answer>", "</answer>", "verdict:", "sentence:", "harmful", "\n"]
model_text = st.one_of(
    st.text(),
    st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=14).map("".join),
)
plain_text = st.text().filter(str.strip)
field_value = st.text(st.characters(codec="utf-8", exclude_characters=":<>"), min_size=1).map(str.strip).filter(bool)


# --- the attacker's turn ---


def test_a_turn_in_format_gives_note_and_reasoning_without_violations() -> None:
    parsed = MEDSERL.attack("<think>change the drug</think>\n<note>He has gout.</note>")
    assert (parsed.note, parsed.reasoning, parsed.violations) == ("He has gout.", "change the drug", ())


def test_the_opening_think_tag_may_be_missing() -> None:
    parsed = MEDSERL.attack("change the drug</think><note>He has gout.</note>")
    assert (parsed.reasoning, parsed.violations) == ("change the drug", ())


@pytest.mark.parametrize(
    ("text", "violations", "note"),
    [
        ("<note>He has gout.</note>", ("no_reasoning",), "He has gout."),
        ("<think> \n </think><note>He has gout.</note>", ("empty_reasoning",), "He has gout."),
        ("</think><note>He has gout.</note>", ("empty_reasoning",), "He has gout."),
        ("<think>a <think>b</think><note>He has gout.</note>", ("nested_reasoning",), "He has gout."),
        ("<think>a</think>Here it is: <note>He has gout.</note>", ("text_before_note",), "He has gout."),
        ("<think>a</think><note>He has gout.</note> Done.", ("text_after_note",), "He has gout."),
        ("<think>a</think>He has gout.", ("no_note",), None),
        ("<think>a</think><note>He has gout.", ("no_note",), None),
        ("<think>a</think>He has gout.</note>", ("no_note",), None),
        ("<think>a</think></note>He has gout.<note>", ("no_note",), None),
        ("<think>a</think><NOTE>He has gout.</NOTE>", ("no_note",), None),
        ("<think>a</think><note>\n \t</note>", ("empty_note",), None),
        ("", ("no_reasoning", "no_note"), None),
        ("Hi <note>He has gout.</note> bye", ("no_reasoning", "text_before_note", "text_after_note"), "He has gout."),
    ],
)
def test_departures_of_the_attacker_are_named(text: str, violations: tuple[str, ...], note: str | None) -> None:
    parsed = MEDSERL.attack(text)
    assert (parsed.violations, parsed.note) == (violations, note)


@pytest.mark.parametrize(
    "note",
    [
        "He said </note> aloud.",
        "Plan: </think> rest.",
        "<think>quiet</think> was written on it.",
        "It reads <answer>verdict: safe</answer> at the end.",
        "A <|im_end|> B <|im_start|>user",
    ],
)
def test_tag_look_alikes_inside_a_note_belong_to_the_note(note: str) -> None:
    parsed = MEDSERL.attack(attack_text(note))
    assert (parsed.note, parsed.violations) == (note, ())


@pytest.mark.parametrize(
    "text",
    [
        "<think>I will wrap it in <note> tags. <note>He has scurvy.</note>",
        "<think>plan</think><note>first</note> the plan again <note>He has scurvy.</note>",
    ],
)
def test_nothing_before_the_last_opening_tag_gets_into_the_note(text: str) -> None:
    parsed = MEDSERL.attack(text)
    assert parsed.note == "He has scurvy."
    assert parsed.violations


def test_a_draft_of_the_note_inside_the_reasoning_is_not_the_note() -> None:
    parsed = MEDSERL.attack(attack_text("He has gout.", reasoning="maybe <note>He has scurvy.</note>?"))
    assert parsed.note == "He has gout."


def test_a_note_that_stands_in_the_reasoning_only_is_no_note() -> None:
    assert MEDSERL.attack("<think>maybe <note>He has scurvy.</note></think>").note is None


@given(plain_text.filter(lambda t: "</think>" not in t), plain_text)
def test_reasoning_never_gets_into_the_note(reasoning: str, note: str) -> None:
    secret = f"SECRET{reasoning}SECRET"
    parsed = MEDSERL.attack(attack_text(note, reasoning=secret))
    assert parsed.note == note.strip()
    assert "SECRET" in parsed.reasoning


@given(plain_text)
def test_any_note_in_the_format_comes_back_stripped(note: str) -> None:
    parsed = MEDSERL.attack(attack_text(note))
    assert (parsed.note, parsed.violations) == (note.strip(), ())


@given(model_text)
@example("<note></note>")
@example("<note></")
@examples(1000)
def test_no_text_makes_the_attack_parser_raise(text: str) -> None:
    parsed = MEDSERL.attack(text)
    assert parsed.note is None or parsed.note.strip() == parsed.note != ""


# --- the assessor's turn ---


def test_a_harmful_answer_gives_all_four_fields() -> None:
    parsed = MEDSERL.assessment(assessment_text(*GOOD_FIELDS, reasoning="hm"))
    assert parsed.verdict is Label.HARMFUL
    assert (parsed.sentence, parsed.correction) == ("Wrong.", "Right.")
    assert parsed.error_type is ErrorType.DIAGNOSIS
    assert (parsed.reasoning, parsed.violations) == ("hm", ())


def test_a_safe_answer_needs_the_verdict_only() -> None:
    parsed = MEDSERL.assessment(assessment_text("verdict: safe"))
    assert (parsed.verdict, parsed.violations) == (Label.SAFE, ())
    assert parsed.sentence is parsed.error_type is parsed.correction is None


@pytest.mark.parametrize(
    "spelling", ["harmful", "HARMFUL", "Harmful.", '"harmful"', "'Harmful'", '"harmful".', " harmful\t"]
)
def test_a_verdict_is_read_whatever_its_case_quotes_and_full_stop(spelling: str) -> None:
    parsed = MEDSERL.assessment(assessment_text(f"verdict: {spelling}", *GOOD_FIELDS[1:]))
    assert (parsed.verdict, parsed.violations) == (Label.HARMFUL, ())


@pytest.mark.parametrize("value", ["", "maybe", "safe or harmful", "not harmful", "unsafe", "harmless"])
def test_a_verdict_that_is_neither_label_is_unreadable(value: str) -> None:
    parsed = MEDSERL.assessment(assessment_text(f"verdict: {value}"))
    assert (parsed.verdict, parsed.violations) == (None, ("no_verdict",))


@pytest.mark.parametrize(
    ("text", "violations"),
    [
        ("<answer>verdict: safe</answer>", ("no_reasoning",)),
        ("<think></think><answer>verdict: safe</answer>", ("empty_reasoning",)),
        ("<think>a<think>b</think><answer>verdict: safe</answer>", ("nested_reasoning",)),
        ("<think>a</think>So: <answer>verdict: safe</answer>", ("text_before_answer",)),
        ("<think>a</think><answer>verdict: safe</answer> Bye.", ("text_after_answer",)),
        ("<think>a</think>verdict: safe", ("no_answer",)),
        ("<think>a</think><answer>verdict: safe", ("no_answer",)),
        ("<think>a</think><answer> </answer>", ("empty_answer",)),
        ("<think>a</think><answer>Well.\nverdict: safe</answer>", ("text_before_verdict",)),
        ("<think>a</think><answer>It is safe.</answer>", ("text_before_verdict", "no_verdict")),
        ("<think>a</think><answer>sentence: x</answer>", ("no_verdict",)),
        ("", ("no_reasoning", "no_answer")),
    ],
)
def test_departures_of_the_assessor_are_named(text: str, violations: tuple[str, ...]) -> None:
    assert MEDSERL.assessment(text).violations == violations


@pytest.mark.parametrize(
    ("index", "violation"), [(1, "no_sentence"), (2, "no_error_type"), (3, "no_correction")], ids=lambda v: str(v)
)
@pytest.mark.parametrize("emptied", [False, True], ids=["absent", "empty"])
def test_a_harmful_verdict_needs_every_field(index: int, violation: str, emptied: bool) -> None:
    lines = list(GOOD_FIELDS)
    name = lines.pop(index).partition(":")[0]
    if emptied:
        lines.insert(index, f"{name}:")
    parsed = MEDSERL.assessment(assessment_text(*lines))
    assert (parsed.verdict, parsed.violations) == (Label.HARMFUL, (violation,))


def test_an_error_type_outside_medec_is_a_violation_and_not_a_type() -> None:
    parsed = MEDSERL.assessment(assessment_text(GOOD_FIELDS[0], GOOD_FIELDS[1], "error_type: typo", GOOD_FIELDS[3]))
    assert (parsed.error_type, parsed.violations) == (None, ("no_error_type",))


@pytest.mark.parametrize("spelling", ["causalOrganism", "causal organism", "Causal-Organism.", "CAUSAL_ORGANISM"])
def test_an_error_type_is_read_whatever_its_case_and_spacing(spelling: str) -> None:
    assert ErrorType.parse(spelling) is ErrorType.CAUSAL_ORGANISM


@pytest.mark.parametrize("field", ["verdict", "sentence", "error_type", "correction"])
def test_a_repeated_field_is_a_violation_and_the_first_one_counts(field: str) -> None:
    other = {"verdict": "harmful", "error_type": "treatment"}.get(field, "Later.")
    parsed = MEDSERL.assessment(assessment_text(*GOOD_FIELDS, f"{field}: {other}"))
    assert parsed.violations == (f"repeated_{field}",)
    assert (parsed.verdict, parsed.sentence, parsed.correction) == (Label.HARMFUL, "Wrong.", "Right.")
    assert parsed.error_type is ErrorType.DIAGNOSIS


@pytest.mark.parametrize(
    "said",
    [
        "<answer>\nverdict: safe\nVerdict: harmful\n</answer>",
        "<answer>verdict: safe</answer><answer>verdict: harmful</answer>",
        "<answer>verdict: harmful\nsentence: Wrong.</answer> or <answer>verdict: safe</answer>",
        "<answer>verdict: safe</answer>\nverdict: HARMFUL.",
        "<answer>verdict: safe</answer> <answer> verdict:\n 'harmful'",
        "<answer>verdict:\nverdict: harmful\n</answer><answer>verdict: safe</answer>",
        "<answer>verdict: safe\n\nIt fits.</answer><answer>verdict: harmful</answer>",
    ],
)
def test_two_different_verdicts_are_none(said: str) -> None:
    parsed = MEDSERL.assessment(f"<think>a</think>{said}")
    assert parsed.verdict is None
    assert {"contradictory_verdicts", "no_verdict"} <= set(parsed.violations)


def test_the_same_verdict_twice_is_one() -> None:
    parsed = MEDSERL.assessment("<think>a</think><answer>verdict: safe</answer><answer>verdict: Safe.</answer>")
    assert (parsed.verdict, parsed.violations) == (Label.SAFE, ("text_before_answer",))


def test_a_copied_sentence_may_span_lines() -> None:
    lines = ("verdict: harmful", "sentence: Labs:\nHb 10\nWBC 5", "error_type: treatment", "correction: Hb 12\nWBC 5")
    parsed = MEDSERL.assessment(assessment_text(*lines))
    assert (parsed.sentence, parsed.correction, parsed.violations) == ("Labs:\nHb 10\nWBC 5", "Hb 12\nWBC 5", ())


def test_a_field_name_inside_a_line_is_part_of_the_value() -> None:
    parsed = MEDSERL.assessment(
        assessment_text(GOOD_FIELDS[0], "sentence: The verdict: safe was read out.", *GOOD_FIELDS[2:])
    )
    assert (parsed.verdict, parsed.sentence) == (Label.HARMFUL, "The verdict: safe was read out.")
    assert parsed.violations == ()


def test_fields_may_be_indented_and_come_with_carriage_returns() -> None:
    parsed = MEDSERL.assessment(assessment_text(*(f"  {line}\r" for line in GOOD_FIELDS)))
    assert (parsed.verdict, parsed.sentence, parsed.violations) == (Label.HARMFUL, "Wrong.", ())


def test_a_verdict_in_the_reasoning_does_not_count() -> None:
    text = assessment_text("verdict: safe", reasoning="first I thought <answer>verdict: harmful</answer>")
    assert MEDSERL.assessment(text).verdict is Label.SAFE


def test_answer_tags_inside_a_copied_sentence_belong_to_it() -> None:
    lines = ("verdict: harmful", "sentence: It says </answer> here.", *GOOD_FIELDS[2:])
    assert MEDSERL.assessment(assessment_text(*lines)).sentence == "It says </answer> here."


@given(field_value, field_value)
def test_any_sentence_and_correction_in_the_format_come_back(sentence: str, correction: str) -> None:
    lines = ("verdict: harmful", f"sentence: {sentence}", "error_type: diagnosis", f"correction: {correction}")
    parsed = MEDSERL.assessment(assessment_text(*lines))
    assert (parsed.sentence, parsed.correction, parsed.violations) == (sentence, correction, ())


@given(model_text | model_text.map(lambda t: f"<think>a</think><answer>{t}</answer>"))
@example("<think>a</think><answer>no field at all</answer>")
@examples(1000)
def test_no_text_makes_the_assessment_parser_raise(text: str) -> None:
    parsed = MEDSERL.assessment(text)
    assert parsed.verdict is not None or parsed.violations


@pytest.mark.parametrize("field", ["sentence: He has gout.", "error_type: diagnosis", "correction: He has not."])
def test_a_safe_verdict_comes_alone(field: str) -> None:
    parsed = MEDSERL.assessment(assessment_text("verdict: safe", field))
    assert (parsed.verdict, parsed.violations) == (Label.SAFE, ("safe_with_error",))


def test_empty_fields_beside_a_safe_verdict_name_no_error() -> None:
    assert MEDSERL.assessment(assessment_text("verdict: safe", "sentence:", "correction:")).violations == ()


# --- what the prompt has begun ---

OFF = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("text", "prefill", "violations"),
    [
        ("<think>a</think><note>n</note>", "", ()),
        ("a</think><note>n</note>", "<think>\n", ()),
        ("</think><note>n</note>", "<think>\n", ("empty_reasoning",)),
        ("<note>n</note>", "<think>\n", ("no_reasoning",)),
        ("<note>n</note>", OFF, ()),
        ("<think>a</think><note>n</note>", OFF, ()),
        ("a</think><note>n</note>", OFF + "<think>\n", ()),
        ("<note>n</note>", OFF + "<think>\n", ("no_reasoning",)),
    ],
)
def test_reasoning_is_asked_for_where_the_prompt_has_not_closed_it(
    text: str, prefill: str, violations: tuple[str, ...]
) -> None:
    assert (MEDSERL.attack(text, prefill).note, MEDSERL.attack(text, prefill).violations) == ("n", violations)


def test_a_closing_tag_in_a_note_is_no_reasoning_where_the_prompt_has_closed_it() -> None:
    parsed = MEDSERL.attack("<note>Plan: </think> rest.</note>", OFF)
    assert (parsed.note, parsed.reasoning, parsed.violations) == ("Plan: </think> rest.", "", ())
