"""Prompts: chat messages with untrusted text in them as data, in words and in tokens.

A text may contain anything, even ``<|im_end|>``. So the chat template is rendered with a
placeholder, and the text itself is tokenized without special tokens: it cannot open or close a chat
turn. Transformers' ``split_special_tokens`` ignores added tokens that are not marked as special,
such as Qwen3's ``<think>``, and plain pieces like ``</s>``. A server gets words, not tokens:
:func:`as_data` breaks up all control text. Add a line to a table below for a new model family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from medserl_agentloop.core.interaction import Turn

# -- control text: what models and chat templates do not read as plain words -----------------------

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
    # DeepSeek's bar, space
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
    # </think> and [/THINK] are not switches
    "Qwen3, Hunyuan, Nemotron, SmolLM3, GLM": r"/no_?think|(?<![<\[])/think",
    "SmolLM3": r"/system_override",
}
SWITCH = re.compile("|".join(_SWITCHES.values()), re.IGNORECASE)
"""A switch: words in a user's message that turn a model's reasoning off or on."""

MARKUP = re.compile(
    rf"(?=({CONTROL_TOKEN}|<[|\uff5c][^<>\n]{{0,64}}>|<[^\s<>]{{1,64}}>"
    r"|\[(?![A-Z]?[a-z]+\])[|/@]?[A-Za-z_][\w|/@]{0,64}\]))[<\[]"
)
"""Beginnings of possible tokens of some tokenizer; the group is the token: <think>, <|a b|>,
[TOOL_CALLS], [|user|]; not "BP <140", "[2]" or "[sic]". One may be inside another."""

JOINER = "\u2060"  # invisible, and not white space to a tokenizer's pre-splitter


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


def as_data(text: str) -> str:
    """Untrusted text that reads the same, without control tokens and switches."""
    return MARKUP.sub(broken, without_switches(text))


def without_switches(text: str) -> str:
    """``text`` with a space in every switch: ``/ no_think``."""
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


# -- prompts in words ------------------------------------------------------------------------------

# Private-use characters: no template holds them, and chat templates that strip white space keep
# them.
PLACE = re.compile("\ue000(\\w+)\ue000")

Message = dict[str, str]


def place(name: str) -> str:
    """Return the placeholder of the untrusted text ``name`` in a prompt."""
    return f"\ue000{name}\ue000"


@dataclass(frozen=True)
class Prompt:
    """Chat messages, with untrusted text kept apart from them.

    ``place(name)`` marks where ``messages`` show the text ``data[name]``. Neither the encoder nor a
    chat server finds control tokens in these texts.
    """

    messages: tuple[Message, ...]
    data: Mapping[str, str] = field(default_factory=dict)

    def filled(self, shown: Callable[[str], str] = as_data) -> list[Message]:
        """Return the messages with each text, changed by ``shown``, in its place."""

        def fill(content: str) -> str:
            return PLACE.sub(lambda match: shown(self.data[match[1]]), content)

        return [{**message, "content": fill(message["content"])} for message in self.messages]


def as_untrusted(messages: Sequence[Message]) -> Prompt:
    """Return a prompt that treats the text of every message as untrusted."""
    texts = {f"message_{number}": message["content"] for number, message in enumerate(messages)}
    pairs = zip(messages, texts, strict=True)
    return Prompt(tuple({**message, "content": place(name)} for message, name in pairs), texts)


# -- prompts in tokens -----------------------------------------------------------------------------

_TEMPLATES_KEPT = 1024

_USER, _ASSISTANT = place("user"), place("assistant")

# Added tokens that are structure whatever they are marked as: <think>, <|im_end|>, [INST],
# <start_of_turn>. Others, such as Gemma's runs of line breaks, are text.
_MARKER = re.compile(r"[<\[{].*[>\]}]", re.DOTALL)


# A prompt as ids and names of untrusted texts in turn, and its prefill.
_Template = tuple[list[list[int] | str], str]


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt in tokens."""

    ids: list[int]
    data_tokens: int  # of them untrusted text
    prefill: str = ""  # how it begins the turn, e.g. ``<think>``


