"""Chat models: messages in, a turn's text out."""

from __future__ import annotations

import asyncio
import logging
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

from medserl_agentloop.core.client import (
    CHAT_PATH,
    BadAnswer,
    HttpClient,
    NoAnswer,
    Refused,
    Unreachable,
    shown,
)
from medserl_agentloop.core.encoding import (
    CONTROL_TOKEN,
    END_THINK,
    JOINER,
    THINK,
    ChatEncoder,
    Message,
    as_think,
    as_untrusted,
    broken,
)
from medserl_agentloop.core.interaction import NoReplyError, Reply, Turn

logger = logging.getLogger(__name__)

TEMPLATE_KWARGS = "chat_template_kwargs"  # of the chat template, in a request's ``extra_body``
BASE = "base"  # in place of a server's ``url``: the base model of the run
ABORTED = ("abort", "aborted")  # stop reasons of SGLang, and of verl, for a turn that was given up
# Finish reasons: of a turn that its budget cut off, and of one that has no end. Servers have many
# other words for a complete turn.
_CUT = re.compile(r"length|max_?(output_?)?tokens|model_length", re.I)
_NO_END = re.compile(r"abort|cancel|content|filter|safety|recitation|refus|error|fail", re.I)
_TOO_MUCH = re.compile(r"too (large|long|many)|context", re.I)  # no field is to blame
_ALL_REASONING = (
    ", but for its reasoning: start the server without a reasoning parser, or switch thinking off "
    f"(extra_body {TEMPLATE_KWARGS}.enable_thinking=false)"
)


class ChatClient:
    """Asks one model of an OpenAI-compatible server at ``http``, the base of the API, e.g.
    ``http://host:30000/v1``.

    Messages, including a player's own earlier turns, may not contain ``special_tokens`` (the
    tokenizer's, if known) or those of common templates. Other players' texts pass through
    :func:`as_data`.
    """

    def __init__(self, http: HttpClient, special_tokens: Iterable[str] = ()) -> None:
        self.http = http
        # The fewest words of a prompt by the number of tokens that the server says it read.
        self._fewest_words: dict[int, int] = {}
        self._warned = False
        known = [re.escape(token) for token in special_tokens if token]
        self._special = re.compile("|".join([r"<\|[^<>|\s]*\|>", CONTROL_TOKEN, *known]), re.I)

    async def complete(
        self, messages: list[dict[str, str]], fields: Mapping[str, Any], prefix: str = ""
    ) -> Reply:
        """The model's turn after ``messages``; NoAnswer if there is none after all tries.

        ``prefix`` begins the turn and is not part of the reply. ``fields`` are sampling and other
        fields of the request. The options' ``extra_body`` overrides them, and None removes a field.
        """
        # Otherwise a player would learn to end another's turn by writing <|im_end|> into its own.
        harmless = [{**m, "content": self._special.sub(broken, m["content"])} for m in messages]
        words = sum(len(message["content"].split()) for message in harmless)
        body: dict[str, Any] = {"model": self.http.options.model, "messages": harmless}
        if prefix:  # by SGLang's and vLLM's names
            harmless.append({"role": "assistant", "content": prefix})
            body |= {"add_generation_prompt": False, "continue_final_message": True}
        body |= {**fields, **self.http.options.extra_body}
        body = {name: value for name, value in body.items() if value is not None}
        try:
            reply = _read(await self.http.post(CHAT_PATH, body), prefix)
        except Refused as refusal:
            if hint := self._hint(refusal.words, body):
                refusal.args = (f"{hint} ({refusal})",)
            raise
        self._watch(words, reply.prompt_tokens)
        return reply

    def _hint(self, words: str, body: Mapping[str, Any]) -> str:
        """What to do about a refusal; OpenAI's newer models accept only one temperature."""
        if "stream" in words.lower() and "stream" not in body:
            return "this server streams its answers, which is not supported"
        named = sorted({*re.findall(r"\w+", words)} & (body.keys() - {"model", "messages"}))
        if not named or _TOO_MUCH.search(words):
            return ""
        instead = re.findall(r"[Uu]se '(\w+)' instead", words)
        fields = [f"{name}=null" for name in named] + [f"{new}={body[named[0]]}" for new in instead]
        node = self.http.options.node
        option = f"+{node}.extra_body." if node else "--extra-body "
        return f"add {' '.join(option + field for field in fields)}"

    def _watch(self, words: int, tokens: int) -> None:
        """Warn once if a server reads fewer tokens than a prompt has words, or as many of a long
        prompt as of a short one: it cuts prompts.
        """
        fewest = min(words, self._fewest_words.get(tokens, words))
        self._fewest_words[tokens] = fewest
        if tokens and not self._warned and (tokens < words or words > 1.5 * fewest + 20):
            self._warned = True
            logger.warning(
                "%s says that it read %d tokens of a prompt of %d words%s: it cuts long prompts. "
                "Raise its context length",
                *(self.http.url, tokens, words),
                "" if tokens < words else f", as of one of {fewest}",
            )


