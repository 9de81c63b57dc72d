"""Batched sampling with log-probs on a Transformers model, without Ray or verl.

For the rollout server of a run on the CPU, and for players that are folders.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

GATHER_S = 0.01  # that the first request of a batch waits for others sent at the same time

# Parameters that verl sends and this engine lacks, with the values that change nothing.
_NEUTRAL_VALUES = {"repetition_penalty": (1.0,), "logprobs": (True, False, 0, 1)}


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling settings of a request. Requests with equal settings share a batch."""

    adapter: str | None = None  # name of the LoRA adapter that answers; None for the base model
    temperature: float = 1.0  # 0 means greedy
    top_k: int = -1  # -1 or 0 means all tokens
    top_p: float = 1.0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()  # end a completion, as the model's own end of sequence
    stop: tuple[str, ...] = ()  # also end it, and stay in it, with the token that completes them

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> SamplingSettings:
        """Read verl's sampling parameters; ValueError if one cannot be honored."""
        given = {
            name: value
            for name, value in params.items()
            if value is not None and value not in _NEUTRAL_VALUES.get(name, ())
        }
        if unknown := given.keys() - cls.__dataclass_fields__.keys():
            raise ValueError(
                f"rollout cpu_hf cannot honor the sampling parameters {sorted(unknown)}; it knows "
                f"max_tokens, max_new_tokens and {', '.join(cls.__dataclass_fields__)}"
            )
        if isinstance(given.get("stop"), str):
            given["stop"] = [given["stop"]]
        lists = ("stop", "stop_token_ids")
        return cls(**given | {name: tuple(given[name]) for name in lists if name in given})


@dataclass(frozen=True)
class SamplingRequest:
    """One prompt with its own budget and its own random numbers."""

    prompt_ids: Sequence[int]
    max_tokens: int
    generator: torch.Generator


