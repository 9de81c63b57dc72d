"""Control text in strings: what chat templates and reasoning models read as more than words.

:func:`as_data` shows untrusted text to a model without any of it. The rules, the encoder and the chat client take their
patterns from here.
"""

from __future__ import annotations

import re

THINK, END_THINK = "<think>", "</think>"

CONTROL_TOKEN = "|".join(
    (
        r"<[|\uff5c][\w\u2581/ -]{1,40}[|\uff5c]>",  # \uff5c and \u2581: DeepSeek's bar and blank
        r"\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS)\]",
        r"<</?SYS>>",
        r"</?(?:start_of_turn|end_of_turn|s|bos|eos)>",
    )
)
"""Pattern of control tokens of common chat templates (ChatML, Llama 2 and 3, Gemma, Mistral, Phi, DeepSeek)."""

# What some tokenizer may have a token for: <think>, <|a b|>, [TOOL_CALLS], [|user|]; not "BP <140" or "[2]".
_MARKER = re.compile(r"<(?=[|\uff5c][^<>\n]{0,64}>|[^\s<>]{1,64}>)|\[(?=[|/]?[A-Za-z_][\w|/]{0,64}\])")

JOINER = "\u2060"  # invisible, and no white space to a tokenizer's pre-splitter


def as_data(text: str) -> str:
    """Untrusted text as a chat server may get it; it still reads the same.

    Nothing in it becomes a token of a chat template, whatever model is served.
    """
    return _MARKER.sub(broken, text)


def broken(token: re.Match[str]) -> str:
    """A control token that no tokenizer reads as one any more."""
    return token[0][0] + JOINER + token[0][1:]


def reasoning_open(prefill: str) -> bool:
    """Whether the prompt has begun the player's reasoning and left it open."""
    return prefill.rfind(THINK) > prefill.rfind(END_THINK)


def reasoning_closed(prefill: str) -> bool:
    """Whether the prompt has ended the reasoning, as templates do that switch thinking off."""
    return prefill.rfind(END_THINK) > prefill.rfind(THINK)
