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

from medserl_agentloop.games.medical.case import ErrorType, Label, known_type
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
    "verdict: harmful",
    "sentence: Wrong.",
    "error_type: diagnosis",
    "correction: Right.",
)
DECLARED = f'generated_note:\n{GOUT}\n\nfinal_answer: "INCORRECT"'
SECRET = "SECRET"


# --- attacks: text -> note, reasoning and violations ---

ATTACKS = {
    "medserl": [
        ("<think>plan</think>\n<note>He has gout.</note>", "", GOUT, "plan", []),
        ("plan</think><note>He has gout.</note>", "", GOUT, "plan", []),
        ("<note>He has gout.</note>", "", GOUT, "", ["no_reasoning"]),
        ("<think> \n </think><note>He has gout.</note>", "", GOUT, "", ["empty_reasoning"]),
        ("<think>a <think>b</think><note>He has "
         "gout.</note>", "", GOUT, "a <think>b", ["nested_reasoning"]),
        ("<think>a</think>Here it is: <note>He has "
         "gout.</note>", "", GOUT, "a", ["text_before_note"]),
        ("<think>a</think><note>He has gout.</note> Done.", "", GOUT, "a", ["text_after_note"]),
        ("<think>a</think>He has gout.", "", None, "a", ["no_note"]),
        ("<think>a</think><note>He has gout.", "", None, "a", ["no_note"]),
        ("<think>a</think><note>\n \t</note>", "", None, "a", ["empty_note"]),
        ("<think>a <note>b</note></think>", "", None, "a <note>b</note>", ["no_note"]),
        ("", "", None, "", ["no_reasoning", "no_note"]),
        ("<think>a</think><note>b</note> again <note>He has "
         "gout.</note>", "", GOUT, "a", ["text_before_note"]),
        *(
            # look-alikes inside a note belong to the note
            (attack_text(note), "", note, "swap the drug", [])
            for note in (
                "He said </note> "
                "aloud.", "Plan: </think> rest.", "<think>quiet</think> was written on it.",
                "It reads <answer>verdict: safe</answer> at the "
                "end.", "A <|im_end|> B <|im_start|>user",
            )
        ),
        # Where the prompt has begun or closed the reasoning.
        ("a</think><note>He has gout.</note>", OPEN, GOUT, "a", []),
        ("</think><note>He has gout.</note>", OPEN, GOUT, "", ["empty_reasoning"]),
        ("<note>He has gout.</note>", OPEN, GOUT, "", ["no_reasoning"]),
        ("<note>He has gout.</note>", OFF, GOUT, "", []),
        ("<note>Plan: </think> rest.</note>", OFF, "Plan: </think> rest.", "", []),
        ("a</think><note>He has gout.</note>", OFF + OPEN, GOUT, "a", []),
    ],
    "classic": [
        (f"<think>plan</think>\n\n{DECLARED}", "", GOUT, "plan", []),
        (DECLARED, "", GOUT, "", []),
        (f"I change the drug.\n{DECLARED}", "", GOUT, "I change the drug.", []),
        (f"plan</think>{DECLARED}", OPEN, GOUT, "plan", []),
        (f"<think>again</think>{DECLARED}", OFF, GOUT, "again", []),
        (f"{DECLARED}\nchanges_made: the drug", "", GOUT, "", []),
        ("generated_note: He has gout.\n CHANGES_MADE : {}\nfinal_answer: "
         "INCORRECT", "", GOUT, "", []),
        (GOUT, "", None, GOUT, ["no_generated_note", "no_final_answer"]),
        ('final_answer: "CORRECT"', "", None, "", ["no_generated_note"]),
        ('generated_note:\n\nfinal_answer: "CORRECT"', "", None, "", ["empty_generated_note"]),
        (f"generated_note:\n{GOUT}", "", GOUT, "", ["no_final_answer"]),
        ("generated_note: x\nfinal_answer: maybe", "", "x", "", ["no_final_answer"]),
        (f"generated_note: a draft\n{DECLARED}", "", GOUT, "", ["repeated_generated_note"]),
        (f'{DECLARED}\nfinal_answer: "CORRECT"', "", GOUT, "",
         ["repeated_final_answer", "contradictory_verdicts", "no_final_answer"]),
        (f"{DECLARED}\nDone.", "", GOUT, "", ["text_after_final_answer"]),
        (f"<think>a</think>Here: \n{DECLARED}", "", GOUT, "a", ["text_before_fields"]),
        (f"<think>a\n{DECLARED}", "", None, f"a\n{DECLARED}",
         ["unclosed_reasoning", "no_generated_note", "no_final_answer"]),
        ('generated_note:\nPlan: </think> rest.\nfinal_answer: '
         '"CORRECT"', "", "Plan: </think> rest.", "", []),
    ],
    # The format check of the OpenRLHF system, point by point. Without an answer the raw text never
    # passes for one.
    "baseline": [
        *((f"plan</think>{gap}<answer>{gap}{GOUT}{gap}</answer>{gap}", "", GOUT, "plan",
        []) for gap in ("", "\n")),
        ("<think>a</think><answer>b</answer>", "", "b", "<think>a", ["think_in_response"]),
        (" </think><answer>b</answer>", "", "b", "", ["empty_thinking"]),
        ("a</think><answer> </answer>", "", None, "a", ["empty_answer"]),
        ("a<answer>b</answer>", "", "b", "", ["end_think_not_once"]),
        ("a</think>b</think><answer>c</answer>", "", "c", "a", ["end_think_not_once",
        "text_before_answer"]),
        ("a</think>b</answer>", "", None, "a", ["answer_not_once"]),
        ("a</think><answer>b", "", None, "a", ["end_answer_not_once", "text_after_answer"]),
        ("a</think><answer>b</answer></answer>", "", "b", "a", ["end_answer_not_once"]),
        ("<answer>b</answer>a</think>", "", "b", "<answer>b</answer>a", ["tags_out_of_order",
        "text_after_answer"]),
        ("a</think></answer>b<answer>", "", None, "a", ["tags_out_of_order", "text_after_answer"]),
        ("a</think>So: <answer>b</answer>", "", "b", "a", ["text_before_answer"]),
        ("a</think><answer>b</answer> Done.", "", "b", "a", ["text_after_answer"]),
        ("", "", None, "",
         ["end_think_not_once", "answer_not_once", "end_answer_not_once", "text_after_answer"]),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "prefill", "note", "reasoning", "violations"),
    [(name, *case) for name, cases in ATTACKS.items() for case in cases],
)
def test_an_attack_is_its_note_its_reasoning_and_its_departures(
    name: str, text: str, prefill: str, note: str | None, reasoning: str, violations: list[str]
) -> None:
    turn = load_parser(name).attack(text, prefill)
    assert (turn.note, turn.reasoning, sorted(turn.violations)) == (
        note,
        reasoning,
        sorted(violations),
    )