def _read(answer: Any, prefix: str) -> Reply:
    """The turn in a chat completion. Reasoning that a server returns separately is part of the
    turn.
    """
    if isinstance(answer, dict) and answer.get("error") and not answer.get("choices"):
        raise BadAnswer(f"the answer is an error: {shown(str(answer['error']))}")
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        content = message.get("content") or ""
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        if isinstance(content, list):  # Mistral's
            thoughts = [part for c in content if c["type"] == "thinking" for part in c["thinking"]]
            reasoning += "".join(part["text"] for part in thoughts)
            content = "".join(chunk["text"] for chunk in content if chunk["type"] == "text")
        content, reasoning = as_think(content), str(reasoning)
        usage = answer.get("usage") or {}
        tokens, read = (int(usage.get(f"{of}_tokens") or 0) for of in ("completion", "prompt"))
        finish, model = str(choice.get("finish_reason") or ""), str(answer.get("model") or "")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError):
        raise BadAnswer(f"the answer is not a chat completion: {shown(str(answer))}") from None
    cut = bool(_CUT.fullmatch(finish))
    if not cut and _NO_END.search(finish):
        raise BadAnswer(f"generation ended with {shown(repr(finish))}")
    if not content and not (reasoning and cut):
        raise BadAnswer("the answer is empty" + (_ALL_REASONING if reasoning else ""))
    if reasoning:
        opening = "" if prefix.rstrip().endswith(THINK) else THINK
        # Cut off while it reasoned: nothing closed the reasoning.
        closing = f"{END_THINK}\n" if content else ""
        content = f"{opening}{reasoning}{closing}{content}"
    return Reply(content.replace(JOINER, ""), tokens, cut, prefix, model, read)


