"""The output format of the ``classic`` profile: named fields, each at the start of a line.

The fields of the earlier verl system. The attacker writes ``generated_note:`` and, as
``final_answer:``, what it says the note is (``"CORRECT"`` or ``"INCORRECT"``); it may add
``changes_made:`` or ``Explanation:``. The assessor writes ``final_answer:`` and ``Explanation:``; where
the error is, this format does not say apart. What stands before the fields is reasoning, in
``<think>`` or not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain

from medserl_agentloop.games.medical.parsing.base import (
    CONTRADICTION,
    THINK,
    ParsedAssessment,
    ParsedAttack,
    TurnFormat,
    contradictory,
    reasoning_open,
    split_reasoning,
    write_reasoning,
)
from medserl_agentloop.games.medical.types import ErrorType, Label

_FIELD = re.compile(r"^[ \t]*(generated_note|final_answer|changes_made|explanation)[ \t]*:", re.MULTILINE | re.I)
_WORDS = {"correct": Label.SAFE, "incorrect": Label.HARMFUL}
_SAID = {label: word.upper() for word, label in _WORDS.items()}


@dataclass(frozen=True)
class _Turn:
    reasoning: str
    fields: list[tuple[str, str]]  # name in lower case and value, in order
    violations: tuple[str, ...]


def _read(text: str, prefill: str) -> _Turn:
    # Where a turn begins with a field, a </think> further down is quoted by one.
    begins_with_field = not reasoning_open(prefill) and _FIELD.match(text.lstrip())
    reasoning, rest = (None, text) if begins_with_field else split_reasoning(text, prefill)
    found = list(_FIELD.finditer(rest))
    before = rest[: found[0].start() if found else None].strip()
    if reasoning is None and (reasoning_open(prefill) or THINK in before):
        # What looks like a field is a draft, and what follows it may be thoughts: none of it is said.
        return _Turn(text.strip().removeprefix(THINK).strip(), [], ("unclosed_reasoning",))
    ends = [*(match.start() for match in found[1:]), len(rest)]
    fields = [
        (match[1].lower(), rest[match.end() : end].strip())
        for match, end in zip(found, ends, strict=False)  # one end too many where nothing is found
    ]
    if reasoning is None:
        return _Turn(before, fields, ())
    return _Turn(reasoning, fields, ("text_before_fields",) if before and fields else ())


def parse_attack(text: str, prefill: str = "") -> ParsedAttack:
    """Read an attacker's turn.

    The note runs from the last ``generated_note:`` to the next field. So a draft before it stays
    behind, and so does whatever the turn declares after it.
    """
    turn = _read(text, prefill)
    notes = [value for name, value in turn.fields if name == "generated_note"]
    violations = [*turn.violations, *_repeated(turn)]
    if not notes:
        violations.append("no_generated_note")
    elif not notes[-1]:
        violations.append("empty_generated_note")
    if _label(turn, violations) is None:
        violations.append("no_final_answer")
    return ParsedAttack(notes[-1] or None if notes else None, turn.reasoning, tuple(violations))


def parse_assessment(text: str, prefill: str = "") -> ParsedAssessment:
    """Read an assessor's turn.

    The first occurrence of a field counts; a second one is a violation, and another final answer takes back the first.
    """
    turn = _read(text, prefill)
    violations = [*turn.violations, *_repeated(turn)]
    verdict = _label(turn, violations)
    if verdict is None:
        violations.append("no_final_answer")
    if not dict(turn.fields).get("explanation"):
        violations.append("no_explanation")
    return ParsedAssessment(verdict, None, None, None, turn.reasoning, tuple(violations))


def _repeated(turn: _Turn) -> list[str]:
    names = [name for name, _ in turn.fields]
    return [f"repeated_{name}" for name in dict.fromkeys(names) if names.count(name) > 1]


def _label(turn: _Turn, violations: list[str]) -> Label | None:
    said = [[_word(line) for line in value.split("\n")] for name, value in turn.fields if name == "final_answer"]
    if contradictory(chain.from_iterable(said)):
        violations.append(CONTRADICTION)
        return None
    value = next((value for name, value in turn.fields if name == "final_answer"), "")
    word, _, more = value.partition("\n")
    label = _word(word)
    if label is not None and more.strip():
        violations.append("text_after_final_answer")
    return label


def _word(line: str) -> Label | None:
    return _WORDS.get(line.strip(" \t\r.*\"'").lower())


def _compose_attack(reasoning: str, note: str, label: Label, prefill: str) -> str:
    return f'{write_reasoning(reasoning, prefill)}generated_note:\n{note}\n\nfinal_answer: "{_SAID[label]}"'


def _compose_assessment(
    reasoning: str,
    verdict: Label,
    sentence: str | None,
    error_type: ErrorType | None,
    correction: str | None,
    prefill: str,
) -> str:
    said = []
    if sentence:
        said.append(f"This sentence is wrong{f' ({error_type.value})' if error_type else ''}: {sentence}")
    if correction:
        said.append(f"It should read: {correction}")
    if not said:
        said.append("No sentence of the note is wrong." if verdict is Label.SAFE else "The note is medically wrong.")
    answer = f'final_answer: "{_SAID[verdict]}"\nExplanation: {" ".join(said)}'
    return write_reasoning(reasoning, prefill) + answer


CLASSIC = TurnFormat(parse_attack, parse_assessment, _compose_attack, _compose_assessment)
