"""Reading and writing the turns of every prompt profile: what counts, every departure by its name,
and no surprise.
"""

from collections.abc import Callable
from typing import Any

import pytest
from examples import examples
from game.builders import CLEAN_NOTE, SUBTLE_NOTE, assessment_text, attack_text
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from medserl_agentloop.games.medical.case import ErrorType, Label
from medserl_agentloop.games.medical.parsing import (
    EDITS,
    MEDSERL,
    PARSERS,
    TurnFormat,
    UnwritableTurn,
    load_parser,
)
from medserl_agentloop.games.medical.records import AssessmentRecord, AttackRecord, SentenceEdit
from medserl_agentloop.medical_team.formats import BASELINE, CLASSIC

FORMATS = pytest.mark.parametrize("name", sorted(PARSERS))
OPEN, OFF = "<think>\n", "<think>\n\n</think>\n\n"
PREFILLS = ["", OPEN, OFF, OFF + OPEN]
SAFE, HARMFUL = Label.SAFE, Label.HARMFUL

GOUT = "He has gout."
GOOD_FIELDS = (
    "verdict: harmful", "sentence: Wrong.", "error_type: diagnosis", "correction: Right."
)  # fmt: skip
DECLARED = f'generated_note:\n{GOUT}\n\nfinal_answer: "INCORRECT"'
SECRET = "SECRET"


# --- attacks: text -> note, reasoning and violations ---

THOUGHT, NOTE = "<think>plan</think>", f"<note>{GOUT}</note>"
ATTACKS = {
    "medserl": [
        (f"{THOUGHT}\n{NOTE}", "", GOUT, "plan", []),
        (f"plan</think>{NOTE}", "", GOUT, "plan", []),
        (NOTE, "", GOUT, "", ["no_reasoning"]),
        (f"<think> \n </think>{NOTE}", "", GOUT, "", ["empty_reasoning"]),
        (f"<think>a <think>b</think>{NOTE}", "", GOUT, "a <think>b", ["nested_reasoning"]),
        (f"{THOUGHT}Here: {NOTE} Done.", "", GOUT, "plan", ["text_before_note", "text_after_note"]),
        (f"{THOUGHT}<note>{GOUT}", "", None, "plan", ["no_note"]),
        (f"{THOUGHT}<note>\n \t</note>", "", None, "plan", ["empty_note"]),
        ("<think>a <note>b</note></think>", "", None, "a <note>b</note>", ["no_note"]),
        (f"{THOUGHT}<note>b</note> again {NOTE}", "", GOUT, "plan", ["text_before_note"]),
        *(
            # look-alikes inside a note belong to the note
            (attack_text(note), "", note, "swap the drug", [])
            for note in ("He said </note> aloud.", "Plan: </think> rest.", "A <|im_end|> B")
        ),
        # Where the prompt has begun or closed the reasoning.
        (f"a</think>{NOTE}", OPEN, GOUT, "a", []),
        (NOTE, OPEN, GOUT, "", ["no_reasoning"]),
        ("<note>Plan: </think> rest.</note>", OFF, "Plan: </think> rest.", "", []),
        (f"a</think>{NOTE}", OFF + OPEN, GOUT, "a", []),
    ],
    "classic": [
        (f"{THOUGHT}\n\n{DECLARED}", "", GOUT, "plan", []),
        (f"I change the drug.\n{DECLARED}", "", GOUT, "I change the drug.", []),
        (f"<think>again</think>{DECLARED}", OFF, GOUT, "again", []),
        (f"{DECLARED}\nchanges_made: the drug", "", GOUT, "", []),
        (GOUT, "", None, GOUT, ["no_generated_note", "no_final_answer"]),
        ('generated_note:\n\nfinal_answer: "CORRECT"', "", None, "", ["empty_generated_note"]),
        ("generated_note: x\nfinal_answer: maybe", "", "x", "", ["no_final_answer"]),
        (f"generated_note: a draft\n{DECLARED}", "", GOUT, "", ["repeated_generated_note"]),
        (f'{DECLARED}\nfinal_answer: "CORRECT"', "", GOUT, "",
         ["repeated_final_answer", "contradictory_verdicts", "no_final_answer"]),
        (f"{DECLARED}\nDone.", "", GOUT, "", ["text_after_final_answer"]),
        (f"<think>a</think>Here: \n{DECLARED}", "", GOUT, "a", ["text_before_fields"]),
        (f"<think>a\n{DECLARED}", "", None, f"a\n{DECLARED}",
         ["unclosed_reasoning", "no_generated_note", "no_final_answer"]),
    ],
    # The format check of the OpenRLHF system, point by point. Without an answer the raw text never
    # passes for one.
    "baseline": [
        (f"plan</think>\n<answer>\n{GOUT}\n</answer>\n", "", GOUT, "plan", []),
        ("<think>a</think><answer>b</answer>", "", "b", "<think>a", ["think_in_response"]),
        (" </think><answer>b</answer>", "", "b", "", ["empty_thinking"]),
        ("a</think><answer> </answer>", "", None, "a", ["empty_answer"]),
        ("a<answer>b</answer>", "", "b", "", ["end_think_not_once"]),
        ("a</think>b</answer>", "", None, "a", ["answer_not_once"]),
        ("a</think><answer>b</answer></answer>", "", "b", "a", ["end_answer_not_once"]),
        ("<answer>b</answer>a</think>", "", "b", "<answer>b</answer>a",
         ["tags_out_of_order", "text_after_answer"]),
        ("a</think>So: <answer>b</answer> Done.", "", "b", "a",
         ["text_before_answer", "text_after_answer"]),
        ("", "", None, "",
         ["end_think_not_once", "answer_not_once", "end_answer_not_once", "text_after_answer"]),
    ],
}  # fmt: skip