class ServedModel(ChatClient):
    """A model behind a server that plays turns; ``fields`` are sent with every request."""

    def __init__(
        self, http: HttpClient, *, special_tokens: Iterable[str] = (), **fields: Any
    ) -> None:
        super().__init__(http, special_tokens)
        self.name, self.url = str(http.options.model), http.url  # without credentials
        self._names, self._fields = {"", self.name}, fields

    async def check(self) -> dict[str, str]:
        """Ask the server about its weights; ValueError for a wrong address or key."""
        try:
            served = await self._served()
        except Unreachable as error:
            raise ValueError(
                f"no server answers at {self.url} ({error}); name the base of an API"
            ) from None
        base, _, adapter = self.name.partition(":")  # SGLang's name of an adapter
        card = dict(served.get(self.name) or (base in served and served.get(adapter)) or {})
        if card.get("parent") and card.get("owned_by") == "sglang" and not adapter:
            raise ValueError(
                f"{self.url}: {self.name} is an adapter, and under this name the base would "
                f"answer; name it {shown(card['parent'])}:{self.name}"
            )
        if served and not card and base not in served:  # it may also know other names
            listed = shown(", ".join(served))
            logger.warning("%s does not list %s, only %s", self.url, self.name, listed)
        with suppress(NoAnswer, TypeError, ValueError):  # SGLang's
            root = str(self.http.options.url).removesuffix("/v1")
            card |= await self.http.get(f"{root}/model_info")
        facts = ("root", "model_path", "weight_version")
        return {name: shown(str(card[name])) for name in facts if card.get(name)}

    async def _served(self) -> dict[str, Any]:
        """The models by name, if the server lists them; ValueError if it refuses the key."""
        try:
            return {str(each["id"]): each for each in (await self.http.get("/models"))["data"]}
        except Unreachable as error:
            if str(error).startswith(("Connect", "Timeout")):
                raise
        except (Refused, BadAnswer, KeyError, TypeError):
            pass
        try:
            await self.complete([{"role": "user", "content": "Hello"}], {"max_tokens": 1})
        except Refused as error:
            if error.status in (401, 403):
                option = self.http.options.option("api_key_env")
                raise ValueError(f"{self.url}: {error}; name a variable with {option}") from None
        except BadAnswer:
            pass  # it answers; the content does not matter
        return {}

    async def reply(self, turn: Turn, messages: Sequence[Message], **fields: Any) -> Reply:
        """Take a turn, or raise :class:`NoReplyError`; ``fields`` of this request override the
        others.
        """
        request: dict[str, Any] = {"max_tokens": turn.max_tokens}
        if turn.stop:  # by SGLang's and vLLM's names: end at these strings, and leave them in
            kept = {"no_stop_trim": True, "include_stop_str_in_output": True}
            request |= {"stop": list(turn.stop), **kept}
        request |= {**self._fields, **fields}
        try:
            return await self.complete(list(messages), request, turn.prefix)
        except NoAnswer as error:
            refused = not isinstance(error, Unreachable)
            raise NoReplyError(f"{turn.role}: {error}", refused=refused) from None

    async def sample(
        self,
        turn: Turn,
        messages: Sequence[Message],
        *,
        number: int,
        budget: int,
        temperature: float,
        seed: int,
    ) -> Reply:
        """Take a turn of at most ``budget`` tokens, or raise :class:`NoReplyError`.

        Its own seed depends on ``seed``, the turn and the ``number`` of the game or sample, not on
        the order of requests.
        """
        text = "".join(turn.prompt.data.values()) or str(list(messages))
        role = turn.role if turn.conversation is None else f"{turn.role}/{turn.conversation}"
        key = f"{seed}/{role}/{text}" + (f"/{number}" if number else "")
        own_seed = zlib.crc32(key.encode(errors="replace")) >> 1
        reply = await self.reply(
            turn, messages, max_tokens=budget, temperature=temperature, seed=own_seed
        )
        if reply.model not in self._names:
            self._names.add(reply.model)
            logger.warning(
                "%s answers as %s, asked for %s", self.url, shown(reply.model), self.name
            )
        return reply

    def count(self, text: str) -> int:
        """Estimate the tokens of ``text``: two per word."""
        return 2 * len(text.split())


class BaseModelChat:
    """The base model, which the rollout serves along with the roles' adapters. It takes
    token ids.
    """

    def __init__(
        self, name: str, server: Any, encoder: ChatEncoder, timeout_s: float | None
    ) -> None:
        self.name = name
        self._server, self._encoder, self._timeout_s = server, encoder, timeout_s

    def with_template(self, **kwargs: Any) -> BaseModelChat:
        """The same with additional arguments of the chat template."""
        encoder = ChatEncoder(
            self._encoder.tokenizer, {**self._encoder.template_kwargs, **kwargs}, self._encoder.ends
        )
        return BaseModelChat(self.name, self._server, encoder, self._timeout_s)

    async def complete(self, messages: Sequence[Message], fields: Mapping[str, Any]) -> Reply:
        """The base model's turn, or NoAnswer; it uses only ``temperature`` and ``max_tokens`` of
        ``fields``.
        """
        budget = fields["max_tokens"]
        prompt = self._encoder.opening(Turn("", as_untrusted(messages), budget))
        sampling = {"temperature": fields["temperature"], "max_tokens": budget}
        generation = self._server.generate(
            request_id=uuid4().hex,
            prompt_ids=prompt.ids,
            sampling_params={**sampling, "top_p": 1.0, "top_k": -1},
        )
        try:
            output = await asyncio.wait_for(generation, self._timeout_s)
        except TimeoutError:
            raise Unreachable(f"the base model gave no answer in {self._timeout_s} s") from None
        except Exception as error:  # from the engine: for example, the prompt is too long
            raise BadAnswer(f"the engine refuses the question: {error}") from None
        if output.stop_reason in ABORTED or not output.token_ids:
            raise Unreachable("the engine aborted the base model's answer")
        ids = list(output.token_ids)
        cut = self._encoder.was_cut(ids, budget, output.stop_reason)
        return Reply(self._encoder.decode(ids), len(ids), cut)
