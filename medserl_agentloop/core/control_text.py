"""Control text: marks that models and chat templates do not read as plain words.

:func:`as_data` shows untrusted text to a model without any of it. Add a line to one of the tables
for a new model family.
"""

from __future__ import annotations

import re

THINK, END_THINK = "<think>", "</think>"

_HARMONY = r"(?:<\|start\|>assistant)?<\|channel\|>"
# The marks that open and close a family's reasoning.
_REASONING = {
    "Harmony (gpt-oss)": (
        rf"{_HARMONY}analysis<\|message\|>",
        rf"<\|end\|>{_HARMONY}final<\|message\|>",
    ),
    "Harmony, its marks left out by the server": (
        r"analysis(?=.*assistantfinal)",
        r"assistantfinal",
    ),
    "Mistral": (r"\[THINK\]", r"\[/THINK\]"),
    "Gemma 4": (r"<\|channel>thought\s", r"<channel\|>"),
    "MedGemma": (r"<unused94>thought\s", r"<unused95>"),
}

_TEMPLATE_TOKENS = {
    # DeepSeek's bar, blank
    "ChatML, Llama 3, Phi, GLM, GPT-OSS, DeepSeek": r"<[|\uff5c][\w\u2581/ -]{1,40}[|\uff5c]>",
    "Llama 2": r"<</?SYS>>",
    "Mistral": r"\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]",
    "Gemma": r"</?(?:start_of_turn|end_of_turn)>",
    "EXAONE": r"\[\|/?\w{1,40}\|\]",
    "GLM": r"\[[gs]?MASK\]|<[se]op>",
    "InternLM": r"\[UNUSED_TOKEN_\d+\]|<eo[ah]>",
    "Baichuan, MiniCPM": r"<reserved_\d+>|<AI>|<\u7528\u6237>",
    "many": r"</?(?:s|bos|eos)>",
}
CONTROL_TOKEN = "|".join(_TEMPLATE_TOKENS.values())
"""Control tokens of known families; no prompt contains them as plain text."""

_SWITCHES = {
    # </think> and [/THINK] are none
    "Qwen3, Hunyuan, Nemotron, SmolLM3, GLM": r"/no_?think|(?<![<\[])/think",
    "SmolLM3": r"/system_override",
}
SWITCH = re.compile("|".join(_SWITCHES.values()), re.IGNORECASE)
"""A switch: words in a user's message that turn a model's reasoning off or on."""

MARKUP = re.compile(
    rf"(?=({CONTROL_TOKEN}|<[|\uff5c][^<>\n]{{0,64}}>|<[^\s<>]{{1,64}}>"
    r"|\[(?![A-Z]?[a-z]+\])[|/@]?[A-Za-z_][\w|/@]{0,64}\]))[<\[]"
)
"""Beginnings of anything that some tokenizer may have a token for, which is the group: <think>, <|a
b|>,
[TOOL_CALLS], [|user|]; not "BP <140", "[2]" or "[sic]". One may stand inside another."""


def as_think(text: str) -> str:
    """A model's turn with its reasoning between ``<think>`` and ``</think>``, whatever its family's
    marks are. Reasoning that was cut off stays open.
    """
    for opening, closing in _REASONING.values():
        marked = re.match(rf"\s*{opening}(.*?)({closing}|\Z)", text, re.DOTALL)
        if marked is not None:
            end = END_THINK if marked[2] else ""
            return f"{THINK}{marked[1]}{end}{text[marked.end() :]}"
    return text


JOINER = "\u2060"  # invisible, and no white space to a tokenizer's pre-splitter


def as_data(text: str) -> str:
    """Untrusted text that reads the same, without control tokens and switches."""
    return MARKUP.sub(broken, without_switches(text))


def without_switches(text: str) -> str:
    """``text`` with a blank in every switch: ``/ no_think``."""
    return SWITCH.sub(lambda switch: f"/ {switch[0][1:]}", text)


def broken(token: re.Match[str]) -> str:
    """A control token, changed so that no tokenizer reads it as one."""
    return token[0][0] + JOINER + token[0][1:]


def reasoning_open(prefill: str) -> bool:
    """Return whether the prompt begins the player's reasoning and leaves it open."""
    return prefill.rfind(THINK) > prefill.rfind(END_THINK)


def reasoning_closed(prefill: str) -> bool:
    """Return whether the prompt ends the reasoning, as templates do that switch thinking off."""
    return prefill.rfind(END_THINK) > prefill.rfind(THINK)