EACH_ATTACK = [(name, *case) for name, cases in ATTACKS.items() for case in cases]


@pytest.mark.parametrize(
    ("name", "text", "prefill", "note", "reasoning", "violations"), EACH_ATTACK
)
def test_an_attack_is_its_note_its_reasoning_and_its_departures(
    name: str, text: str, prefill: str, note: str | None, reasoning: str, violations: list[str]
) -> None:
    turn = load_parser(name).attack(text, prefill)
    assert (turn.note, turn.reasoning) == (note, reasoning)
    assert sorted(turn.violations) == sorted(violations)


# --- assessments: text -> verdict and violations ---

FITS, THINKS = "\nExplanation: fits.", "<think>a</think>"
WITHOUT = {n: GOOD_FIELDS[1:n] + GOOD_FIELDS[n + 1 :] for n in (1, 2, 3)}
ASSESSMENTS = {
    "medserl": [
        (assessment_text("verdict: safe"), SAFE, []),
        *(
            (assessment_text(f"verdict: {word}", *GOOD_FIELDS[1:]), HARMFUL, [])
            for word in ("harmful", "HARMFUL", '"harmful".', " harmful\t")
        ),
        *(
            (assessment_text(f"verdict: {word}"), None, ["no_verdict"])
            for word in ("", "safe or harmful", "unsafe")
        ),
        # Reasoning and text outside the tags are read as those of an attack.
        (THINKS + "verdict: safe", None, ["no_answer"]),
        (THINKS + "<answer>Well.\nverdict: safe</answer>", SAFE, ["text_before_verdict"]),
        (THINKS + "<answer>It is safe.</answer>", None, ["text_before_verdict", "no_verdict"]),
        ("<think><answer>verdict: harmful</answer></think><answer>verdict: safe</answer>", SAFE,
         []),
        *(
            (assessment_text("verdict: harmful", *fields), HARMFUL, [violation])
            for fields, violation in zip(
                WITHOUT.values(), ("no_sentence", "no_error_type", "no_correction"), strict=True
            )
        ),
        *(
            (assessment_text(*GOOD_FIELDS[:3], f"correction: {nothing}"), HARMFUL,
             ["no_correction"])
            for nothing in (".", "n/a", "none", "WRONG!")  # the last is the sentence
        ),
        (assessment_text(*GOOD_FIELDS[:2], "error_type: typo", GOOD_FIELDS[3]), HARMFUL,
         ["no_error_type"]),
        *(
            (assessment_text(*GOOD_FIELDS, line), HARMFUL, [f"repeated_{line.partition(':')[0]}"])
            for line in GOOD_FIELDS
        ),
        (assessment_text("verdict: safe", GOOD_FIELDS[1]), SAFE, ["safe_with_error"]),
        (assessment_text("verdict: safe", "sentence:", "correction:"), SAFE, []),
        *(
            (THINKS + answers, None, ["*"])
            for answers in (
                "<answer>\nverdict: safe\nVerdict: harmful\n</answer>",
                "<answer>verdict: safe</answer><answer>verdict: harmful</answer>",
                "<answer>verdict: safe</answer>\nverdict: HARMFUL.",
                "first <answer>verdict: harmful</answer></think><answer>verdict: safe</answer>",
            )
        ),
    ],
    "classic": [
        (f'final_answer: "CORRECT"{FITS}', SAFE, []),
        ("Final_Answer: incorrect.\nexplanation: does not.", HARMFUL, []),
        (f"<think>first\nfinal_answer: INCORRECT</think>\nfinal_answer: CORRECT{FITS}", SAFE, []),
        ('final_answer: "CORRECT"\nExplanation:', SAFE, ["no_explanation"]),
        ("Explanation: it is INCORRECT", None, ["no_final_answer"]),
        (f"final_answer: CORRECT or INCORRECT{FITS}", None, ["no_final_answer"]),
        (f"final_answer: CORRECT\nfinal_answer: correct{FITS}", SAFE, ["repeated_final_answer"]),
        (f'final_answer: "CORRECT"\nfinal_answer: "INCORRECT"{FITS}', None, ["*"]),
        (f"final_answer: CORRECT\nINCORRECT{FITS}", None, ["*"]),
    ],
    "baseline": [
        ("hm</think><answer>Safe</answer>", SAFE, []),
        ('hm</think><answer> "HARMFUL" </answer>', HARMFUL, []),
        ("hm</think><answer>Unsafe</answer>", None, []),
        ("a <answer>Safe</answer>, no</think><answer>Harmful</answer>", HARMFUL,
         ["answer_not_once", "end_answer_not_once"]),
        ("hm</think><answer>Safe</answer><answer>Harmful</answer>", None, ["*"]),
        ("<answer>Safe</answer><answer>Harmful</answer> hm</think>", None, ["*"]),
    ],
}  # fmt: skip
"""``*``: two different verdicts, which are none."""


