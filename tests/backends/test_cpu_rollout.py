"""The CPU engine: what is drawn, its log-probs, and the server's budgets and pushes of weights."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import TokenOutput

from medserl_agentloop.backends import cpu_sampling
from medserl_agentloop.backends.cpu_rollout import CpuRolloutReplica, CpuRolloutServer
from medserl_agentloop.backends.cpu_sampling import (
    Completion,
    LayerWithRoom,
    SamplingRequest,
    SamplingSettings,
    processed_log_probs,
    sample_batch,
)
from medserl_agentloop.testing import tiny_model, tiny_tokenizer

PROMPTS = [[5, 6, 7], [8], [20, 21, 22, 23, 24, 25, 26], [30, 31], [9, 9, 9, 9]]


@torch.no_grad()
def forward_log_probs(
    model: Any, prompt: Sequence[int], completion: Completion, settings: SamplingSettings
) -> list[float]:
    """Log-probs of the completion by one plain forward: no cache, no padding."""
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen = torch.tensor(completion.token_ids)[:, None]
    return processed_log_probs(logits, settings).gather(1, chosen)[:, 0].tolist()


# --- sampling ---


NO_EOS: frozenset[int] = frozenset()
BUDGETS = [4, 17, 1, 9, 30]  # rows leave the batch at different steps


def requests(
    prompts: Sequence[Sequence[int]] = PROMPTS, budgets: Sequence[int] = BUDGETS, seed: int = 0
) -> list[SamplingRequest]:
    return [
        SamplingRequest(prompt, budget, torch.Generator().manual_seed(seed + i))
        for i, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True))
    ]


@pytest.mark.parametrize("room", [1, LayerWithRoom.ROOM])
def test_greedy_sampling_equals_transformers_generate(
    model: Any, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LayerWithRoom, "ROOM", room)
    settings = SamplingSettings(temperature=0)
    done = sample_batch(model, requests(), settings, eos_token_ids=NO_EOS)
    for prompt, budget, completion in zip(PROMPTS, BUDGETS, done, strict=True):
        ids = torch.tensor([prompt])
        free: dict[str, Any] = {"do_sample": False, "max_new_tokens": budget, "eos_token_id": None}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **free)
        assert completion.token_ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}, {"temperature": 0}], ids=str
)
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
def test_top_k_and_top_p_keep_the_smallest_sufficient_set(
    settings: dict[str, Any], expected: list[float]
) -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    found = processed_log_probs(logits, SamplingSettings(**settings)).exp()
    torch.testing.assert_close(found, torch.tensor([expected]))


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
    greedy = SamplingSettings(temperature=0)
    free = sample_batch(model, requests(), greedy, eos_token_ids=NO_EOS)
    eos = free[4].token_ids[5]
    done = sample_batch(model, requests(), greedy, eos_token_ids=frozenset([eos]))
    for unbounded, completion in zip(free, done, strict=True):
        ids, ends = unbounded.token_ids, eos in unbounded.token_ids
        assert completion.token_ids == (ids[: ids.index(eos) + 1] if ends else ids)
        assert completion.stop_reason == ("completed" if ends else "length")
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
    tokenizer: Any = tiny_tokenizer()
    tokenizer.decode = lambda ids: "".join(f"[{i}]" for i in ids)
    done = sample_batch(model, requests(), settings, eos_token_ids=NO_EOS, tokenizer=tokenizer)
    ids, ended = free[4].token_ids, [token] if by_token else [before, token]
    end = next(i for i in range(1, len(ids)) if ids[i - len(ended) : i] == ended)
    assert done[4].token_ids == ids[:end]
    assert done[4].stop_reason == "completed"


def test_ids_that_the_tokenizer_lacks_are_never_drawn() -> None:
    tokenizer: Any = tiny_tokenizer()
    known = {number for number in tokenizer.get_vocab().values() if number != 50}
    tokenizer.get_vocab = lambda: {str(number): number for number in known}
    settings, padded = SamplingSettings(temperature=1.5), tiny_model(4 * len(tokenizer))
    for given, within in ((None, False), (tokenizer, True)):
        done = sample_batch(padded, requests(), settings, eos_token_ids=NO_EOS, tokenizer=given)
        assert all(set(completion.token_ids) <= known for completion in done) is within
        assert all(number > -100 for completion in done for number in completion.log_probs)


def test_sampling_settings_refuse_what_cannot_be_honored() -> None:
    verls = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.0, "logprobs": True}
    assert SamplingSettings.from_params(verls) == SamplingSettings(temperature=0.6, top_p=0.9)
    for name, value in (("repetition_penalty", 1.2), ("min_new_tokens", 4)):
        with pytest.raises(ValueError, match=name):
            SamplingSettings.from_params(verls | {name: value})


# --- the server ---


def make_server(
    model_path: Path, model: Any = None, *, steps: int | None = 3, **config: Any
) -> CpuRolloutServer:
    """A server outside Ray, with weights pushed if a model is given."""
    settings = {"prompt_length": 16, "response_length": 24, "max_model_len": 128, **config}
    server = CpuRolloutServer(
        RolloutConfig(name="cpu_hf", dtype="float32", **settings),
        HFModelConfig(path=str(model_path), override_config={"attn_implementation": "sdpa"}),
    )
    if model is not None:
        asyncio.run(server.update_weights(model.state_dict(), steps))
    return server


def ask(server: CpuRolloutServer, *calls: Any, names: str = "abcdefgh") -> list[Any]:
    """Send the calls at the same time, by these names; an error takes the place of its answer."""

    async def all_calls() -> list[Any]:
        asked = (server.generate(*call, name) for call, name in zip(calls, names, strict=False))
        return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(all_calls())


FILES = ("config.json", "generation_config.json", "tokenizer_config.json")


@pytest.mark.parametrize("file", FILES)
def test_server_ends_a_turn_at_any_end_id_of_the_model_files(file: str, model_path: Path) -> None:
    """verl puts the tokenizer's into the config that it passes on."""
    folder = shutil.copytree(model_path, model_path.with_name(file))
    for name in FILES:
        settings = json.loads((folder / name).read_text())
        settings["eos_token_id"] = [5, 6] if name == file else None
        if name == FILES[-1]:
            settings["eos_token"] = "<|im_start|>"
        (folder / name).write_text(json.dumps(settings))
    expected = {1} if file == FILES[-1] else {1, 5, 6}
    assert make_server(folder).sampler.eos_token_ids == expected


