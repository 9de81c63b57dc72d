"""A stand-in for verl's SGLang server client that plays back scripted replies: an agent loop's
``server_manager``.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

from verl.workers.rollout.replica import TokenOutput


@dataclass(frozen=True)
class MockReply:
    """One reply, where a plain string or list of token ids does not say enough:

    ``text`` or ``token_ids``.
    """

    # tokenised, with the end-of-sequence token appended if no ``stop_reason`` is given
    text: str | None = None
    token_ids: Sequence[int] | None = None  # used as they are
    # overrides "stop", "length" or "abort", which follows from the reply
    stop_reason: str | None = None
    # one per token before truncation; by default the engine's, or none
    log_probs: Sequence[float] | None = None
    latency: float = 0.0  # seconds before the answer

    def __post_init__(self) -> None:
        if (self.text is None) == (self.token_ids is None):
            raise ValueError(f"a MockReply needs text or token_ids, and one of them only: {self}")


Reply = str | Sequence[int] | MockReply | Exception
ReplyFunction = Callable[
    [list[int], dict[str, Any]], Reply | Awaitable[Reply]
]  # of prompt ids and sampling params


class _MockCall(NamedTuple):
    """One call of ``generate``, for tests to inspect."""

    request_id: str
    prompt_ids: list[int]
    sampling_params: dict[str, Any]
    output: TokenOutput | None  # None where the reply was an exception


class MockSGLangEngine:
    """Answers ``LLMServerClient.generate`` from a script and remembers every call.

    Example::

        engine = MockSGLangEngine(["<note>...</note>", MockReply(text="...", stop_reason="length")],
        tokenizer) output = await engine.generate("game-1", prompt_ids=[1, 2],
        sampling_params={"max_tokens": 64}) assert output.stop_reason == "stop" and
        engine.calls[0].prompt_ids == [1, 2]

    A reply is a string (tokenised, end-of-sequence appended), a list of token ids (used as they
    are), a MockReply, or an exception, which ``generate`` raises. ``max_new_tokens`` or
    ``max_tokens`` in the sampling parameters truncates a reply, with stop reason "length". Calls
    get replies in the order in which ``generate`` is entered.
    """

    def __init__(
        self,
        replies: Iterable[Reply] | ReplyFunction,
        tokenizer: Any,  # with ``encode``, ``decode`` and ``eos_token_id``
        *,
        log_prob: float
        | None = -1.0,  # of every token of a reply that brings none; None: no log-probs
        global_steps: int = 0,  # weights version to report; may be assigned on the way
    ) -> None:
        if isinstance(replies, (str, MockReply)):
            raise TypeError(
                "replies must be a list, an iterator or a function; for one reply write "
                f"[{replies!r}]"
            )
        self._replies = replies if callable(replies) else iter(replies)
        self._tokenizer, self._log_prob = tokenizer, log_prob
        self.global_steps = global_steps
        self.calls: list[_MockCall] = []

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        **kwargs: Any,
    ) -> TokenOutput:
        """The next reply as verl's client would return it; an AssertionError if the script has none
        left.
        """
        prompt, params = _as_token_ids(prompt_ids, "prompt_ids"), deepcopy(dict(sampling_params))
        reply = await self._next_reply(prompt, params)
        failed = isinstance(reply, Exception)
        output = None if failed else self._output(reply, params)
        self.calls.append(_MockCall(request_id, prompt, params, output))
        await asyncio.sleep(0.0 if failed else reply.latency)
        if output is None:
            raise reply
        return output.model_copy(deep=True)

    async def _next_reply(self, prompt: list[int], params: dict[str, Any]) -> Any:
        if callable(self._replies):
            answer = self._replies(list(prompt), deepcopy(params))
            reply: object = await answer if inspect.isawaitable(answer) else answer
        else:
            try:
                reply = next(self._replies)
            except StopIteration:
                raise AssertionError(
                    f"MockSGLangEngine has no reply left: {len(self.calls)} calls were served, and "
                    "one more came with "
                    f"a prompt of {len(prompt)} tokens that ends in "
                    f"{self._tokenizer.decode(prompt[-80:])!r}"
                ) from None
        if isinstance(reply, (MockReply, Exception)):
            return reply
        if isinstance(reply, Sequence):
            return MockReply(text=reply) if isinstance(reply, str) else MockReply(token_ids=reply)
        raise TypeError(
            "a reply must be a str, a list of token ids, a MockReply or an exception, not "
            f"{reply!r}"
        )

    def _output(self, reply: MockReply, params: Mapping[str, Any]) -> TokenOutput:
        eos = self._tokenizer.eos_token_id
        if reply.text is None:
            ids = _as_token_ids(reply.token_ids, "token_ids of a reply")
        else:
            ids = list(self._tokenizer.encode(reply.text, add_special_tokens=False))
            ids += [eos] if eos is not None and reply.stop_reason is None else []
        log_probs = reply.log_probs
        if log_probs is None and self._log_prob is not None:
            log_probs = [self._log_prob] * len(ids)
        if log_probs is not None and len(log_probs) != len(ids):
            raise ValueError(f"{reply} has {len(log_probs)} log_probs for {len(ids)} tokens")
        # verl's SGLang server reads the names in this order and clamps at 0.
        budgets = [
            params[name]
            for name in ("max_new_tokens", "max_tokens")
            if params.get(name) is not None
        ]
        budget = max(0, int(budgets[0])) if budgets else len(ids) + 1
        spent = len(ids) > budget or (len(ids) == budget and ids[-1:] != [eos])
        return TokenOutput(
            token_ids=ids[:budget],
            log_probs=None if log_probs is None else list(log_probs[:budget]),
            stop_reason=reply.stop_reason or ("length" if spent else "stop"),
            extra_fields=dict.fromkeys(
                ("global_steps", "min_global_steps", "max_global_steps"), self.global_steps
            ),
        )


def _as_token_ids(value: object, what: str) -> list[int]:
    """A list of ints, as verl's servers take it; a tensor or a BatchEncoding is a caller's
    mistake."""
    token_ids = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else None
    if token_ids is None or not all(isinstance(token, int) for token in token_ids):
        raise TypeError(
            f"{what} must be a list of ints, not {type(value).__name__}: {value!r}"[:300]
        )
    return token_ids