EACH_ASSESSMENT = [(name, *case) for name, cases in ASSESSMENTS.items() for case in cases]


@pytest.mark.parametrize(("name", "text", "verdict", "violations"), EACH_ASSESSMENT)
def test_an_assessment_is_its_verdict_and_its_departures(
    name: str, text: str, verdict: Label | None, violations: list[str]
) -> None:
    turn = load_parser(name).assessment(text)
    assert turn.verdict is verdict
    if violations == ["*"]:
        assert "contradictory_verdicts" in turn.violations
    else:
        assert turn.violations == violations


LOCATED = {
    ("Wrong.", "Right."): [f"  {line}\r" for line in GOOD_FIELDS],
    ("Labs:\nHb 10", "Labs:\nHb 12"): [
        GOOD_FIELDS[0], "sentence: Labs:\nHb 10", GOOD_FIELDS[2], "correction: Labs:\nHb 12",
    ],
    ("It says </answer>.", "Right."): [
        GOOD_FIELDS[0], "sentence: It says </answer>.", *GOOD_FIELDS[2:],
    ],
}  # fmt: skip


@pytest.mark.parametrize("error", LOCATED)
def test_a_harmful_answer_says_where_the_error_is(error: tuple[str, str]) -> None:
    turn = MEDSERL.assessment(assessment_text(*LOCATED[error], reasoning="hm"))
    assert (turn.verdict, turn.sentence, turn.correction) == (HARMFUL, *error)
    assert (turn.error_type, turn.reasoning) == (ErrorType.DIAGNOSIS, "hm")


# --- of any text: nothing raises, and nothing but the note crosses ---

PIECES = [
    "<think>", "</think>", "<note>", "</note>", "<answer>", "</answer>", "\n", " ", ".", "\u200b",
    "\ud800", "verdict:", "sentence:", "correction:", "error_type:", "harmful", "safe", "diagnosis",
    "generated_note:", "final_answer:", "Explanation:", "changes_made:", '"CORRECT"', "INCORRECT",
    "Safe", "Harmful", "<|im_end|>", "{{ note }}", "He has gout.", "x",
]  # fmt: skip

# What a player says besides the note: a plan before it, and in ``classic`` what it declares after
# it.
TURNS: dict[str, Callable[[str, str], str]] = {
    "medserl": lambda secret, note: f"<think>{secret}</think>\n<note>{note}</note>",
    "classic": lambda secret, note: (
        f'<think>{secret}</think>\ngenerated_note:\n{note}\n\nfinal_answer: "INCORRECT"\n'
        f"changes_made: {secret.replace('generated_note', '')}\nExplanation: {SECRET}"
    ),
    "baseline": lambda secret, note: f"{secret}</think><answer>{note}</answer>",
    "edits": lambda secret, note: (
        f"<think>{secret}</think>\n<edit>\nsentence: {secret}\nreplacement: {GOUT}\n</edit>"
    ),
}


texts = st.lists(st.sampled_from(PIECES), max_size=16).map("".join) | st.text(max_size=20)


