"""Chat models: messages in, a turn's text out.

:class:`ChatClient` asks a model behind an OpenAI-compatible server (SGLang, vLLM, ...), :class:`ServedModel` lets it
take turns of a game, and :class:`BaseModelChat` asks the base model of a run's own rollout.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from medserl_agentloop.core.client import BadAnswer, HttpClient, NoAnswer, Refused, Unreachable, shown
from medserl_agentloop.core.control_text import CONTROL_TOKEN, END_THINK, JOINER, THINK, broken
from medserl_agentloop.core.encoding import ChatEncoder
from medserl_agentloop.core.interaction import Message, NoReplyError, Reply, Turn, as_untrusted

PATH = "/chat/completions"
"""Path of the requests, under the base of the API."""
TEMPLATE_KWARGS = "chat_template_kwargs"
"""What servers call the arguments of the chat template, in a request's ``extra_body``."""
BASE = "base"
"""What stands in the place of a server's ``url`` for the base model of the run."""

ABORTED = ("abort", "aborted")
"""Stop reasons of a turn that the engine gave up: SGLang's finish reason, and verl's own word."""

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


class ServedModel:
    """Asks the server for turns; ``name`` is that of the model.

    ``fields`` are sampling and other fields of all requests. Messages may not smuggle in ``special_tokens``, those of
    the model's tokenizer.
    """

    def __init__(self, http: HttpClient, *, special_tokens: Iterable[str] = (), **fields: Any) -> None:
        self.name = str(http.options.model)
        self.url = http.url
        """The API's base, without credentials."""
        self._http, self._fields = http, fields
        self._chat = ChatClient(http, special_tokens)

    async def check(self) -> None:
        """Ask the server for its models; a ValueError shows a wrong address or name before the first game."""
        url = f"{self.url}/models"
        try:
            served = [str(model["id"]) for model in (await self._http.get("/models"))["data"]]
        except Refused as refusal:
            if refusal.status not in (401, 403):
                return  # not every server lists its models
            raise ValueError(
                f"{url} answers {refusal.status}; name the environment variable of the API key with --api-key-env"
            ) from None
        except (BadAnswer, KeyError, TypeError):
            return
        except NoAnswer as error:
            raise ValueError(
                f"no server answers at {url} ({error}); give the base of an OpenAI-compatible API"
            ) from None
        model = self._http.options.model
        if served and model not in served:
            raise ValueError(f"{url} does not list the model {model!r}; --model is one of {', '.join(served)}")

    async def answer(self, turn: Turn, messages: Sequence[Message], **fields: Any) -> ChatAnswer:
        """The model's turn after ``messages``; ``fields`` of this request win over the others.

        Raises:
            NoAnswer: No usable answer after all tries.
        """
        request = {"max_tokens": turn.max_tokens, **stop_fields(turn.stop), **self._fields, **fields}
        return await self._chat.complete(list(messages), request, turn.prefix)

    async def reply(self, turn: Turn, messages: Sequence[Message], **fields: Any) -> Reply:
        """Take a turn, or raise :class:`NoReplyError`."""
        try:
            answer = await self.answer(turn, messages, **fields)
        except NoAnswer as error:
            raise NoReplyError(f"{turn.role}: {error}") from None
        return Reply(answer.text, answer.tokens, answer.truncated, turn.prefix)

    async def sample(
        self, turn: Turn, messages: Sequence[Message], *, number: int, budget: int, temperature: float, seed: int
    ) -> Reply:
        """Take a turn of at most ``budget`` tokens, drawn by a seed of its own, or raise :class:`NoReplyError`.

        Its seed follows ``seed``, the turn and the ``number`` of the game or sample, and not the order of the requests,
        which differs from run to run.
        """
        text = "".join(turn.prompt.data.values()) or str(list(messages))
        role = turn.role if turn.conversation is None else f"{turn.role}/{turn.conversation}"
        key = f"{seed}/{role}/{text}" + (f"/{number}" if number else "")
        own_seed = zlib.crc32(key.encode(errors="replace")) >> 1
        return await self.reply(turn, messages, max_tokens=budget, temperature=temperature, seed=own_seed)

    def count(self, text: str) -> int:
        """About as many tokens as ``text`` takes: two for a word."""
        return 2 * len(text.split())


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
        budget = fields["max_tokens"]
        prompt = self._encoder.opening(Turn("", as_untrusted(messages), budget))
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
