"""From chat messages to token ids, with the note as data.

A note may hold anything, ``<|im_end|>`` included. So the chat template is rendered with a stand-in
for the note, the two halves around it are tokenised as the template wants, and the note between
them is tokenised by a tokenizer that knows no special tokens: no note can open or close a chat turn.
Called by the agent loop and by the start-up check.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from medserl_agentloop.core.plain_text import PlainText
from medserl_agentloop.games.medical.parsing.base import THINK, reasoning_open
from medserl_agentloop.games.medical.prompting import Message, PromptProfile
from medserl_agentloop.games.medical.types import Category, Role

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
        prefill: How the prompt begins the player's turn, as text, e.g. ``<think>``.
    """

    ids: list[int]
    note_tokens: int
    prefill: str = ""


@dataclass(frozen=True)
class _Halves:
    """A prompt around its note."""

    before: list[int]
    after: list[int]
    prefill: str


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
        self._plain_text = PlainText(tokenizer)
        self._halves: dict[tuple[Role, Category, bool], _Halves] = {}

    @property
    def special_tokens(self) -> list[str]:
        """Strings that the tokenizer has special tokens for."""
        return self._plain_text.special_tokens

    def stop(self, role: Role) -> dict[str, list[Any]]:
        """Sampling parameters that end ``role``'s turn where its profile says so.

        ``stop_token_ids`` where one token is the stop string; SGLang takes a longer one, in ``stop``, only
        with ``rollout.skip_tokenizer_init=False``.
        """
        strings = self._profile.settings.stop.get(role, [])
        ids = {string: self._tokenizer.encode(string, add_special_tokens=False) for string in strings}
        tokens = [found[0] for found in ids.values() if len(found) == 1]
        longer = [string for string, found in ids.items() if len(found) != 1]
        return {**({"stop_token_ids": tokens} if tokens else {}), **({"stop": longer} if longer else {})}

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
            return EncodedPrompt(prompt.ids[1:], prompt.note_tokens, prompt.prefill)
        return prompt

    def encode_note(self, note: str) -> list[int]:
        """Token ids of a note as data: special tokens in it are text."""
        return self._plain_text.encode(note)

    def note_tokens(self, note: str) -> int:
        """Tokens that a note takes in a prompt."""
        return len(self.encode_note(note))

    def _encode(self, role: Role, category: Category, note: str, *, continued: bool) -> EncodedPrompt:
        key = (role, category, continued)
        if key not in self._halves:
            self._halves[key] = self._template_halves(role, category, continued)
        halves = self._halves[key]
        note_ids = self.encode_note(note)
        return EncodedPrompt([*halves.before, *note_ids, *halves.after], len(note_ids), halves.prefill)

    def _template_halves(self, role: Role, category: Category, continued: bool) -> _Halves:
        messages = self._profile.messages(role, category, _NOTE)
        if continued:
            # Templates want a system message first or not at all, so in mid-conversation the user says it.
            content = "\n\n".join(message["content"] for message in messages)
            messages = [
                {"role": "user", "content": _USER},
                {"role": "assistant", "content": _ASSISTANT},
                {"role": "user", "content": content},
            ]
        text, prefill = self._render(messages)
        if continued:  # what follows the assistant's own words: its end of turn, then the new message
            text = text.partition(_ASSISTANT)[2]
        before, found, after = text.partition(_NOTE)
        if not found or _NOTE in after:
            raise ValueError(
                f"the {role.value}'s template of profile {self._profile.folder.name!r} must show "
                "{{ note }} exactly once for the note to be kept apart from the prompt"
            )
        encode = self._tokenizer.encode
        return _Halves(
            list(encode(before, add_special_tokens=False)), list(encode(after, add_special_tokens=False)), prefill
        )

    def _render(self, messages: list[Message]) -> tuple[str, str]:
        """The prompt as text, and the end of it that begins the player's turn."""
        text = self._apply_template(messages, add_generation_prompt=True)
        asked = self._apply_template(messages, add_generation_prompt=False)
        # A note may quote a <think>, so it is looked for in what the generation prompt adds.
        generation_prompt = text.removeprefix(asked) if text.startswith(asked) else text.rpartition(_NOTE)[2]
        prefill = "".join(generation_prompt.partition(THINK)[1:])
        prefix = self._profile.settings.assistant_prefix
        if reasoning_open(prefill) and reasoning_open(prefix):
            return text, prefill  # the chat template has opened the reasoning already
        return text + prefix, prefill + prefix

    def _apply_template(self, messages: list[Message], *, add_generation_prompt: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **self._template_kwargs
            )
        except Exception as error:  # templates raise errors of their own, e.g. on a system message
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"the model's chat template refuses the messages of profile {self._profile.folder.name!r} "
                f"({roles}): {error}. Use a profile without what it refuses, or give the run another chat template."
            ) from error
        return text
