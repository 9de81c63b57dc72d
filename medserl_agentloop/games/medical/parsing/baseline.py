"""The output format of the ``baseline`` profile: ``thinking</think><answer>…</answer>``.

The format of the OpenRLHF medical self-play system. Its prompt ends with an opened ``<think>``, so a
turn that opens another one breaks the format. The answer is the attacker's note, or the assessor's
``Safe`` or ``Harmful``; where the error is, this format does not say.
"""

from __future__ import annotations

from medserl_agentloop.games.medical.parsing.base import (
    CONTRADICTION,
    END_THINK,
    THINK,
    ParsedAssessment,
    ParsedAttack,
    TurnFormat,
    contradictory,
)
from medserl_agentloop.games.medical.types import ErrorType, Label

_ANSWER, _END_ANSWER = "<answer>", "</answer>"


def format_violations(text: str) -> tuple[str, ...]:
    """What the system's format check holds against a turn, one by one; empty if it passes."""
    once = {
        "end_think_not_once": text.count(END_THINK) == 1,
        "answer_not_once": text.count(_ANSWER) == 1,
        "end_answer_not_once": text.count(_END_ANSWER) == 1,
    }
    thinking, _, rest = text.partition(END_THINK)
    between, _, answer = rest.partition(_ANSWER)
    answer = answer.partition(_END_ANSWER)[0]
    in_order = -1 < text.find(END_THINK) < text.find(_ANSWER) < text.find(_END_ANSWER)
    found = {
        "think_in_response": THINK in text,
        **{name: not kept for name, kept in once.items()},
        "tags_out_of_order": all(once.values()) and not in_order,
        "empty_thinking": END_THINK in text and not thinking.strip(),
        "empty_answer": in_order and not answer.strip(),
        "text_before_answer": in_order and bool(between.strip()),
        "text_after_answer": not text.rstrip().endswith(_END_ANSWER),
    }
    return tuple(name for name, holds in found.items() if holds)


def parse_attack(text: str, prefill: str = "") -> ParsedAttack:
    """Read an attacker's turn. Without an ``<answer>`` there is no note: the raw text never passes for one."""
    return ParsedAttack(_answer(text), _thinking(text), format_violations(text))


def parse_assessment(text: str, prefill: str = "") -> ParsedAssessment:
    """Read an assessor's turn. A kept format with another word in it has no verdict and no violation."""
    verdict, violations = _verdict(_answer(text) or ""), format_violations(text)
    said = text.partition(END_THINK)[2]
    answers = (said if _ANSWER in said else text).split(_ANSWER)[1:]
    if contradictory([verdict, *(_verdict(answer.partition(_END_ANSWER)[0]) for answer in answers)]):
        verdict, violations = None, (*violations, CONTRADICTION)
    return ParsedAssessment(verdict, None, None, None, _thinking(text), violations)


def _verdict(answer: str) -> Label | None:
    said = answer.strip(" \t\r\n.*\"'").lower()
    return Label(said) if said in {label.value for label in Label} else None


def _thinking(text: str) -> str:
    return text.partition(END_THINK)[0].strip() if END_THINK in text else ""


def _answer(text: str) -> str | None:
    """What the last answer holds: up to its own closing tag, and nothing that stands before it."""
    end = text.rfind(_END_ANSWER)
    start = text.rfind(_ANSWER, 0, max(end, 0))
    if start < 0:
        return None
    start += len(_ANSWER)
    return text[start : text.find(_END_ANSWER, start)].strip() or None


def _compose_attack(reasoning: str, note: str, label: Label, prefill: str) -> str:
    return f"{reasoning}{END_THINK}{_ANSWER}{note}{_END_ANSWER}"


def _compose_assessment(
    reasoning: str,
    verdict: Label,
    sentence: str | None,
    error_type: ErrorType | None,
    correction: str | None,
    prefill: str,
) -> str:
    return f"{reasoning}{END_THINK}{_ANSWER}{verdict.value.capitalize()}{_END_ANSWER}"


BASELINE = TurnFormat(parse_attack, parse_assessment, _compose_attack, _compose_assessment)