@pytest.mark.parametrize(
    ("prompt", "params", "tokens"),
    [([5] * 18, {}, 24), ([5] * 100, {"max_new_tokens": 28}, 28)],  # the default, and all there is
)
def test_server_spends_budgets_that_fit_and_tells_the_step_of_its_weights(
    model_path: Path, model: Any, prompt: list[int], params: dict[str, Any], tokens: int
) -> None:
    server = make_server(model_path, model, steps=3)
    (output,) = ask(server, (prompt, {**params, "ignore_eos": True}))
    assert isinstance(output, TokenOutput) and len(output.token_ids) == tokens
    assert output.extra_fields == {"global_steps": 3, "min_global_steps": 3, "max_global_steps": 3}
    assert output.log_probs is not None
    completion = Completion(output.token_ids, output.log_probs)
    expected = forward_log_probs(model, prompt, completion, SamplingSettings())
    assert output.log_probs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("prompt_length", "params"),
    [(5, {"max_tokens": 0}), (110, {}), (0, {"max_tokens": 4}), (100, {"max_tokens": 29})],
)
def test_a_request_that_cannot_be_served_is_refused(
    model_path: Path, model: Any, prompt_length: int, params: dict[str, Any]
) -> None:
    prompt = [5] * prompt_length
    (error,) = ask(make_server(model_path, model), (prompt, params))
    assert isinstance(error, ValueError) and f" {prompt_length} prompt tokens" in str(error)
    (error,) = ask(make_server(model_path), ([5], {"max_tokens": 4}))
    assert isinstance(error, RuntimeError) and "no weights yet" in str(error)
    (error,) = ask(make_server(model_path, model), ([5], {"max_tokens": 4, "adapter": "x"}))
    assert isinstance(error, ValueError) and "adapter x" in str(error)


def test_a_push_that_does_not_fit_is_refused_by_name(model_path: Path, model: Any) -> None:
    server, state = make_server(model_path, model), dict(model.state_dict())
    norm = state.pop("model.norm.weight")
    for changed in ({}, {"stray": norm}, {"model.norm.weight": norm[:1]}):
        named = next(iter(changed), "model.norm.weight")
        with pytest.raises(RuntimeError, match=named):
            asyncio.run(server.update_weights(state | changed, 4))
    assert server.global_steps == 3


def test_a_sampling_error_reaches_every_request(
    model_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError("probabilities contain nan")

    monkeypatch.setattr(cpu_sampling, "sample_batch", broken)
    server = make_server(model_path, model)
    outputs = ask(server, *[([5], {"max_tokens": 2})] * 3)
    assert [type(output) for output in outputs] == [ArithmeticError] * 3


def test_draws_follow_seed_step_name_and_prompt_and_not_order_or_batch(
    model_path: Path, model: Any
) -> None:
    prompts = {"a": PROMPTS[0], "b": PROMPTS[1], "c": PROMPTS[0]}

    def answers(order: str = "aabc", **config: Any) -> list[tuple[str, list[int]]]:
        calls = [(prompts[name], {"max_tokens": 12, "ignore_eos": True}) for name in order]
        outputs = ask(make_server(model_path, model, **{"seed": 1, **config}), *calls, names=order)
        return sorted((name, output.token_ids) for name, output in zip(order, outputs, strict=True))

    assert answers() == answers("bcaa") == answers("caba")
    assert answers(seed=2) != answers() != answers(steps=4)
    assert len({tuple(tokens) for _, tokens in answers()}) == 4


def test_a_replica_of_several_processes_is_refused() -> None:
    config = RolloutConfig(name="cpu_hf", tensor_model_parallel_size=2)
    with pytest.raises(ValueError, match="tensor_model_parallel_size"):
        CpuRolloutReplica(replica_rank=0, config=config, model_config=None, gpus_per_node=2)
