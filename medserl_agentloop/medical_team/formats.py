"""The formats of the earlier verl system (``classic``) and of the OpenRLHF system
(``baseline``)."""

from __future__ import annotations

import re

from medserl_agentloop.core.encoding import END_THINK, THINK, reasoning_open
from medserl_agentloop.games.medical.case import Label
from medserl_agentloop.games.medical.parsing import (
    CONTRADICTION,
    TurnFormat,
    attack_record,
    contradictory,
    last_section,
    repeated_fields,
    split_fields,
    split_reasoning,
    verdict_of,
    write_reasoning,
)
from medserl_agentloop.games.medical.records import AssessmentRecord, AttackRecord

# -- classic: named fields, each at the start of a line --------------------------------------------

_CLASSIC_FIELD = re.compile(
    r"^[ \t]*(generated_note|final_answer|changes_made|explanation)[ \t]*:",
    re.MULTILINE | re.IGNORECASE,
)
_WORDS = {"correct": Label.SAFE, "incorrect": Label.HARMFUL}
_WORD_OF = {label: word.upper() for word, label in _WORDS.items()}


def _classic_fields(text: str, prefill: str) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Reasoning, fields in order, and what is wrong with them."""
    # Where a turn begins with a field, a </think> further down is quoted by one.
    begins_with_field = not reasoning_open(prefill) and _CLASSIC_FIELD.match(text.lstrip())
    reasoning, rest = (None, text) if begins_with_field else split_reasoning(text, prefill)
    before, fields = split_fields(_CLASSIC_FIELD, rest)
    if reasoning is None and (reasoning_open(prefill) or THINK in before):
        # What looks like a field may be a draft, and what follows it thoughts: none of it is said.
        return text.strip().removeprefix(THINK).strip(), [], ["unclosed_reasoning"]
    violations = repeated_fields(fields)
    if reasoning is None:
        return before, fields, violations
    return reasoning, fields, ["text_before_fields"] * bool(before and fields) + violations


def _classic_attack(text: str, prefill: str = "") -> AttackRecord:
    """The note runs from the last ``generated_note:``, others are drafts, to the next field."""
    reasoning, fields, violations = _classic_fields(text, prefill)
    notes = [value for name, value in fields if name == "generated_note"]
    if not notes or not notes[-1]:
        violations.append("empty_generated_note" if notes else "no_generated_note")
    _classic_verdict(fields, violations)
    return attack_record(notes[-1] if notes else "", reasoning, violations)


def _classic_assessment(text: str, prefill: str = "") -> AssessmentRecord:
    """The first occurrence of a field counts; a second, different final answer cancels it."""
    reasoning, fields, violations = _classic_fields(text, prefill)
    verdict = _classic_verdict(fields, violations)
    if not dict(fields).get("explanation"):
        violations.append("no_explanation")
    return AssessmentRecord(verdict=verdict, reasoning=reasoning, violations=violations)


def _classic_verdict(fields: list[tuple[str, str]], violations: list[str]) -> Label | None:
    """Return the verdict of the final answer; add its faults to ``violations``."""
    answers = [value for name, value in fields if name == "final_answer"]
    label = None
    if contradictory(verdict_of(line, _WORDS) for answer in answers for line in answer.split("\n")):
        violations.append(CONTRADICTION)
    elif answers:
        word, _, more = answers[0].partition("\n")
        label = verdict_of(word, _WORDS)
        if label is not None and more.strip():
            violations.append("text_after_final_answer")
    if label is None:
        violations.append("no_final_answer")
    return label


def _compose_classic_attack(turn: AttackRecord, label: Label, prefill: str) -> str:
    reasoning = write_reasoning(turn.reasoning, prefill)
    return f'{reasoning}generated_note:\n{turn.note}\n\nfinal_answer: "{_WORD_OF[label]}"'


def _compose_classic_assessment(turn: AssessmentRecord, verdict: Label, prefill: str) -> str:
    said = (
        turn.sentence and f"This sentence is wrong: {turn.sentence}",
        turn.error_type and f"Type of error: {turn.error_type}.",
        turn.correction and f"It should read: {turn.correction}",
    )
    why = " ".join(filter(None, said)) or f"The note is medically {_WORD_OF[verdict].lower()}."
    answer = f'final_answer: "{_WORD_OF[verdict]}"\nExplanation: {why}'
    return write_reasoning(turn.reasoning, prefill) + answer


CLASSIC = TurnFormat(
    _classic_attack, _classic_assessment, _compose_classic_attack, _compose_classic_assessment
)
"""The format of the ``classic`` profile, with the fields of the earlier verl system.

As ``final_answer:`` the attacker says what the note is. Text before the fields is reasoning.
"""


# -- baseline: thinking</think><answer>…</answer> --------------------------------------------------

_ANSWER, _END_ANSWER = "<answer>", "</answer>"


def _baseline_turn(text: str) -> tuple[str, str, list[str]]:
    """The last answer ("" without tags), the reasoning, and what violates the original's format."""
    section = last_section(text, "answer")
    last = section[1].partition(_END_ANSWER)[0].strip() if section else ""
    thinking, ended, rest = text.partition(END_THINK)
    between, _, first = rest.partition(_ANSWER)
    first = first.partition(_END_ANSWER)[0]
    once = [text.count(tag) == 1 for tag in (END_THINK, _ANSWER, _END_ANSWER)]
    in_order = -1 < text.find(END_THINK) < text.find(_ANSWER) < text.find(_END_ANSWER)
    faults = {
        "think_in_response": THINK in text,
        "end_think_not_once": not once[0],
        "answer_not_once": not once[1],
        "end_answer_not_once": not once[2],
        "tags_out_of_order": all(once) and not in_order,
        "empty_thinking": ended and not thinking.strip(),
        "empty_answer": in_order and not first.strip(),
        "text_before_answer": in_order and between.strip(),
        "text_after_answer": not text.rstrip().endswith(_END_ANSWER),
    }
    violations = [name for name, holds in faults.items() if holds]
    return last, thinking.strip() if ended else "", violations


def _baseline_assessment(text: str, prefill: str = "") -> AssessmentRecord:
    """A correct format with another word has no verdict and no violation."""
    answer, reasoning, violations = _baseline_turn(text)
    verdict = verdict_of(answer)
    rest = text.partition(END_THINK)[2]
    answers = (rest if _ANSWER in rest else text).split(_ANSWER)[1:]
    if contradictory(
        [verdict, *(verdict_of(answer.partition(_END_ANSWER)[0]) for answer in answers)]
    ):
        verdict = None
        violations.append(CONTRADICTION)
    return AssessmentRecord(verdict=verdict, reasoning=reasoning, violations=violations)


BASELINE = TurnFormat(
    lambda text, prefill="": attack_record(*_baseline_turn(text)),
    _baseline_assessment,
    lambda turn, label, prefill: f"{turn.reasoning}{END_THINK}{_ANSWER}{turn.note}{_END_ANSWER}",
    lambda turn, verdict, prefill: (
        f"{turn.reasoning}{END_THINK}{_ANSWER}{verdict.value.capitalize()}{_END_ANSWER}"
    ),
)
"""The format of the ``baseline`` profile and of the OpenRLHF medical self-play system.

Its prompt ends with an opened ``<think>``, so a turn that opens another one breaks the format.
"""
