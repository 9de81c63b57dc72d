"""Tokenizes prompts, with untrusted text as data.

A text may contain anything, even ``<|im_end|>``. So the chat template is rendered with a
placeholder, and the text itself is tokenized without special tokens: it cannot open or close a chat
turn. Transformers' ``split_special_tokens`` ignores added tokens that are not marked as special,
such as Qwen3's ``<think>``, and plain pieces like ``</s>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import OmegaConf
from tokenizers import Tokenizer

from medserl_agentloop.core.control_text import THINK, as_think, reasoning_open, without_switches
from medserl_agentloop.core.interaction import PLACE, Message, Prompt, Turn, place

_TEMPLATES_KEPT = 1024

_USER, _ASSISTANT = place("user"), place("assistant")

# Added tokens that are structure whatever they are marked as: <think>, <|im_end|>, [INST],
# <start_of_turn>. Others, such as Gemma's runs of line breaks, are text.
_MARKER = re.compile(r"[<\[{].*[>\]}]", re.DOTALL)


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt in tokens."""

    ids: list[int]
    data_tokens: int  # of them untrusted text
    prefill: str = ""  # how it begins the turn, e.g. ``<think>``


_Template = tuple[list[list[int] | str], str]
"""A prompt as ids and names of untrusted texts in turn, and its prefill."""


def end_ids(*named: Any) -> frozenset[int]:
    """All end-of-sequence ids of a model's configs and tokenizer."""
    ends = (getattr(each, "eos_token_id", None) for each in named)
    lists = (end if isinstance(end, (list, tuple)) else [end] for end in ends)
    return frozenset(number for numbers in lists for number in numbers if number is not None)


class ChatEncoder:
    """Tokenizes prompts with a model's chat template (``template_kwargs``: verl's), and texts in
    them as data.

    To read turns it needs the ``ends`` that the model's configurations name: Gemma 3's differ from
    its tokenizer's.
    """

    def __init__(
        self,
        tokenizer: Any,
        template_kwargs: dict[str, Any] | None = None,
        ends: Iterable[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
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
        template_kwargs = OmegaConf.create(dict(data.get("apply_chat_template_kwargs") or {}))
        return cls(tokenizer, OmegaConf.to_container(template_kwargs), ends)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of ``text`` without control tokens; ValueError if one cannot be spelt out."""
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
            raise ValueError(
                f"the tokenizer cannot write {token!r} as text: its vocabulary lacks a character"
            )
        return spelt

    def count(self, text: str) -> int:
        return len(self.encode_text(text))

    def stop(self, strings: Sequence[str]) -> dict[str, list[Any]]:
        """Sampling parameters that end a turn at these strings; by token id if a string is one
        token.
        """
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
        # SGLang says "length"; other engines may say "completed" of a turn that was cut, too.
        if stop_reason in ("length", "stop"):
            return stop_reason == "length"
        return len(ids) >= budget and ids[-1] not in self.ends

    def opening(self, turn: Turn) -> EncodedPrompt:
        return self._encode(turn.prompt, turn.prefix, continued=False)

    def continuation(self, turn: Turn, previous_token: int | None) -> EncodedPrompt:
        """The prompt of a turn as the next user message of a conversation; does not repeat its
        end-of-turn token.
        """
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
            # Templates want a system message first or not at all, so in mid-conversation the user
            # says it.
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
                f"prompt: {lost[0]['content'][:200]!r}. Give the run another chat template, or use "
                "a prompt profile without it."
            )
        if continued:  # what follows the words of the turn before: its end, then the new message
            text = text.partition(_ASSISTANT)[2]
        pieces = PLACE.split(text)
        for name in prompt.data:
            if (times := pieces[1::2].count(name)) != 1:
                raise ValueError(
                    f"a prompt must show {{{{ {name} }}}} exactly once for it to be kept apart "
                    f"from the prompt; this one shows it {times} times: "
                    f"{prompt.messages[-1]['content'][:200]!r}"
                )
        encode, encoded = self.tokenizer.encode, list[list[int] | str](pieces)
        encoded[::2] = [list(encode(piece, add_special_tokens=False)) for piece in pieces[::2]]
        return encoded, prefill

    def _render(self, messages: list[Message], prefix: str) -> tuple[str, str]:
        """The prompt as text, and the part at its end that begins the player's turn."""
        text = self._apply_template(messages, add_generation_prompt=True)
        asked = self._apply_template(messages, add_generation_prompt=False)
        # An untrusted text may quote a <think>: it counts in what the generation prompt adds.
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
        except Exception as error:  # templates raise errors of their own, e.g. on a system message
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"the model's chat template refuses the game's messages ({roles}): {error}. Use a "
                "prompt profile without what it refuses, or give the run another chat template."
            ) from error
        return text