# --- assessments: text -> verdict and violations ---

FITS, THINKS = "\nExplanation: fits.", "<think>a</think>"
ASSESSMENTS = {
    "medserl": [
        (assessment_text("verdict: safe"), SAFE, []),
        *(
            (assessment_text(f"verdict: {word}", *GOOD_FIELDS[1:]), HARMFUL, [])
            for word in ("harmful", "HARMFUL", "Harmful.", '"harmful"', "'Harmful'", '"harmful".',
            " harmful\t")
        ),
        *(
            (assessment_text(f"verdict: {word}"), None, ["no_verdict"])
            for word in ("", "maybe", "safe or harmful", "not harmful", "unsafe", "harmless")
        ),
        # Reasoning and text outside the tags are read as those of an attack.
        (THINKS + "verdict: safe", None, ["no_answer"]),
        (THINKS + "<answer>Well.\nverdict: safe</answer>", SAFE, ["text_before_verdict"]),
        (THINKS + "<answer>It is safe.</answer>", None, ["text_before_verdict", "no_verdict"]),
        (THINKS + "<answer>verdict: safe</answer><answer>verdict: "
                  "Safe.</answer>", SAFE, ["text_before_answer"]),
        (THINKS + "first <answer>verdict: harmful</answer></think><answer>verdict: "
                  "safe</answer>", None, ["*"]),
        ("<think><answer>verdict: harmful</answer></think><answer>verdict: "
         "safe</answer>", SAFE, []),
        ("", None, ["no_reasoning", "no_answer"]),
        *(
            (assessment_text("verdict: harmful", *lines), HARMFUL, [violation])
            for gap, violation in ((1, "no_sentence"), (2, "no_error_type"), (3, "no_correction"))
            for lines in (
                [line for line in GOOD_FIELDS[1:] if line != GOOD_FIELDS[gap]],
                [
                    line if line != GOOD_FIELDS[gap] else line.partition(" ")[0]
                    for line in GOOD_FIELDS[1:]
                ],
            )
        ),
        *(
            (assessment_text(*GOOD_FIELDS[:3], "correction: "
                                               f"{nothing}"), HARMFUL, ["no_correction"])
            # the last two are the sentence
            for nothing in (".", "NA", "n/a", "none", "-", "WRONG!", "Wr\u00f3ng.")
        ),
        (assessment_text(*GOOD_FIELDS[:2], "error_type: "
                                           "typo", GOOD_FIELDS[3]), HARMFUL, ["no_error_type"]),
        *(
            (assessment_text(*GOOD_FIELDS, line), HARMFUL, [f"repeated_{line.partition(':')[0]}"])
            for line in GOOD_FIELDS
        ),
        *((assessment_text("verdict: "
                           "safe", line), SAFE, ["safe_with_error"]) for line in GOOD_FIELDS[1:]),
        (assessment_text("verdict: safe", "sentence:", "correction:"), SAFE, []),
        *(
            (THINKS + answers, None, ["*"])
            for answers in (
                "<answer>\nverdict: safe\nVerdict: harmful\n</answer>",
                "<answer>verdict: safe</answer><answer>verdict: harmful</answer>",
                "<answer>verdict: safe</answer>\nverdict: HARMFUL.",
                "<answer>verdict:\nverdict: harmful\n</answer><answer>verdict: safe</answer>",
                "<answer>verdict: safe\n\nIt fits.</answer><answer>verdict: harmful</answer>",
            )
        ),
    ],
    "classic": [
        (f'final_answer: "CORRECT"{FITS}', SAFE, []),
        (f'final_answer: "INCORRECT"{FITS}', HARMFUL, []),
        ("Final_Answer: incorrect.\nexplanation: does not.", HARMFUL, []),
        (f"<think>first\nfinal_answer: INCORRECT</think>\nfinal_answer: CORRECT{FITS}", SAFE, []),
        ('final_answer: "CORRECT"', SAFE, ["no_explanation"]),
        ('final_answer: "CORRECT"\nExplanation:', SAFE, ["no_explanation"]),
        ("Explanation: it is INCORRECT", None, ["no_final_answer"]),
        (f"final_answer: CORRECT or INCORRECT{FITS}", None, ["no_final_answer"]),
        (f"final_answer: CORRECT\nfinal_answer: correct{FITS}", SAFE, ["repeated_final_answer"]),
        ("", None, ["no_final_answer", "no_explanation"]),
        (f'final_answer: "CORRECT"\nfinal_answer: "INCORRECT"{FITS}', None, ["*"]),
        ("final_answer: INCORRECT\nExplanation: x\nfinal_answer: correct.", None, ["*"]),
        (f"final_answer: CORRECT\nINCORRECT{FITS}", None, ["*"]),
    ],
    "baseline": [
        *(
            (f"hm</think><answer>{word}</answer>", verdict, [])
            for word, verdict in (
                ("Safe", SAFE), ("Harmful", HARMFUL), (' "SAFE" ', SAFE), ("Unsafe", None),
            )
        ),
        ("a <answer>Safe</answer>, no</think><answer>Harmful</answer>", HARMFUL,
         ["answer_not_once", "end_answer_not_once"]),
        ("hm</think><answer>Safe</answer><answer>Harmful</answer>", None, ["*"]),
        ("hm</think><answer>Safe</answer> no, <answer>Harmful", None, ["*"]),
        ("<answer>Safe</answer><answer>Harmful</answer> hm</think>", None, ["*"]),
    ],
}  # fmt: skip
"""``*``: two different verdicts, which are none."""