@dataclass
class Completion:
    """Sampled tokens, with log-probs of the distribution from which they were drawn."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    stop_reason: str = "length"  # or "completed"


_Asked = tuple[SamplingSettings, SamplingRequest, "asyncio.Future[Completion]"]


class Sampler:
    """Samples with one model, in batches of at most ``most`` requests with equal settings.

    A batch blocks the event loop, so weights cannot change during a completion. ``model`` is a
    Transformers model, or a ``PeftModel`` whose adapters requests may name.
    """

    def __init__(
        self, model: Any, tokenizer: Any, eos_token_ids: frozenset[int], most: int = 64
    ) -> None:
        self.model, self.eos_token_ids, self.most = model, eos_token_ids, most
        self._tokenizer = tokenizer
        self._waiting: list[_Asked] = []
        self._serving: asyncio.Task[None] | None = None

    async def sample(self, request: SamplingRequest, settings: SamplingSettings) -> Completion:
        """Sample a completion, batched with concurrent requests."""
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((settings, request, answer))
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        return await answer

    async def _serve(self) -> None:
        while self._waiting:
            await asyncio.sleep(GATHER_S)
            settings = self._waiting[0][0]
            same = [each for each in self._waiting if each[0] == settings]
            # The shortest prompts first: a batch is padded to its longest one.
            batch = sorted(same, key=lambda each: len(each[1].prompt_ids))[: self.most]
            requests, answers = [each[1] for each in batch], [each[2] for each in batch]
            self._waiting = [each for each in self._waiting if each[2] not in answers]
            try:
                completions = self._sample(requests, settings)
            except Exception as error:
                for answer in answers:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for answer, completion in zip(answers, completions, strict=True):
                if not answer.done():  # a caller may have given up
                    answer.set_result(completion)

    def _sample(
        self, requests: Sequence[SamplingRequest], settings: SamplingSettings
    ) -> list[Completion]:
        adapters = getattr(self.model, "peft_config", {})
        if settings.adapter is not None:
            if settings.adapter not in adapters:
                raise ValueError(f"no adapter {settings.adapter} is loaded, only {[*adapters]}")
            self.model.set_adapter(settings.adapter)
        with_base = adapters and settings.adapter is None
        with self.model.disable_adapter() if with_base else nullcontext():
            ends, tokenizer = self.eos_token_ids, self._tokenizer
            return sample_batch(
                self.model, requests, settings, eos_token_ids=ends, tokenizer=tokenizer
            )


class LayerWithRoom(DynamicLayer):  # type: ignore[misc]
    """A layer's keys and values with room for new tokens.

    Transformers' own cache copies everything for each token.
    """

    ROOM = 128  # tokens added per sequence when no room is left
    room: tuple[torch.Tensor, torch.Tensor]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the states of new tokens, (B, H, new, D) each; return those of all, (B, H, T, D)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.room = key_states[:, :, :0], value_states[:, :, :0]
        start, end = self.get_seq_length(), self.get_seq_length() + key_states.shape[-2]
        missing = end - self.room[0].shape[-2]
        if missing > 0:
            keys, values = (pad(room, (0, 0, 0, missing + self.ROOM)) for room in self.room)
            self.room = keys, values
        for room, new in zip(self.room, (key_states, value_states), strict=True):
            room[:, :, start:end] = new
        self.keys, self.values = (room[:, :, :end] for room in self.room)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        length = self.get_seq_length()
        self.room = self.room[0][indices], self.room[1][indices]
        self.keys, self.values = (room[:, :, :length] for room in self.room)


@torch.inference_mode()
def sample_batch(
    model: Any,
    requests: Sequence[SamplingRequest],
    settings: SamplingSettings,
    *,
    eos_token_ids: frozenset[int],
    tokenizer: Any = None,
) -> list[Completion]:
    """Sample one completion per request; finished rows leave the batch."""
    completions = [Completion() for _ in requests]
    running = list(range(len(requests)))  # running[b] is the request that batch row b works on
    prompts = [torch.tensor(request.prompt_ids) for request in requests]
    input_ids = pad_sequence(prompts, batch_first=True, padding_side="left")
    ones = [torch.ones_like(prompt) for prompt in prompts]
    mask = pad_sequence(ones, batch_first=True, padding_side="left")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    cache.layers = [
        LayerWithRoom() if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    while True:
        inputs = {"input_ids": input_ids, "attention_mask": mask, "position_ids": positions}
        output = model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits = output.logits[:, -1].float()
        if tokenizer is not None:
            logits[:, _unknown_ids(tokenizer, logits.shape[-1])] = -torch.inf
        log_probs = processed_log_probs(logits, settings)  # (B, V)
        if settings.temperature == 0:
            next_ids = log_probs.argmax(-1)
        else:
            rows = zip(log_probs.exp(), running, strict=True)
            next_ids = torch.cat(
                [torch.multinomial(p, 1, generator=requests[r].generator) for p, r in rows]
            )
        next_log_probs = log_probs.gather(1, next_ids[:, None])[:, 0]

        unfinished = []
        drawn = zip(running, next_ids.tolist(), next_log_probs.tolist(), strict=True)
        for row, (request, token, log_prob) in enumerate(drawn):
            completion = completions[request]
            completion.token_ids.append(token)
            completion.log_probs.append(log_prob)
            ended = token in eos_token_ids and not settings.ignore_eos
            stopped = token in settings.stop_token_ids
            if ended or stopped or _says_stop(completion.token_ids, settings, tokenizer):
                completion.stop_reason = "completed"
            elif len(completion.token_ids) < requests[request].max_tokens:
                unfinished.append(row)
        if not unfinished:
            return completions
        if len(unfinished) < len(running):
            keep = torch.tensor(unfinished)
            cache.batch_select_indices(keep)
            next_ids, mask, positions = next_ids[keep], mask[keep], positions[keep]
            running = [running[row] for row in unfinished]
        input_ids = next_ids[:, None]
        mask = torch.cat([mask, mask.new_ones(len(running), 1)], dim=1)
        positions = positions[:, -1:] + 1


@lru_cache(maxsize=4)
def _unknown_ids(tokenizer: Any, size: int) -> list[int]:
    """Ids without a token: many vocabularies are padded to a round number."""
    return sorted(set(range(size)).difference(tokenizer.get_vocab().values()))


def _says_stop(token_ids: list[int], settings: SamplingSettings, tokenizer: Any) -> bool:
    if not settings.stop:
        return False
    # A character has at most four bytes and a token at least one.
    tail = tokenizer.decode(token_ids[-4 * max(map(len, settings.stop)) :])
    return any(string in tail for string in settings.stop)


def processed_log_probs(logits: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """Log-probs (B, V) after temperature, top-k and top-p; greedy ones use the raw logits."""
    if settings.temperature == 0:
        return logits.log_softmax(-1)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(settings.temperature))])
    if settings.top_k > 0:
        warpers.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        warpers.append(TopPLogitsWarper(settings.top_p))
    processed: torch.Tensor = warpers(None, logits)
    return processed.log_softmax(-1)
