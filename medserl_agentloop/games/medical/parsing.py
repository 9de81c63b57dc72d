"""Read and write the turns of players: one format per prompt profile.

Model text is untrusted: reading never raises, and only the parsed note reaches the other role.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

from medserl_agentloop.core.encoding import END_THINK, THINK, reasoning_closed, reasoning_open
from medserl_agentloop.games.medical.canonical import says_the_same
from medserl_agentloop.games.medical.case import ERROR_TYPES, Label, known_type
from medserl_agentloop.games.medical.edit import SentenceEdit
from medserl_agentloop.games.medical.records import AssessmentRecord, AttackRecord
from medserl_agentloop.paths import find_object
from medserl_agentloop.scoring.notes import quoted_sentence, same_sentence

CONTRADICTION = "contradictory_verdicts"
"""Violation of an assessment with both verdicts, which no format counts as a verdict."""


class UnwritableTurn(ValueError):
    """A turn cannot be written so that it reads back the same; the message completes a sentence."""


@dataclass(frozen=True)
class TurnFormat:
    """The reader and writer of one profile's turns. Pure functions; reading never raises.

    ``attack(text, prefill)`` and ``assessment`` read a turn; ``prefill`` is how the prompt began
    it, e.g. ``<think>``. If sentences are ``numbered``, they also get the note's, and an attack is
    an edit. An ``assessment`` with a parameter ``error_types`` gets the game's. The composers write
    a turn with the note's label; a format without them is only read.
    """

    attack: Callable[..., AttackRecord]
    assessment: Callable[..., AssessmentRecord]
    compose_attack: Callable[[AttackRecord, Label, str], str] | None = None
    compose_assessment: Callable[[AssessmentRecord, Label, str], str] | None = None
    locates: bool = False  # whether an assessment also says sentence, error type and correction
    numbered: bool = False  # whether players read and name sentences by number

    def write(
        self,
        turn: AttackRecord | AssessmentRecord,
        label: Label,
        prefill: str = "",
        sentences: Mapping[int, str] = {},
    ) -> str:
        """The turn of a player that gives the note ``label``, without the ``prefill``.

        It is read back as ``turn``; UnwritableTurn if not, e.g. because a text holds a tag.
        """
        read: Callable[..., Any] = self.attack
        compose: Callable[..., str] | None = self.compose_attack
        names = ["reasoning", "edit" if self.numbered else "note"]
        if isinstance(turn, AssessmentRecord):
            read, compose = self.assessment, self.compose_assessment
            located = ("sentence", "number", "error_type", "correction") if self.locates else ()
            names = ["reasoning", "verdict", *located]
        if compose is None:
            raise UnwritableTurn("its prompt profile's parser reads turns but cannot write them")
        text = compose(turn, label, prefill)
        parsed = read(text, prefill, *([sentences] if self.numbered else []))
        if parsed.violations:
            raise UnwritableTurn(", ".join(parsed.violations))
        if isinstance(turn, AttackRecord) and turn.edit is not None:  # no turn gives its place
            turn = turn.model_copy(update={"edit": turn.edit.model_copy(update={"start": None})})
        for name in names:
            if getattr(turn, name) != getattr(parsed, name):
                raise UnwritableTurn(f"the {name} is not read back as it was written")
        return text


# -- what the formats share ------------------------------------------------------------------------


def split_reasoning(text: str, prefill: str) -> tuple[str | None, str]:
    """The reasoning up to the first ``</think>``, or None, and the rest."""
    head, closed, rest = text.partition(END_THINK)
    if not closed or (reasoning_closed(prefill) and not text.lstrip().startswith(THINK)):
        return None, text
    return head.strip().removeprefix(THINK).strip(), rest


def write_reasoning(reasoning: str, prefill: str) -> str:
    """The reasoning in its tags, without the opening tag if the prompt already has it."""
    if not reasoning and not reasoning_open(prefill):
        return ""
    return f"{'' if reasoning_open(prefill) else THINK}{reasoning}{END_THINK}\n"


def last_section(text: str, tag: str) -> tuple[str, str, str] | None:
    """Return the text before, in and after the last ``<tag>``'s section, up to the last ``</tag>``,
    so that it has no reasoning that mentions tags.
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = text.rfind(closing)
    start = text.rfind(opening, 0, max(end, 0))
    if start < 0:
        return None
    return text[:start], text[start + len(opening) : end], text[end + len(closing) :]


