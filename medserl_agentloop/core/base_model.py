"""The policy's base model as a chat model, for games that ask it what their score needs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from medserl_agentloop.core.chat import ChatAnswer
from medserl_agentloop.core.client import BadAnswer, Unreachable
from medserl_agentloop.core.encoding import ChatEncoder
from medserl_agentloop.core.interaction import Message, Prompt, Turn, place

ABORTED = ("abort", "aborted")
"""Stop reasons of a turn that the engine gave up: SGLang's finish reason, and verl's own word."""


class BaseModelChat:
    """The rollout serves the base model beside the roles' adapters; nobody trains it.

    Asks verl's server client for turns without an adapter, in tokens, because verl starts SGLang without a tokenizer.
    Nothing in the messages becomes a control token. One answer may take ``timeout_s`` seconds; None is no limit.
    """

    is_down = False

    def __init__(self, name: str, server: Any, encoder: ChatEncoder, timeout_s: float | None) -> None:
        self.name = name
        self._server, self._encoder, self._timeout_s = server, encoder, timeout_s

    def with_template(self, **kwargs: Any) -> BaseModelChat:
        """The same, with these arguments of the chat template besides the run's."""
        encoder = ChatEncoder(self._encoder.tokenizer, {**self._encoder.template_kwargs, **kwargs})
        return BaseModelChat(self.name, self._server, encoder, self._timeout_s)

    async def complete(self, messages: Sequence[Message], fields: Mapping[str, Any]) -> ChatAnswer:
        """The base model's turn; of ``fields`` it knows ``temperature`` and ``max_tokens``.

        Raises:
            NoAnswer: The engine refuses the request, aborts it, or takes too long.
        """
        texts = {f"message_{number}": message["content"] for number, message in enumerate(messages)}
        shown = tuple({**message, "content": place(name)} for message, name in zip(messages, texts, strict=True))
        budget = fields["max_tokens"]
        prompt = self._encoder.opening(Turn("", Prompt(shown, texts), budget))
        sampling = {"temperature": fields["temperature"], "max_tokens": budget, "top_p": 1.0, "top_k": -1}
        generation = self._server.generate(request_id=uuid4().hex, prompt_ids=prompt.ids, sampling_params=sampling)
        try:
            output = await asyncio.wait_for(generation, self._timeout_s)
        except TimeoutError:
            raise Unreachable(f"the base model gave no answer in {self._timeout_s} s") from None
        except Exception as error:  # of the engine: the prompt is too long for it, say
            raise BadAnswer(f"the engine refuses the question: {error}") from None
        if output.stop_reason in ABORTED or not output.token_ids:
            raise Unreachable("the engine aborted the base model's answer")
        ids = list(output.token_ids)
        return ChatAnswer(self._encoder.decode(ids), len(ids), self._encoder.was_cut(ids, budget, output.stop_reason))