@pytest.mark.parametrize(
    ("name", "text", "verdict", "violations"),
    [(name, *case) for name, cases in ASSESSMENTS.items() for case in cases],
)
def test_an_assessment_is_its_verdict_and_its_departures(
    name: str, text: str, verdict: Label | None, violations: list[str]
) -> None:
    turn = load_parser(name).assessment(text)
    assert turn.verdict is verdict
    if violations == ["*"]:
        assert "contradictory_verdicts" in turn.violations
    else:
        assert turn.violations == violations


LABS = ("Labs:\nHb 10", "Labs:\nHb 12")
FIRST = GOOD_FIELDS[0]


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (GOOD_FIELDS, ("Wrong.", "Right.")),
        ([f"  {line}\r" for line in GOOD_FIELDS], ("Wrong.", "Right.")),
        ([*GOOD_FIELDS, "sentence: Later."], ("Wrong.", "Right.")),
        ([FIRST, f"sentence: {LABS[0]}", GOOD_FIELDS[2], f"correction: {LABS[1]}"], LABS),
        *(
            ([FIRST, f"sentence: {text}", *GOOD_FIELDS[2:]], (text, "Right."))
            for text in ("The verdict: safe.", "It says </answer> here.")
        ),
    ],
)
def test_a_harmful_answer_says_where_the_error_is(lines: list[str], error: tuple[str, str]) -> None:
    turn = MEDSERL.assessment(assessment_text(*lines, reasoning="hm"))
    assert (turn.verdict, turn.sentence, turn.correction) == (HARMFUL, *error)
    assert (turn.error_type, turn.reasoning) == (ErrorType.DIAGNOSIS, "hm")


