"""Sampling on the CPU: what is drawn, the log-probs reported, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from backends.forward import PROMPTS, forward_log_probs

from medserl_agentloop.backends.cpu_sampling import (
    LayerWithRoom,
    SamplingRequest,
    SamplingSettings,
    processed_log_probs,
    sample_batch,
)

NO_EOS: frozenset[int] = frozenset()
BUDGETS = [4, 17, 1, 9, 30]  # rows leave the batch at different steps


def requests(
    prompts: Sequence[Sequence[int]] = PROMPTS, budgets: Sequence[int] = BUDGETS, seed: int = 0
) -> list[SamplingRequest]:
    return [
        SamplingRequest(prompt, budget, torch.Generator().manual_seed(seed + i))
        for i, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True))
    ]


@pytest.mark.parametrize("room", [1, 7, LayerWithRoom.ROOM])
def test_greedy_sampling_equals_transformers_generate(model: Any, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerWithRoom, "ROOM", room)
    settings = SamplingSettings(temperature=0)
    done = sample_batch(model, requests(), settings, eos_token_ids=NO_EOS)
    for prompt, budget, completion in zip(PROMPTS, BUDGETS, done, strict=True):
        ids = torch.tensor([prompt])
        free: dict[str, Any] = {"do_sample": False, "max_new_tokens": budget, "eos_token_id": None}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **free)
        assert completion.token_ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}, {"temperature": 0}], ids=str)
def test_log_probs_equal_a_plain_forward(model: Any, params: dict[str, Any]) -> None:
    settings = SamplingSettings(**params)
    done = sample_batch(model, requests(), settings, eos_token_ids=NO_EOS)
    for prompt, budget, completion in zip(PROMPTS, BUDGETS, done, strict=True):
        assert len(completion.token_ids) == len(completion.log_probs) == budget
        expected = forward_log_probs(model, prompt, completion, settings)
        assert completion.log_probs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"top_k": 2}, [0.625, 0.375, 0.0, 0.0]),
        ({"top_p": 0.7}, [0.625, 0.375, 0.0, 0.0]),
        ({"top_p": 0.01}, [1.0, 0.0, 0.0, 0.0]),
        ({"temperature": 0, "top_k": 1}, [0.5, 0.3, 0.15, 0.05]),  # greedy: those of the raw logits
    ],
)
def test_top_k_and_top_p_keep_the_smallest_sufficient_set(settings: dict[str, Any], expected: list[float]) -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    torch.testing.assert_close(
        processed_log_probs(logits, SamplingSettings(**settings)).exp(), torch.tensor([expected])
    )


def test_tokens_are_drawn_with_the_reported_probabilities(model: Any) -> None:
    settings = SamplingSettings(temperature=0.7, top_k=3)
    n = 2000
    done = sample_batch(model, requests([[5, 6, 7]] * n, [1] * n), settings, eos_token_ids=NO_EOS)
    drawn = torch.tensor([completion.token_ids[0] for completion in done])
    reported = {c.token_ids[0]: c.log_probs[0] for c in done}
    assert len(reported) == 3
    for token, log_prob in reported.items():
        frequency = (drawn == token).float().mean().item()
        assert frequency == pytest.approx(torch.tensor(log_prob).exp().item(), abs=0.05)


def test_a_completion_ends_at_eos_and_not_before(model: Any) -> None:
    free = sample_batch(model, requests(), SamplingSettings(temperature=0), eos_token_ids=NO_EOS)
    eos = free[4].token_ids[5]
    done = sample_batch(model, requests(), SamplingSettings(temperature=0), eos_token_ids=frozenset([eos]))
    for unbounded, completion in zip(free, done, strict=True):
        if eos in unbounded.token_ids:
            end = unbounded.token_ids.index(eos) + 1
            assert completion.token_ids == unbounded.token_ids[:end]
            assert completion.stop_reason == "completed"
        else:
            assert completion.token_ids == unbounded.token_ids
            assert completion.stop_reason == "length"
    ignoring = SamplingSettings(temperature=0, ignore_eos=True)
    unstopped = sample_batch(model, requests(), ignoring, eos_token_ids=frozenset([eos]))
    assert [c.token_ids for c in unstopped] == [c.token_ids for c in free]


@pytest.mark.parametrize("by_token", [True, False])
def test_a_completion_ends_where_its_turn_says_stop(model: Any, by_token: bool) -> None:
    """Each token is decoded as its number in brackets, so that a stop string may span tokens."""
    free = sample_batch(model, requests(), SamplingSettings(temperature=0), eos_token_ids=NO_EOS)
    at = 5
    token, before = free[4].token_ids[at], free[4].token_ids[at - 1]
    params = {"stop_token_ids": [token]} if by_token else {"stop": f"[{before}][{token}]"}
    settings = SamplingSettings.from_params({"temperature": 0, **params})
    done = sample_batch(
        model, requests(), settings, eos_token_ids=NO_EOS, decode=lambda ids: "".join(f"[{i}]" for i in ids)
    )
    ids = free[4].token_ids
    end = next(i for i, t in enumerate(ids) if t == token and (by_token or ids[i - 1 : i] == [before]))
    assert done[4].token_ids == ids[: end + 1]
    assert done[4].stop_reason == "completed"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
        ({"min_new_tokens": 4}, "min_new_tokens=4"),
    ],
)
def test_sampling_parameters_that_cannot_be_honoured_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingSettings.from_params(params)


def test_the_parameters_that_verl_sends_are_accepted() -> None:
    # agent_loop.py, generate_sequences
    params = {"temperature": 0.6, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    assert SamplingSettings.from_params(params) == SamplingSettings(temperature=0.6, top_p=0.9)
