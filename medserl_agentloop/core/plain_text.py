"""Tokenising text of unknown origin so that none of it becomes a control token.

``split_special_tokens`` of Transformers is not enough: it leaves added tokens alone that are not marked as
special, such as Qwen3's ``<think>``, and some models' own vocabularies hold ``</s>`` as a plain piece.
"""

from __future__ import annotations

import json
import re
from typing import Any

CONTROL_TOKEN = "|".join(
    (
        r"<[|\uff5c][\w\u2581/ -]{1,40}[|\uff5c]>",  # \uff5c and \u2581: DeepSeek's bar and blank
        r"\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS)\]",
        r"<</?SYS>>",
        r"</?(?:start_of_turn|end_of_turn|s|bos|eos)>",
    )
)
"""Pattern of control tokens of common chat templates (ChatML, Llama 2 and 3, Gemma, Mistral, Phi, DeepSeek)."""

# Added tokens that are structure whatever they are marked as: <think>, <|im_end|>, [INST], <start_of_turn>.
# Others, such as Gemma's runs of line breaks, are text.
_MARKER = re.compile(r"[<\[{].*[>\]}]", re.DOTALL)


class PlainText:
    """Encodes text with a Hugging Face tokenizer, control tokens spelt out as the text they are."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
        special = set(tokenizer.all_special_ids)
        special |= {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._control = {n: t for n, t in added.items() if n in special or _MARKER.fullmatch(t)}
        self.special_tokens = sorted(set(self._control.values()) | set(tokenizer.all_special_tokens))
        """Strings that would be control tokens in a prompt."""
        self._control |= {n: tokenizer.convert_ids_to_tokens(n) for n in special}
        self._backend = self._without_control_tokens()

    def _without_control_tokens(self) -> Any:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        from tokenizers import Tokenizer

        definition = json.loads(backend.to_str())
        for token in definition["added_tokens"]:
            token["special"] = token["id"] in self._control
        definition["truncation"] = definition["padding"] = None
        copy = Tokenizer.from_str(json.dumps(definition))
        copy.encode_special_tokens = True
        return copy

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, none of which is a control token.

        Raises:
            ValueError: The vocabulary has no other token for the characters of a control token.
        """
        if self._backend is None:
            ids = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        else:
            ids = self._backend.encode(text, add_special_tokens=False).ids
        if self._control.keys().isdisjoint(ids):
            return list(ids)
        return [part for number in ids for part in self._spelt(number)]

    def _spelt(self, number: int) -> list[int]:
        """The token itself, or the characters of a control token that the vocabulary holds as a word."""
        token = self._control.get(number)
        if token is None:
            return [number]
        unknown = self._tokenizer.unk_token_id
        if number == unknown:  # a character that the vocabulary lacks: no text, but nothing else either
            return [number]
        spelt: list[int] = self._tokenizer.convert_tokens_to_ids(list(token))
        if any(part is None or part == unknown for part in spelt):
            raise ValueError(
                f"the tokenizer cannot write {token!r} as plain text: its vocabulary lacks one of the characters"
            )
        return spelt