def split_fields(field: re.Pattern[str], text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the text before the first field, and the fields as name and value."""
    before, *rest = field.split(text)
    pairs = zip(rest[::2], rest[1::2], strict=True)
    return before.strip(), [(name.lower(), value.strip()) for name, value in pairs]


def repeated_fields(fields: list[tuple[str, str]]) -> list[str]:
    counts = Counter(name for name, _ in fields)
    return [f"repeated_{name}" for name, count in counts.items() if count > 1]


def attack_record(note: str, reasoning: str, violations: list[str]) -> AttackRecord:
    return AttackRecord(note=note or None, reasoning=reasoning, violations=violations)


_LABELS = {label.value: label for label in Label}


def verdict_of(text: str, words: dict[str, Label] = _LABELS) -> Label | None:
    return words.get(text.strip(" \t\r\n.*\"'").lower())


def contradictory(verdicts: Iterable[Label | None]) -> bool:
    return len(set(verdicts) - {None}) > 1


# -- medserl: reasoning in <think>, then <note> or <answer> ----------------------------------------

# Says nothing: ".", "N/A".
_NOTHING = re.compile(r"[\W_]*+(?:n[\W_]?a|none|null)?[\W_]*", re.IGNORECASE)
_ANSWER_FIELD = re.compile(
    r"^[ \t]*(verdict|sentence|error_type|correction)[ \t]*:", re.MULTILINE | re.IGNORECASE
)


def _medserl_section(text: str, prefill: str, tag: str) -> tuple[str, str, list[str]]:
    """Body and reasoning of ``<think>…</think><tag>…</tag>``, and what is wrong."""
    violations = []
    reasoning, rest = split_reasoning(text, prefill)
    if not reasoning_closed(prefill) and not reasoning:
        violations.append("no_reasoning" if reasoning is None else "empty_reasoning")
    if reasoning and THINK in reasoning:
        violations.append("nested_reasoning")
    section = last_section(rest, tag)
    if section is None:
        return "", reasoning or "", [*violations, f"no_{tag}"]
    before, body, after = (part.strip() for part in section)
    faults = {f"text_before_{tag}": before, f"text_after_{tag}": after, f"empty_{tag}": not body}
    violations += [name for name, holds in faults.items() if holds]
    return body, reasoning or "", violations


def _medserl_assessment(
    text: str,
    prefill: str = "",
    sentences: Mapping[int, str] = {},
    error_types: Sequence[str] = ERROR_TYPES,
) -> AssessmentRecord:
    """Fields line by line; a value runs to the next field, so a copied sentence may span lines.

    The first occurrence of a field counts; a second one is a violation, and a second, different
    verdict cancels the first. If ``sentences`` are numbered, the wrong one is named by number.
    """
    body, reasoning, violations = _medserl_section(text, prefill, "answer")
    before, pairs = split_fields(_ANSWER_FIELD, body)
    violations += [*(["text_before_verdict"] if before else []), *repeated_fields(pairs)]
    fields = dict(reversed(pairs))
    verdict = verdict_of(fields.get("verdict", ""))
    if contradictory(_verdicts(split_reasoning(text, prefill)[1])):
        verdict = None
        violations.append(CONTRADICTION)
    if verdict is None and body:
        violations.append("no_verdict")
    sentence, correction = (
        None if _NOTHING.fullmatch(value) else value
        for value in (fields.get("sentence", ""), fields.get("correction", ""))
    )
    number = None
    if sentences and sentence:
        number = named_sentence(sentence, sentences)
        sentence = None if number is None else sentences[number]
        correction = (correction and _in_place_of(sentence or "", number, correction)) or None
    if correction and says_the_same(correction, sentence or ""):
        correction = None
    kind = known_type(fields.get("error_type", ""), error_types)
    error: dict[str, Any] = {"sentence": sentence, "correction": correction, "error_type": kind}
    if verdict is Label.HARMFUL:
        violations += [f"no_{name}" for name, value in error.items() if value is None]
    elif verdict is Label.SAFE and any(fields[name] for name in fields.keys() - {"verdict"}):
        violations.append("safe_with_error")
    return AssessmentRecord(
        verdict=verdict, number=number, reasoning=reasoning, violations=violations, **error
    )


def _verdicts(answer: str) -> Iterator[Label | None]:
    """Yield every verdict from the first <answer> on, inside answers or after them."""
    for part in answer.replace("</answer>", "<answer>").split("<answer>")[1:]:
        for name, value in split_fields(_ANSWER_FIELD, part)[1]:
            if name == "verdict":
                yield verdict_of(re.split(r"[\n<]", value, maxsplit=1)[0])


def _compose_medserl_assessment(turn: AssessmentRecord, verdict: Label, prefill: str) -> str:
    named = turn.sentence if turn.number is None else turn.number
    fields = {"sentence": named, "error_type": turn.error_type, "correction": turn.correction}
    known = {"verdict": verdict.value, **fields}
    lines = [f"{name}: {value}" for name, value in known.items() if value is not None]
    answer = "\n".join(lines)
    return f"{write_reasoning(turn.reasoning, prefill)}<answer>\n{answer}\n</answer>"


def _compose_note(turn: AttackRecord, label: Label, prefill: str) -> str:
    return f"{write_reasoning(turn.reasoning, prefill)}<note>{turn.note}</note>"


MEDSERL = TurnFormat(
    lambda text, prefill="": attack_record(*_medserl_section(text, prefill, "note")),
    _medserl_assessment,
    _compose_note,
    _compose_medserl_assessment,
    locates=True,
)
"""The format of the ``medserl`` profile."""


# -- edits: medserl, with numbers for sentences and an <edit> for a note ---------------------------

_EDIT_FIELD = re.compile(r"^[ \t]*(sentence|replacement)[ \t]*:", re.MULTILINE | re.IGNORECASE)
# "3", "[3]", "Sentence 3: He has gout.", but neither -1 nor the beginning of "38.5 C" or
# "53-year-old".
_NUMBER = re.compile(
    r"[^\w-]{0,3}(?:sentence )?[^\w-]{0,3}(\d{1,6})(?![.,/-]?\w)[\W_]*", re.IGNORECASE
)
# What precedes a sentence in a list, or in an answer that repeats its number: "3| ", "(3) ",
# "Sentence 3: ", "- ", but neither "1.5 g" nor "1:1000". It says which sentence was rewritten.
_SENTENCE_OR = r"[\W_]{0,3}(?:(?:sentence|line|no\.?)[ \t]*[\W_]{0,2})?"
_MARKED_NUMBER = (
    rf"{_SENTENCE_OR}\d{{1,6}}"
    r"(?:[ \t]*(?:\||[:)\]}>](?!\d))[*_\])|:]*|[.,;=/][ \t]|\t"
    r"|[ \t]+[-\u2013\u2014]+>?[ \t]+(?!\d)|[ \t]+(?=\d{1,6}\|))|#[ \t]?\d{1,6}(?=[ \t])"
    r"|[\u2460-\u24ff\u2776-\u2793](?=\W)"
)
# "S3:", "3rd:" or "Sentence three:", which count only before sentence 3: "S1: loud" is a finding.
_NUMBER_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_NAMED = re.compile(
    rf"{_SENTENCE_OR}(?:s?(\d{{1,6}})(?:st|nd|rd|th)?|({'|'.join(_NUMBER_WORDS)}))"
    r"[ \t]*[:|)\]}>](?!\d)[ \t]*",
    re.IGNORECASE,
)
_BULLET = r"[-*\u2022|\u2013]{1,2}>?(?=[ \t]+[^ \t\d])"
_MARKS = re.compile(
    rf"(?:(?:{_MARKED_NUMBER}|{_BULLET}|(?:new )?(?:sentence|replacement|correction)[ \t]*:)"
    r"[ \t]*+)*+",
    re.IGNORECASE,
)


def named_sentence(text: str, sentences: Mapping[int, str]) -> int | None:
    """Number of the sentence that ``text`` names by number, by a copy, or both; else None.

    If they disagree the copy counts: it is longer, so a slip is less likely.
    """
    match = _NUMBER.match(text)
    number = int(match[1]) if match and int(match[1]) in sentences else None
    rest = text[match.end() :] if match else text
    if match is not None and (
        not rest or (number is not None and same_sentence(rest, sentences[number]))
    ):
        return number
    copied = (quoted_sentence(quote, sentences) for quote in (text, rest))
    return next((copy for copy in copied if copy >= 0), number)


def _in_place_of(old: str, number: int | None, text: str) -> str:
    """``text`` in place of the sentence ``old``: with the marks before that, and none of its own.

    "1 He" begins with the sentence's ``number``; "1 tablet" does not.
    """
    text = text[_end_of_marks(text) :]
    if (named := _NAMED.match(text)) and not _NAMED.match(old):
        digits, word = named.groups()
        if number == (int(digits) if digits else _NUMBER_WORDS.index(word.lower()) + 1):
            text = text[named.end() :]
    bare = text.removeprefix(str(number)).lstrip()
    if bare[:1].isupper() and text.startswith(f"{number} ") and not old[:1].isdigit():
        text = bare
    return old[: _end_of_marks(old)] + text


def _end_of_marks(text: str) -> int:
    found = _MARKS.match(text)
    return found.end() if found else 0


def _edits_attack(text: str, prefill: str = "", sentences: Mapping[int, str] = {}) -> AttackRecord:
    """The first occurrence of a field counts, as in an assessment."""
    body, reasoning, violations = _medserl_section(text, prefill, "edit")
    before, pairs = split_fields(_EDIT_FIELD, body)
    violations += [*(["text_before_sentence"] if before else []), *repeated_fields(pairs)]
    fields = {"sentence": "", "replacement": ""} | dict(reversed(pairs))
    missing = [f"no_{name}" for name, value in fields.items() if body and _NOTHING.fullmatch(value)]
    edit = None
    if body and not missing:
        number = named_sentence(fields["sentence"], sentences)
        old = fields["sentence"] if number is None else sentences[number]
        new = _in_place_of(old, number, fields["replacement"])
        edit = SentenceEdit(number=number, old=old, new=new)
    return AttackRecord(note=None, edit=edit, reasoning=reasoning, violations=violations + missing)


def _compose_edit(turn: AttackRecord, label: Label, prefill: str) -> str:
    if turn.edit is None:
        raise UnwritableTurn("its format holds an edit, but the attack has none")
    fields = f"sentence: {turn.edit.number}\nreplacement: {turn.edit.new}"
    return f"{write_reasoning(turn.reasoning, prefill)}<edit>\n{fields}\n</edit>"


EDITS = replace(MEDSERL, attack=_edits_attack, compose_attack=_compose_edit, numbered=True)
"""The format of the ``edits`` profile."""


PARSERS: dict[str, TurnFormat | str] = {
    "medserl": MEDSERL,
    "classic": "medserl_agentloop.medical_team.formats:CLASSIC",
    "baseline": "medserl_agentloop.medical_team.formats:BASELINE",
    "edits": EDITS,
}


def load_parser(name: str, error_types: Sequence[str] = ERROR_TYPES) -> TurnFormat:
    """The parser called ``name``, or a user's as ``package.module:NAME``; else ValueError."""

    def is_format(found: object) -> bool:
        return isinstance(found, TurnFormat)

    expected = f"package.module:NAME of a {__name__}.TurnFormat"
    parser: TurnFormat = find_object("parser", name, PARSERS, expected, is_format)
    if "error_types" in signature(parser.assessment).parameters:
        parser = replace(parser, assessment=partial(parser.assessment, error_types=error_types))
    return parser
