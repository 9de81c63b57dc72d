"""Two notes as numbered lines with the changed ones marked, safe to put into a judge's prompt.

A note is text of the player that the judge decides about. A line of it cannot pass for a line of the
prompt, since every line gets a number in front, and nothing in it can pass for a token of the chat
template: servers of chat models read such tokens wherever they stand.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from medserl_agentloop.games.medical.edits import changed_runs, split_sentences

# "<|im_end|>", "</think>", "<s>", "[INST]"; but neither "BP <140" nor "[2]".
_TOKEN_LOOK_ALIKE = re.compile(r"<(?=[^\s\d=.])|\[(?=/?[A-Z_]+\])")
_NOT_TEXT = {"Cc", "Cf", "Cs", "Co", "Cn"}  # control and invisible characters, surrogates, unassigned


@dataclass(frozen=True)
class NoteLine:
    """One sentence of a note.

    Attributes:
        number: From 1.
        text: The sentence on one line.
        changed: Whether the other note does not have it there.
    """

    number: int
    text: str
    changed: bool


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
