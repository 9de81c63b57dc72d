"""What a language model is asked about a game, and how its answer is read: one class per kind of question.

A note is text of the player that is judged. A line of it cannot pass for a line of the prompt, since every line gets a
number in front, and nothing in it can pass for a token of the chat template: servers of chat models read such tokens
wherever they stand.
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from jinja2 import Environment, StrictUndefined
from pydantic import BaseModel, ConfigDict

from medserl_agentloop.core.client import BadAnswer, read_json
from medserl_agentloop.games.medical.edits import changed_runs, one_line, split_sentences
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.types import Label
from medserl_agentloop.paths import resource

# "<|im_end|>", "</think>", "<s>", "[INST]"; but neither "BP <140" nor "[2]".
_TOKEN_LOOK_ALIKE = re.compile(r"<(?=[^\s\d=.])|\[(?=/?[A-Z_]+\])")
_NOT_TEXT = {"Cc", "Cf", "Cs", "Co", "Cn"}  # control and invisible characters, surrogates, unassigned
# Some chat templates open the reasoning themselves, so that a response only closes it.
_REASONING = re.compile(r"\A.*</think>", re.DOTALL)
_CODE_FENCE = re.compile(r"\A```(?:json)?\s*\n(.*)\n\s*```\Z", re.DOTALL)
_LABELS = {"present": Label.HARMFUL, "absent": Label.SAFE, "abstain": None}


class NoteLine(NamedTuple):
    """One sentence of a note on one line, its number from 1, and whether the other note does not have it there."""

    number: int
    text: str
    changed: bool


class Verdict(BaseModel):
    """All that the model is asked to write. The reason comes first: it is written before the verdict."""

    # This docstring is part of the schema that servers get and of the keys of judge_server.cache.

    model_config = ConfigDict(strict=True, extra="forbid")

    reason: str
    error: Literal["present", "absent", "abstain"]
    realistic: bool | None

    @property
    def label(self) -> Label | None:
        """What it says of the note; None for an abstention."""
        return _LABELS[self.error]


class Finding(BaseModel):
    """All that a reader of the note alone is asked to write."""

    model_config = ConfigDict(strict=True, extra="forbid")

    reason: str
    error: Literal["present", "absent", "abstain"]
    sentence: int | None


Answer = TypeVar("Answer", bound=BaseModel)


class Question(Generic[Answer]):
    """A kind of question: ``wording`` is the text of its Jinja template, ``schema`` the field that binds the answer."""

    answer: type[Answer]

    def __init__(self, wording: str) -> None:
        self.wording = wording
        self.template = Environment(undefined=StrictUndefined, autoescape=False).from_string(wording)
        bound = {"name": self.answer.__name__.lower(), "strict": True, "schema": self.answer.model_json_schema()}
        self.schema: dict[str, Any] = {"type": "json_schema", "json_schema": bound}

    def read(self, text: str) -> Answer:
        """Read a response: one JSON object, after reasoning in ``<think>`` and inside a code fence if need be."""
        answer = _REASONING.sub("", text).strip()
        if fenced := _CODE_FENCE.match(answer):
            answer = fenced.group(1)
        try:
            # In two steps: pydantic's own reader takes the last of two values for one key.
            return self.answer.model_validate(read_json(answer))
        except ValueError:  # a ValidationError is one
            raise BadAnswer(f"not the JSON that was asked for: {one_line(answer)[:100]!r}") from None


class PairQuestion(Question[Verdict]):
    """Shows the note before and after the edit, the change marked, and nothing else of the game."""

    answer = Verdict

    def prompt(self, original: str | None, presented: str, *, edited_first: bool = False) -> str:
        """The question about ``presented``; an original that does not differ is left out.

        Which of the two notes comes first should make no difference to the answer.
        """
        before, after = mark_changes(presented if original is None else original, presented)
        changed = any(line.changed for line in (*before, *after))
        return self.template.render(original=before if changed else [], presented=after, edited_first=edited_first)


class BlindQuestion(Question[Finding]):
    """Shows the note that the assessor read, and neither the original nor the change."""

    answer = Finding

    def prompt(self, presented: str) -> str:
        """The question about ``presented``."""
        return self.template.render(presented=_lines(split_sentences(presented), set()))


def judge_template(profile: str, name: str = "judge") -> str:
    """Text of a template that words a profile's question; that of ``medserl`` where the profile has none."""
    own, template = load_profile(profile).folder, Path("judge") / f"{name}.jinja"
    folder = own if (own / template).exists() else resource("prompts") / "medserl"
    return (folder / template).read_text(encoding="utf-8")


def plain_text(text: str) -> str:
    """``text`` without invisible characters, and with a blank inside whatever looks like a special token."""
    visible = "".join(c for c in text if unicodedata.category(c) not in _NOT_TEXT)
    return _TOKEN_LOOK_ALIKE.sub(lambda match: match.group() + " ", visible)


def mark_changes(original: str, presented: str) -> tuple[list[NoteLine], list[NoteLine]]:
    """The sentences of both notes, those that differ marked."""
    before, after = split_sentences(original), split_sentences(presented)
    runs = changed_runs(before, after)
    gone = {n for start, end, _, _ in runs for n in range(start, end)}
    come = {n for _, _, start, end in runs for n in range(start, end)}
    return _lines(before, gone), _lines(after, come)


def _lines(sentences: list[str], changed: set[int]) -> list[NoteLine]:
    return [NoteLine(n + 1, plain_text(text), n in changed) for n, text in enumerate(sentences)]
