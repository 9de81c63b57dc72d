"""The prompts of a profile in tokens: the encoder of the core, told role, category and note."""

from __future__ import annotations

from typing import Any

from medserl_agentloop.core.encoding import ChatEncoder, EncodedPrompt
from medserl_agentloop.core.interaction import Turn
from medserl_agentloop.games.medical.prompting import PromptProfile
from medserl_agentloop.games.medical.types import Category, Role


class ProfileEncoder(ChatEncoder):
    """Tokenises the turns of one prompt profile.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template.
        profile: The prompt profile.
        template_kwargs: verl's ``data.apply_chat_template_kwargs``, e.g. ``enable_thinking``.
    """

    def __init__(self, tokenizer: Any, profile: PromptProfile, template_kwargs: dict[str, Any] | None = None) -> None:
        super().__init__(tokenizer, template_kwargs)
        self.profile = profile

    def of(self, role: Role, category: Category, note: str) -> EncodedPrompt:
        """The prompt that opens a context of ``role``'s own.

        Raises:
            ValueError: The template does not show the note exactly once, or the chat template refuses the messages.
        """
        return self.opening(self.turn(role, category, note))

    def turn(self, role: Role, category: Category, note: str) -> Turn:
        """The same before it is tokenised; its budget is left open."""
        return self.profile.turn(role, category, note)

    def stop_of(self, role: Role) -> dict[str, list[Any]]:
        """Sampling parameters that end ``role``'s turn where the profile says so."""
        return self.stop(self.profile.settings.stop.get(role, []))
