"""Small real things for tests, and one fake: a tokenizer, a random model, a composed run, and an
engine that plays back scripted replies. No network.

Users' tests of their own games may import them.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from verl.workers.rollout.replica import TokenOutput

from medserl_agentloop.core.run_check import compose_run as compose_run

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tiny_tokenizer(
    template: str = CHATML, special: Sequence[str] = SPECIAL
) -> PreTrainedTokenizerFast:
    """Make a byte-level tokenizer; the last special token ends a turn, and the first pads.

    ``<think>`` is an added token that is not special, as Qwen3's.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    backend.add_tokens([AddedToken(tag, normalized=False) for tag in ("<think>", "</think>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=special[-1], pad_token=special[0]
    )
    tokenizer.chat_template = template
    return tokenizer


def tiny_model(vocab_size: int, *, seed: int = 0, attention: str = "sdpa") -> Qwen3ForCausalLM:
    """Make a random Qwen3 of about 100,000 parameters in fp32, in evaluation mode."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=8192,
        initializer_range=0.2,  # large enough that a wrong context shows in the log-probs
        attn_implementation=attention,
    )
    return Qwen3ForCausalLM(config).float().eval()


def build_agent_loop(engine: Any, tokenizer: Any, config: DictConfig) -> Any:
    """Build the self-play agent loop as verl's worker does, on ``engine`` as its server client."""
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap
    from verl.utils.dataset.rl_dataset import RLHFDataset

    from medserl_agentloop.core.agent_loop import SelfPlayAgentLoop

    return SelfPlayAgentLoop(
        trainer_config=DictConfigWrap(config),
        data_config=DictConfigWrap(config.data),
        server_manager=engine,
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=RLHFDataset,
    )


@dataclass(frozen=True)
class MockReply:
    """One reply, if a string or list of token ids is not enough."""

    text: str = ""
    token_ids: Sequence[int] | None = None  # used as they are, in place of ``text``
    stop_reason: str | None = None  # by default "stop", or "length" if the budget is spent
    log_probs: Sequence[float] | None = None  # one per token before truncation
    latency: float = 0.0  # seconds before the answer


Reply = str | Sequence[int] | MockReply | Exception
ReplyFunction = Callable[[list[int], dict[str, Any]], Reply | Awaitable[Reply]]


class MockCall(NamedTuple):
    """One call of ``generate``."""

    request_id: str
    prompt_ids: list[int]
    sampling_params: dict[str, Any]
    output: TokenOutput | None  # None where the reply was an exception


class MockSGLangEngine:
    """Answers ``LLMServerClient.generate`` from a script and remembers every call.

    Example::

        engine = MockSGLangEngine(["whole", MockReply("cut", stop_reason="length")], tokenizer)
        output = await engine.generate("game", prompt_ids=[1], sampling_params={"max_tokens": 64})
        assert output.stop_reason == "stop" and engine.calls[0].prompt_ids == [1]

    ``replies`` come in the order of the calls, or from a function of prompt ids and parameters,
    which may be async. A reply is a string (tokenized, end-of-sequence appended), a list of token
    ids, a :class:`MockReply`, or an exception to raise. ``max_tokens`` truncates it.
    """

    def __init__(
        self,
        replies: Iterable[Reply] | ReplyFunction,
        tokenizer: Any,
        *,
        log_prob: float | None = -1.0,  # of each token of a reply without them
    ) -> None:
        self._replies = replies if callable(replies) else iter(replies)
        self._tokenizer, self._log_prob = tokenizer, log_prob
        self.calls: list[MockCall] = []

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        **kwargs: Any,
    ) -> TokenOutput:
        """Return the next reply as verl's client would; AssertionError if there is none left."""
        if not (isinstance(prompt_ids, list) and all(type(token) is int for token in prompt_ids)):
            raise TypeError(f"prompt_ids must be a list of ints: {prompt_ids!r:.200}")
        prompt, params = list(prompt_ids), deepcopy(dict(sampling_params))
        reply = await self._next_reply(prompt, params)
        if isinstance(reply, Exception):
            self.calls.append(MockCall(request_id, prompt, params, None))
            raise reply
        if not isinstance(reply, MockReply):
            reply = MockReply(reply) if isinstance(reply, str) else MockReply(token_ids=reply)
        output = self._output(reply, params)
        self.calls.append(MockCall(request_id, prompt, params, output))
        await asyncio.sleep(reply.latency)
        return output.model_copy(deep=True)

    async def _next_reply(self, prompt: list[int], params: dict[str, Any]) -> Reply:
        if callable(self._replies):
            reply = self._replies(list(prompt), deepcopy(params))
            return await reply if inspect.isawaitable(reply) else reply
        if (scripted := next(self._replies, None)) is None:
            ending = self._tokenizer.decode(prompt[-80:])
            raise AssertionError(f"no reply left after {len(self.calls)} calls, for ...{ending!r}")
        return scripted

    def _output(self, reply: MockReply, params: Mapping[str, Any]) -> TokenOutput:
        eos, ids = self._tokenizer.eos_token_id, list(reply.token_ids or ())
        if reply.token_ids is None:
            ids = list(self._tokenizer.encode(reply.text, add_special_tokens=False))
            ids += [eos] if reply.stop_reason is None else []
        log_probs = reply.log_probs
        if log_probs is None and self._log_prob is not None:
            log_probs = [self._log_prob] * len(ids)
        if log_probs is not None and len(log_probs) != len(ids):
            raise ValueError(f"{reply} has {len(log_probs)} log_probs for {len(ids)} tokens")
        budget = params.get("max_new_tokens", params.get("max_tokens", len(ids) + 1))
        spent = len(ids) > budget or (len(ids) == budget and ids[-1:] != [eos])
        return TokenOutput(
            token_ids=ids[:budget],
            log_probs=None if log_probs is None else list(log_probs[:budget]),
            stop_reason=reply.stop_reason or ("length" if spent else "stop"),
            extra_fields=dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), 0),
        )