@examples(2000)
@given(
    texts | st.sampled_from(["<answer></", "</answer><answer>", "generated_note:"]),
    st.sampled_from(PREFILLS),
)
def test_no_text_makes_a_parser_raise_and_nothing_but_the_note_crosses(
    text: str, prefill: str
) -> None:
    secret = f"{text} {SECRET} {text}".replace("</think>", "")
    for name in PARSERS:
        turns = load_parser(name)
        attack, assessment = turns.attack(text, prefill), turns.assessment(text, prefill)
        note = attack.note
        assert note is None or (note.strip() == note != "" and note in text)
        assert attack.note is not None or attack.edit is not None or attack.violations
        assert attack.reasoning in text and assessment.reasoning in text
        assert SECRET not in (turns.attack(TURNS[name](secret, SUBTLE_NOTE)).note or "")


def assessed(reasoning: str, verdict: Label, *error: Any) -> AssessmentRecord:
    located = dict(zip(("sentence", "error_type", "correction"), error, strict=False))
    return AssessmentRecord(verdict=verdict, reasoning=reasoning, **located)


def read_back(turns: TurnFormat, prefill: str, reasoning: str, note: str) -> bool:
    """Whether the format wrote the turn, which replaces a sentence by ``note`` or is it; it must
    then read the same.
    """
    written, known = AttackRecord(note=note, reasoning=reasoning), []
    if turns.numbered:
        edit = SentenceEdit(number=7, old=GOUT, new=note)
        written, known = AttackRecord(note=None, reasoning=reasoning, edit=edit), [{7: GOUT}]
    try:
        text = turns.write(written, HARMFUL, prefill, *known)
    except UnwritableTurn:
        return False
    turn = turns.attack(text, prefill, *known)
    assert (turn.note, turn.edit, turn.reasoning) == (written.note, written.edit, reasoning)
    assert not turn.violations
    return True


@examples(500, suppress_health_check=list(HealthCheck))
@given(
    prefill=st.sampled_from(PREFILLS),
    reasoning=texts,
    note=texts,
    verdict=st.sampled_from(Label),
    error=st.tuples(st.none() | texts, st.none() | st.sampled_from(ErrorType), st.none() | texts),
)
def test_a_turn_is_read_as_it_was_written_or_not_written(
    prefill: str,
    reasoning: str,
    note: str,
    verdict: Label,
    error: tuple[str | None, ErrorType | None, str | None],
) -> None:
    for turns in map(load_parser, PARSERS):
        read_back(turns, prefill, reasoning, note)
        try:
            text = turns.write(assessed(reasoning, verdict, *error), verdict, prefill)
        except UnwritableTurn:
            continue
        turn = turns.assessment(text, prefill)
        assert (turn.verdict, turn.reasoning, turn.violations) == (verdict, reasoning, [])
        if turns.locates:
            assert (turn.sentence, turn.error_type, turn.correction) == error


@FORMATS
@pytest.mark.parametrize("prefill", PREFILLS)
def test_ordinary_turns_can_be_written_after_every_prefill(name: str, prefill: str) -> None:
    turns = load_parser(name)
    assert read_back(turns, prefill, "the dose", CLEAN_NOTE)
    assert turns.write(assessed("fits", SAFE), SAFE, prefill)
    located = assessed("no", HARMFUL, GOUT, ErrorType.TREATMENT, "Or not.")
    assert turns.write(located, HARMFUL, prefill)
    edit = SentenceEdit(number=0, old=GOUT, new=CLEAN_NOTE)
    attack = AttackRecord(note=CLEAN_NOTE, reasoning="the dose", edit=edit)
    opened = turns.write(attack, HARMFUL, OPEN, *([{0: GOUT}] if turns.numbered else []))
    assert "<think>" not in opened and opened.startswith("the dose</think>")


NO_WRITER = TurnFormat(MEDSERL.attack, MEDSERL.assessment)
REFUSED = [
    (MEDSERL, " padded", "the note is not read back"),
    (CLASSIC, 'Plan:\nfinal_answer: "CORRECT"\nRest.', "repeated_final_answer"),
    (BASELINE, "He wrote <answer>.", "answer_not_once"),
    (NO_WRITER, "b", "cannot write"),
    (EDITS, "b", "the attack has none"),
]


@pytest.mark.parametrize(("turns", "note", "why"), REFUSED)
def test_a_refusal_says_why(turns: TurnFormat, note: str, why: str) -> None:
    with pytest.raises(UnwritableTurn, match=why):
        turns.write(AttackRecord(note=note, reasoning="plan"), HARMFUL)


def test_parser_is_found_by_name_or_module_path_and_others_are_refused() -> None:
    assert load_parser("classic") is CLASSIC
    assert load_parser("medserl_agentloop.medical_team.formats:BASELINE") is BASELINE
    for name in ("nonesuch", "a.b:C", "json:dumps"):
        with pytest.raises(ValueError, match=name):
            load_parser(name)