def end_ids(*named: Any) -> frozenset[int]:
    """All end-of-sequence ids of a model's configs and tokenizer."""
    ends = [getattr(each, "eos_token_id", None) for each in named]
    lists = (end if isinstance(end, (list, tuple)) else [end] for end in ends)
    return frozenset(number for numbers in lists for number in numbers if number is not None)


class ChatEncoder:
    """Tokenizes prompts with a model's chat template, and reads the turns that follow them.

    ``template_kwargs`` are verl's; ``ends`` are those that the model's configurations name: Gemma
    3's differ from its tokenizer's.
    """

    def __init__(
        self, tokenizer: Any, template_kwargs: Mapping[str, Any] = {}, ends: Iterable[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs)
        self.ends = end_ids(tokenizer).union(ends)
        self._templates: dict[Any, _Template] = {}
        added = tokenizer.added_tokens_decoder
        special = {n for n, token in added.items() if token.special} | {*tokenizer.all_special_ids}
        self._control = {
            n: str(t) for n, t in added.items() if n in special or _MARKER.fullmatch(str(t))
        }
        # Strings that would be control tokens in a prompt.
        self.special_tokens = sorted({*self._control.values(), *tokenizer.all_special_tokens})
        self._control |= {n: tokenizer.convert_ids_to_tokens(n) for n in special}
        self._backend = None
        if backend := getattr(tokenizer, "backend_tokenizer", None):
            definition = json.loads(backend.to_str())
            for token in definition["added_tokens"]:
                token["special"] = token["id"] in self._control
            definition["truncation"] = definition["padding"] = None
            self._backend = Tokenizer.from_str(json.dumps(definition))
            self._backend.encode_special_tokens = True

    @classmethod
    def of_run(cls, tokenizer: Any, data: Any, ends: Iterable[int] = ()) -> ChatEncoder:
        kwargs = OmegaConf.create(dict(data.get("apply_chat_template_kwargs") or {}))
        return cls(tokenizer, dict(OmegaConf.to_container(kwargs)), ends)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of ``text`` without control tokens; ValueError if one cannot be spelled out."""
        text = without_switches(text)
        if self._backend is None:
            ids = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        else:
            ids = self._backend.encode(text, add_special_tokens=False).ids
        return [
            part
            for number in ids
            for part in (self._spelt(number) if number in self._control else [number])
        ]

    def _spelt(self, number: int) -> list[int]:
        """The ids of a control token's characters as plain text."""
        token, unknown = self._control[number], self.tokenizer.unk_token_id
        if number == unknown:  # a character that the vocabulary lacks
            return [number]
        spelt: list[int] = self.tokenizer.convert_tokens_to_ids(list(token))
        if any(part is None or part == unknown for part in spelt):
            raise ValueError(f"the tokenizer's vocabulary lacks a character of {token!r} as text")
        return spelt

    def count(self, text: str) -> int:
        return len(self.encode_text(text))

    def stop(self, strings: Sequence[str]) -> dict[str, list[Any]]:
        """Sampling parameters that end a turn at these strings; by token id where one is one."""
        ids = {of: self.tokenizer.encode(of, add_special_tokens=False) for of in strings}
        fields = {
            "stop_token_ids": [own[0] for own in ids.values() if len(own) == 1],
            "stop": [string for string, own in ids.items() if len(own) != 1],
        }
        return {name: values for name, values in fields.items() if values}

    def decode(self, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
        """A turn's text without its end token; other special tokens stay visible as text.

        Reasoning is between ``<think>`` and ``</think>``, whatever marks the model has.
        """
        ends = self.ends.union(self.stop(stop).get("stop_token_ids", ()))
        text: str = self.tokenizer.decode(
            list(ids[:-1] if ids[-1] in ends else ids), skip_special_tokens=False
        )
        return as_think(text)

    def was_cut(self, ids: Sequence[int], budget: int, stop_reason: str | None) -> bool:
        """Return whether the engine's stop reason says that the budget ended a turn."""
        # SGLang says "length"; other engines may say "completed" even for a turn that was cut.
        if stop_reason in ("length", "stop"):
            return stop_reason == "length"
        return len(ids) >= budget and ids[-1] not in self.ends

    def opening(self, turn: Turn) -> EncodedPrompt:
        return self._encode(turn.prompt, turn.prefix, continued=False)

    def continuation(self, turn: Turn, previous_token: int | None) -> EncodedPrompt:
        """A turn's prompt as the next user message, without the end-of-turn token before it."""
        prompt = self._encode(turn.prompt, turn.prefix, continued=True)
        return replace(prompt, ids=prompt.ids[1:]) if prompt.ids[:1] == [previous_token] else prompt

    def _encode(self, prompt: Prompt, prefix: str, *, continued: bool) -> EncodedPrompt:
        key = (str(prompt.messages), tuple(prompt.data), prefix, continued)
        if key not in self._templates:
            if len(self._templates) >= _TEMPLATES_KEPT:
                self._templates.clear()
            self._templates[key] = self._template(prompt, prefix, continued)
        parts, prefill = self._templates[key]
        texts = {name: self.encode_text(text) for name, text in prompt.data.items()}
        pieces = (texts[part] if isinstance(part, str) else part for part in parts)
        ids = [token for piece in pieces for token in piece]
        return EncodedPrompt(ids, sum(map(len, texts.values())), prefill)

    def _template(self, prompt: Prompt, prefix: str, continued: bool) -> _Template:
        messages = list(prompt.messages)
        if continued:
            # Templates allow a system message only at the start; later the user says it.
            content = "\n\n".join(message["content"] for message in messages)
            messages = [
                {"role": "user", "content": _USER},
                {"role": "assistant", "content": _ASSISTANT},
                {"role": "user", "content": content},
            ]
        text, prefill = self._render(messages, prefix)
        if lost := [m for m in messages if m["content"].strip() not in text]:
            raise ValueError(
                f"the model's chat template drops or changes text of the {lost[0]['role']} in the "
                f"prompt: {lost[0]['content'][:200]!r}. Use another template or prompt profile."
            )
        if continued:  # what follows the text of the previous turn: its end, then the new message
            text = text.partition(_ASSISTANT)[2]
        pieces = PLACE.split(text)
        for name in prompt.data:
            if (times := pieces[1::2].count(name)) != 1:
                raise ValueError(
                    f"a prompt must show {{{{ {name} }}}} exactly once; this one shows it {times} "
                    f"times: {prompt.messages[-1]['content'][:200]!r}"
                )
        encode, encoded = self.tokenizer.encode, list[list[int] | str](pieces)
        encoded[::2] = [list(encode(piece, add_special_tokens=False)) for piece in pieces[::2]]
        return encoded, prefill

    def _render(self, messages: list[Message], prefix: str) -> tuple[str, str]:
        """The prompt as text, and the part at its end that begins the player's turn."""
        text = self._apply_template(messages, add_generation_prompt=True)
        asked = self._apply_template(messages, add_generation_prompt=False)
        # An untrusted text may quote a <think>, so look only at what the generation prompt adds.
        added = text.removeprefix(asked) if text.startswith(asked) else PLACE.split(text)[-1]
        prefill = "".join(added.partition(THINK)[1:])
        if reasoning_open(prefill) and reasoning_open(prefix):
            return text, prefill  # the chat template has opened the reasoning already
        return text + prefix, prefill + prefix

    def _apply_template(self, messages: list[Message], *, add_generation_prompt: bool) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.template_kwargs,
            )
        except Exception as error:  # templates raise their own errors, e.g. on a system message
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"the model's chat template refuses the game's messages ({roles}): {error}. Use a "
                "prompt profile without what it refuses, or give the run another chat template."
            ) from error
        return text
