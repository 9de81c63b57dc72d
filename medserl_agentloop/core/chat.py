"""A chat model behind an OpenAI-compatible server (SGLang, vLLM, ...): messages in, a turn's text out.

Used by whoever asks a served model for a turn: opponents, players and games.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from medserl_agentloop.core.client import BadAnswer, HttpClient, shown
from medserl_agentloop.core.control_text import CONTROL_TOKEN, END_THINK, JOINER, THINK, broken

PATH = "/chat/completions"
"""Path of the requests, under the base of the API."""
TEMPLATE_KWARGS = "chat_template_kwargs"
"""What servers call the arguments of the chat template, in a request's ``extra_body``."""
BASE = "base"
"""What stands in the place of a server's ``url`` for the base model of the run."""

_CONTINUE = {"add_generation_prompt": False, "continue_final_message": True}
"""Request fields, by SGLang's and vLLM's names, that let a server go on with a turn that is begun."""


def stop_fields(strings: Iterable[str]) -> dict[str, Any]:
    """Request fields, by SGLang's and vLLM's names, that end a turn at these strings and leave them in it."""
    return {"stop": list(strings), "no_stop_trim": True, "include_stop_str_in_output": True} if strings else {}


@dataclass(frozen=True)
class ChatAnswer:
    """A turn: the text with the reasoning that a server split off in front, and its length as the server counts.

    ``tokens`` is 0, ``model`` empty and ``weights`` (a version, by SGLang) None where the server does not say.
    ``truncated`` is whether the token budget cut the turn off.
    """

    text: str
    tokens: int
    truncated: bool
    model: str = ""
    weights: str | None = None


class ChatClient:
    """Asks one model at ``http``, whose address is the base of the API, e.g. ``http://host:30000/v1``.

    Messages may not smuggle in ``special_tokens``, those of the model's tokenizer if known, nor those of common
    templates, also in a player's own earlier turns. Other players' texts come through :func:`as_data`.
    """

    def __init__(self, http: HttpClient, special_tokens: Iterable[str] = ()) -> None:
        self.http = http
        known = map(re.escape, filter(None, special_tokens))
        self._special = re.compile("|".join([r"<\|[^<>|\s]*\|>", CONTROL_TOKEN, *known]), re.IGNORECASE)

    @property
    def is_down(self) -> bool:
        """Whether the server does not answer any more."""
        return self.http.is_down

    async def complete(self, messages: list[dict[str, str]], fields: Mapping[str, Any], prefix: str = "") -> ChatAnswer:
        """The model's turn after ``messages``. ``prefix`` begins it and is no part of the answer.

        ``fields`` are sampling and other fields of the request. The options' ``extra_body`` wins over them, and None
        takes a field out.

        Raises:
            NoAnswer: No usable answer after all tries.
        """
        # Else a player would learn to end another one's turn by writing <|im_end|> into its own.
        harmless = [{**m, "content": self._special.sub(broken, m["content"])} for m in messages]
        body: dict[str, Any] = {"model": self.http.options.model, "messages": harmless}
        if prefix:
            body["messages"].append({"role": "assistant", "content": prefix})
            body |= _CONTINUE
        body |= {**fields, **self.http.options.extra_body}
        return self._read(await self.http.post(PATH, {k: v for k, v in body.items() if v is not None}), prefix)

    def _read(self, answer: Any, prefix: str) -> ChatAnswer:
        """The turn in a chat completion. A server that parses reasoning sends it apart; it is part of the turn."""
        try:
            choice = answer["choices"][0]
            message = choice["message"]
            content = message.get("content") or ""
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
            tokens = int((answer.get("usage") or {}).get("completion_tokens") or 0)
            weights = (answer.get("metadata") or {}).get("weight_version")
            finish = choice.get("finish_reason")
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError):
            raise BadAnswer(f"the answer is no chat completion: {shown(str(answer))}") from None
        if not isinstance(content, str) or not isinstance(reasoning, str):
            raise BadAnswer("the answer's content is not text")
        if finish not in ("stop", "length", None):  # a content filter's "content_filter", an engine's "abort"
            raise BadAnswer(f"generation ended with {shown(repr(finish))}")
        if reasoning:
            opening = "" if prefix.rstrip().endswith(THINK) else THINK
            # Cut off while it reasoned: nothing closed the reasoning.
            closing = f"{END_THINK}\n" if content or finish != "length" else ""
            content = f"{opening}{reasoning}{closing}{content}"
        if not content:
            raise BadAnswer("the answer is empty")
        text, model = content.replace(JOINER, ""), str(answer.get("model") or "")
        return ChatAnswer(text, tokens, finish == "length", model, None if weights is None else str(weights))
