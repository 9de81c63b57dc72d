"""The output format of the ``medserl`` profile: reasoning in ``<think>``, then ``<note>`` or ``<answer>``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from medserl_agentloop.games.medical.parsing.base import (
    CONTRADICTION,
    THINK,
    ParsedAssessment,
    ParsedAttack,
    TurnFormat,
    contradictory,
    reasoning_closed,
    split_reasoning,
    write_reasoning,
)
from medserl_agentloop.games.medical.types import ErrorType, Label


@dataclass(frozen=True)
class _Sections:
    reasoning: str
    body: str | None
    violations: tuple[str, ...]


def _split_sections(text: str, prefill: str, tag: str) -> _Sections:
    """Split ``<think>…</think><tag>…</tag>`` at its outer tags.

    The opening ``<think>`` may be missing because thinking models get it with the prompt; where the
    prompt has closed the reasoning as well, none is expected. Other tags inside the body belong to
    the body: a note may contain them.
    """
    violations = []
    said, rest = split_reasoning(text, prefill)
    reasoning = said or ""
    if not reasoning_closed(prefill):
        if said is None:
            violations.append("no_reasoning")
        elif not said:
            violations.append("empty_reasoning")
    if THINK in reasoning:
        violations.append("nested_reasoning")

    opening, closing = f"<{tag}>", f"</{tag}>"
    # The last opening before the last closing: where reasoning talks of tags, none of it may get into the note.
    end = rest.rfind(closing)
    start = rest.rfind(opening, 0, max(end, 0))
    if start < 0:
        return _Sections(reasoning, None, (*violations, f"no_{tag}"))
    if rest[:start].strip():
        violations.append(f"text_before_{tag}")
    if rest[end + len(closing) :].strip():
        violations.append(f"text_after_{tag}")
    body = rest[start + len(opening) : end].strip()
    if not body:
        return _Sections(reasoning, None, (*violations, f"empty_{tag}"))
    return _Sections(reasoning, body, tuple(violations))


def parse_attack(text: str, prefill: str = "") -> ParsedAttack:
    """Read an attacker's turn: reasoning in ``<think>``, the whole note in ``<note>``."""
    sections = _split_sections(text, prefill, "note")
    return ParsedAttack(sections.body, sections.reasoning, sections.violations)


_ANSWER_FIELD = re.compile(r"^[ \t]*(verdict|sentence|error_type|correction)[ \t]*:", re.MULTILINE | re.IGNORECASE)


def parse_assessment(text: str, prefill: str = "") -> ParsedAssessment:
    """Read an assessor's turn: reasoning in ``<think>``, fields line by line in ``<answer>``.

    A field's value runs to the next field, so that a copied sentence may span lines. The first
    occurrence of a field counts; a second one is a violation, and another verdict takes back the first.
    """
    sections = _split_sections(text, prefill, "answer")
    violations = list(sections.violations)
    fields: dict[str, str] = {}
    if sections.body is not None:
        before, found = _fields(sections.body)
        if before:
            violations.append("text_before_verdict")
        for name, value in found:
            if name in fields:
                violations.append(f"repeated_{name}")
            else:
                fields[name] = value

    verdict = _verdict(fields.get("verdict", ""))
    if contradictory(_all_verdicts(split_reasoning(text, prefill)[1])):
        verdict = None
        violations.append(CONTRADICTION)
    if verdict is None and sections.body is not None:
        violations.append("no_verdict")
    error_type = ErrorType.parse(fields.get("error_type", ""))
    if verdict is Label.HARMFUL:
        violations += [f"no_{f}" for f in ("sentence", "correction") if not fields.get(f)]
        if error_type is None:
            violations.append("no_error_type")
    elif verdict is Label.SAFE and any(fields.get(f) for f in ("sentence", "error_type", "correction")):
        violations.append("safe_with_error")
    return ParsedAssessment(
        verdict=verdict,
        sentence=fields.get("sentence") or None,
        error_type=error_type,
        correction=fields.get("correction") or None,
        reasoning=sections.reasoning,
        violations=tuple(violations),
    )


def _fields(body: str) -> tuple[str, list[tuple[str, str]]]:
    """What stands before the first field, and each field's name in lower case with its value."""
    found = list(_ANSWER_FIELD.finditer(body))
    ends = [*(match.start() for match in found[1:]), len(body)]
    fields = [
        (match[1].lower(), body[match.end() : end].strip())
        for match, end in zip(found, ends, strict=False)  # one end too many where nothing is found
    ]
    return body[: found[0].start() if found else None].strip(), fields


def _all_verdicts(said: str) -> Iterator[Label | None]:
    """Every verdict from the first ``<answer>`` on, in whichever of several answers or after them."""
    for part in said.replace("</answer>", "<answer>").split("<answer>")[1:]:
        for name, value in _fields(part)[1]:
            if name == "verdict":
                yield _verdict(re.split(r"[\n<]", value, maxsplit=1)[0])


def _verdict(value: str) -> Label | None:
    try:
        return Label(value.strip(" \t\n.*\"'").lower())
    except ValueError:
        return None


def _compose_attack(reasoning: str, note: str, label: Label, prefill: str) -> str:
    return f"{write_reasoning(reasoning, prefill)}<note>{note}</note>"


def _compose_assessment(
    reasoning: str,
    verdict: Label,
    sentence: str | None,
    error_type: ErrorType | None,
    correction: str | None,
    prefill: str,
) -> str:
    fields = {"sentence": sentence, "error_type": error_type.value if error_type else None, "correction": correction}
    lines = [f"verdict: {verdict.value}", *(f"{name}: {value}" for name, value in fields.items() if value is not None)]
    return f"{write_reasoning(reasoning, prefill)}<answer>\n" + "\n".join(lines) + "\n</answer>"


MEDSERL = TurnFormat(parse_attack, parse_assessment, _compose_attack, _compose_assessment, locates=True)