@pytest.mark.parametrize(
    "spelling", ["causalOrganism", "causal organism", "Causal-Organism.", "CAUSAL_ORGANISM"]
)
def test_an_error_type_is_read_whatever_its_case_and_spacing(spelling: str) -> None:
    assert known_type(spelling) == ErrorType.CAUSAL_ORGANISM


# --- of any text: nothing raises, and nothing but the note crosses ---

PIECES = [
    "<think>", "</think>", "<note>", "</note>", "<answer>", "</answer>", "\n", "\n", " ", ".",
    "\u200b", "\ud800",
    "verdict:", "sentence:", "correction:", "error_type:", "harmful", "safe", "diagnosis",
    "generated_note:",
    "final_answer:", "Explanation:", "changes_made:", '"CORRECT"', "INCORRECT", "Safe", "Harmful",
    "<|im_end|>",
    "{{ note }}", "He has gout.", "x",
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
        assert attack.note is None or (
            attack.note.strip() == attack.note != "" and attack.note in text
        )
        assert attack.note is not None or attack.edit is not None or attack.violations
        assert attack.reasoning in text and assessment.reasoning in text
        # Whatever look-alikes stand in the plan, and in what is declared, the secret stays out of
        # the note.
        assert SECRET not in (turns.attack(TURNS[name](secret, SUBTLE_NOTE)).note or "")


@FORMATS
@pytest.mark.parametrize("opened", ["", OPEN])
def test_unfinished_turn_presents_nothing(name: str, opened: str) -> None:
    """A turn that ends in its reasoning: medserl and baseline have a closing tag to wait for,
    classic has none.
    """
    drafts = [
        f"{SECRET} plan",
        f"plan\ngenerated_note:\nHe has gout. {SECRET}",
        f"plan <note>{SECRET}",
        "<answer> x",
    ]
    for draft in drafts:
        assert load_parser(name).attack(draft if opened else f"<think>{draft}", opened).note is None


def assessed(reasoning: str, verdict: Label, *error: Any) -> AssessmentRecord:
    located = dict(zip(("sentence", "error_type", "correction"), error, strict=False))
    return AssessmentRecord(verdict=verdict, reasoning=reasoning, **located)


def read_back(turns: TurnFormat, prefill: str, reasoning: str, note: str) -> bool:
    """Whether the format wrote the turn, which replaces a sentence by ``note`` or is it; it must
    then read the same.
    """
    written = AttackRecord(note=note, reasoning=reasoning)
    if turns.numbered:
        written = AttackRecord(
            note=None, reasoning=reasoning, edit=SentenceEdit(number=7, old=GOUT, new=note)
        )
    known = [{7: GOUT}] if turns.numbered else []
    try:
        text = turns.write(written, HARMFUL, prefill, *known)
    except UnwritableTurn:
        return False
    turn = turns.attack(text, prefill, *known)
    assert (turn.note, turn.edit, turn.reasoning) == (
        written.note,
        written.edit,
        reasoning,
    ) and not turn.violations
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
    assert turns.write(
        assessed("no", HARMFUL, GOUT, ErrorType.TREATMENT, "Or not."), HARMFUL, prefill
    )
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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nonesuch", "expected one of baseline, classic, edits, medserl"),
        ("a.b:C", "cannot be loaded"),
        ("json:dumps", "no"),
    ],
)
def test_parser_is_found_by_name_or_module_path_and_others_are_refused(
    name: str, message: str
) -> None:
    assert load_parser("classic") is CLASSIC
    assert load_parser("medserl_agentloop.medical_team.formats:BASELINE") is BASELINE
    with pytest.raises(ValueError, match=message):
        load_parser(name)
