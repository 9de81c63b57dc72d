"""From chat messages to token ids, with the note as data.

A note may hold anything, ``<|im_end|>`` included. So the chat template is rendered with a stand-in
for the note, the two halves around it are tokenised as the template wants, and the note between
them is tokenised with special tokens switched off: no note can open or close a chat turn.
Called by the agent loop and by the start-up check.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from medserl_agentloop.game.types import Category, Role
from medserl_agentloop.prompting import Message, PromptProfile

# Private-use characters: no template holds them, and chat templates that strip white space keep them.
_NOTE = "\ue000note\ue000"
_USER = "\ue000user\ue000"
_ASSISTANT = "\ue000assistant\ue000"


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt in tokens.

    Attributes:
        ids: All token ids.
        note_tokens: How many of them are the note.
    """

    ids: list[int]
    note_tokens: int


class ChatEncoder:
    """Tokenises the turns of one prompt profile with one tokenizer and its chat template.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template.
        profile: The prompt profile.
        chat_template_kwargs: verl's ``data.apply_chat_template_kwargs``, e.g. ``enable_thinking``.
    """

    def __init__(
        self, tokenizer: Any, profile: PromptProfile, chat_template_kwargs: dict[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._profile = profile
        self._template_kwargs = dict(chat_template_kwargs or {})
        self._halves: dict[tuple[Role, Category, bool], tuple[list[int], list[int]]] = {}

    def opening(self, role: Role, category: Category, note: str) -> EncodedPrompt:
        """The prompt that opens a context of ``role``'s own."""
        return self._encode(role, category, note, continued=False)

    def continuation(self, role: Role, category: Category, note: str, previous_token: int | None) -> EncodedPrompt:
        """The prompt as the next user message of a running conversation.

        Args:
            previous_token: Last token of the assistant's turn. Where it is the end-of-turn token
                already, it is not repeated.
        """
        prompt = self._encode(role, category, note, continued=True)
        if previous_token is not None and prompt.ids[:1] == [previous_token]:
            return EncodedPrompt(prompt.ids[1:], prompt.note_tokens)
        return prompt

    def encode_note(self, note: str) -> list[int]:
        """Token ids of a note as data: special tokens in it are text."""
        return list(self._tokenizer.encode(note, add_special_tokens=False, split_special_tokens=True))

    def _encode(self, role: Role, category: Category, note: str, *, continued: bool) -> EncodedPrompt:
        key = (role, category, continued)
        if key not in self._halves:
            self._halves[key] = self._template_halves(role, category, continued)
        before, after = self._halves[key]
        note_ids = self.encode_note(note)
        return EncodedPrompt([*before, *note_ids, *after], len(note_ids))

    def _template_halves(self, role: Role, category: Category, continued: bool) -> tuple[list[int], list[int]]:
        messages: list[Message] = self._profile.messages(role, category, _NOTE)
        if continued:
            earlier = [{"role": "user", "content": _USER}, {"role": "assistant", "content": _ASSISTANT}]
            # What follows the assistant's own words: its end of turn, then the new message.
            text = self._render([*earlier, *messages]).partition(_ASSISTANT)[2]
        else:
            text = self._render(messages)
        before, found, after = text.partition(_NOTE)
        if not found or _NOTE in after:
            raise ValueError(
                f"the {role.value}'s template of profile {self._profile.folder.name!r} must show "
                "{{ note }} exactly once for the note to be kept apart from the prompt"
            )
        encode = self._tokenizer.encode
        return list(encode(before, add_special_tokens=False)), list(encode(after, add_special_tokens=False))

    def _render(self, messages: list[Message]) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self._template_kwargs
        )
        return text
