"""One trajectory, two private contexts: what the restart of positions is worth."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from real_runs import log_probs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from medserl_agentloop.backends.attention import (
    PACKED,
    Pack,
    attend_within_contexts,
    kernel_takes,
    packed_attention,
    varlen,
)
from medserl_agentloop.testing import tiny_model

FIRST, SECOND = 37, 53  # tokens of the two contexts


def model_with(attention: str) -> Any:
    """A tiny model that attends by SDPA, by Transformers' eager code, or by ours."""
    if attention == PACKED:
        return attend_within_contexts(tiny_model(512))
    return tiny_model(512, attention=attention)


def row_of(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and positions (T,) of sequences of these lengths, one after the other."""
    ids = torch.randint(
        0, 512, (sum(lengths),), generator=torch.Generator().manual_seed(sum(lengths))
    )
    return ids, torch.cat([torch.arange(length) for length in lengths])


@pytest.mark.parametrize("attention", ["sdpa", "eager", PACKED])
def test_packed_log_probs_equal_separate_forwards_only_with_the_restart(attention: str) -> None:
    model, (ids, restarted) = model_with(attention), row_of([FIRST, SECOND])
    alone = log_probs(model, ids[FIRST:], torch.arange(SECOND))

    packed = log_probs(model, ids, restarted)
    first = log_probs(model, ids[:FIRST], torch.arange(FIRST))
    assert (packed[FIRST:] - alone).abs().max() < 1e-5
    assert (packed[: FIRST - 1] - first).abs().max() < 1e-5

    leaking = log_probs(model, ids, torch.arange(FIRST + SECOND))
    assert (leaking[FIRST:] - alone).abs().max() > 0.1


@pytest.mark.parametrize("window", [None, 8])
def test_the_packed_attention_is_sdpa_with_a_window_and_with_padding(window: int | None) -> None:
    ids, positions = row_of([FIRST, SECOND])
    found = []
    for attention in ("sdpa", PACKED):
        model = model_with(attention)
        if window:
            changes = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
            changes["layer_types"] = ["full_attention", "sliding_attention"]
            config = type(model.config)(**model.config.to_dict() | changes)
            torch.manual_seed(0)
            model = type(model)(config).eval()
            config._attn_implementation = attention
        packed = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits
        padding = torch.ones(2, FIRST, dtype=torch.long)
        padding[0, :5] = 0
        rows = ids[: 2 * FIRST].reshape(2, FIRST)
        padded = model(input_ids=rows, attention_mask=padding).logits[:, 5:]
        written = model.generate(ids[None, :FIRST], max_new_tokens=5, do_sample=False)
        found.append((packed, padded, written))
    for of_sdpa, of_packed in zip(*found, strict=True):
        torch.testing.assert_close(of_sdpa, of_packed, atol=1e-5, rtol=1e-5)


def test_a_pack_has_no_mask_of_all_its_tokens_and_is_taken_apart_once() -> None:
    """Or time and memory would grow with the square of the pack, and each layer would wait for the
    GPU.
    """
    model, (ids, positions), longest = model_with(PACKED), row_of([FIRST, SECOND]), []
    forward = torch.nn.functional.scaled_dot_product_attention
    with pytest.MonkeyPatch.context() as patch:

        def seen(query: torch.Tensor, key: torch.Tensor, *args: Any, **options: Any):
            longest.append((query.shape[2], key.shape[2], options.get("attn_mask")))
            return forward(query, key, *args, **options)

        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
        patch.setattr(torch, "nonzero", nonzero := Mock(side_effect=torch.nonzero))
        log_probs(model, ids, positions)
    assert nonzero.call_count == 1
    assert longest == [(FIRST, FIRST, None), (SECOND, SECOND, None)] * 2


def test_a_checkpoint_does_not_need_this_package(tmp_path: Path) -> None:
    model_with(PACKED).save_pretrained(tmp_path)
    assert PACKED not in (tmp_path / "config.json").read_text(encoding="utf-8")


GROUPED = (8, 2)  # heads of queries, of keys and values
SCALE = 0.3


def states_of(
    lengths: list[int], size: int = 16, dtype: torch.dtype = torch.float64
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Queries, keys and values (1, H, T, D) with gradients, and positions (1, T)."""
    draws = torch.Generator().manual_seed(0)
    states = [
        torch.randn(1, heads, sum(lengths), size, generator=draws, dtype=dtype).requires_grad_()
        for heads in (GROUPED[0], GROUPED[1], GROUPED[1])
    ]
    return states, row_of(lengths)[1][None]


def by_one_mask(states: list[torch.Tensor], lengths: list[int], window: int | None) -> torch.Tensor:
    """SDPA over the whole pack behind one mask, with heads repeated: the definition."""
    of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    before = torch.arange(len(of))[:, None] - torch.arange(len(of))
    mask = (of[:, None] == of) & (before >= 0) & (before < (window or len(of)))
    query, key, value = states
    key, value = (s.repeat_interleave(GROUPED[0] // GROUPED[1], dim=1) for s in (key, value))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, key, value, attn_mask=mask, scale=SCALE).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 1, 8])
@pytest.mark.parametrize("lengths", [[21], [8, 9, 1, 1, 30]])
def test_a_pack_is_sdpa_with_one_mask_in_float64_gradients_too(
    lengths: list[int], window: int | None
) -> None:
    states, positions = states_of(lengths)
    module = torch.nn.Module()
    module.num_key_value_groups = GROUPED[0] // GROUPED[1]
    found, _ = packed_attention(module, *states, None, positions, window, scaling=SCALE)
    defined = by_one_mask(states, lengths, window)
    torch.testing.assert_close(found, defined, atol=1e-12, rtol=1e-12)
    weighed = torch.randn_like(defined)
    gradients = [torch.autograd.grad(output, states, weighed) for output in (found, defined)]
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("window", "expected", "causal"), [(None, [-1, 0], True), (8, [7, 0], False)]
)
def test_on_a_gpu_a_pack_is_one_differentiable_call_of_pytorchs_kernel(
    window: int | None, expected: list[int], causal: bool
) -> None:
    """On fake tensors of the CPU: shapes, arguments and gradients of the kernel's own operator."""
    calls: list[tuple[Any, ...]] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if "_varlen_attn" in str(func):
                calls.append((str(func), *args))
            return func(*args, **kwargs or {})

    with FakeTensorMode(allow_non_fake_inputs=True), Seen():
        states = [
            torch.empty(1, heads, 51, 128, dtype=torch.bfloat16).requires_grad_()
            for heads in (GROUPED[0], GROUPED[1], GROUPED[1])
        ]
        starts = torch.empty(4, dtype=torch.int32)
        output = varlen(*states, Pack([1, 30, 20], starts), window, SCALE)
        gradients = torch.autograd.grad(output.sum(), states)
    assert output.shape == (1, 51, GROUPED[0], 128)
    assert [gradient.shape for gradient in gradients] == [s.shape for s in states]
    forward, backward = calls
    assert [s.shape for s in forward[1:4]] == [(51, heads, 128) for heads in (8, 2, 2)]
    assert forward[4] is starts and forward[5] is starts and forward[6:8] == (30, 30)
    assert forward[8:11] == (causal, SCALE, expected) and "backward" in backward[0]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": torch.float32}, "float32"),
        ({"size": 12}, "12 numbers"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "causal"),
    ],
)
def test_what_the_kernel_does_not_take_goes_one_context_at_a_time_and_says_why(
    change: dict[str, Any], why: str
) -> None:
    given = {"size": 16, "dtype": torch.bfloat16, "dropout": 0.0, "is_causal": True} | change
    states, _ = states_of([3], given.pop("size"), given.pop("dtype"))
    with pytest.warns(UserWarning, match=why):
        assert not kernel_takes(torch.nn.Module(), states[0], states[2], given)


@pytest.mark.parametrize("lengths", [[9], [1, 40, 7], [5] * 6])
def test_packed_sequences_and_weights_get_what_they_get_alone(lengths: list[int]) -> None:
    model, (ids, positions) = model_with(PACKED), row_of(lengths)
    packed = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
    weighed = torch.linspace(0, 1, 512)
    torch.autograd.backward((packed.log_softmax(-1) @ weighed).sum())
    gradient = model.model.embed_tokens.weight.grad
    model.zero_grad()
    for row, own in zip(packed.split(lengths), ids.split(lengths), strict=True):
        logits = model(input_ids=own[None], use_cache=False).logits[0]
        torch.testing.assert_close(row, logits, atol=1e-5, rtol=1e-5)
        torch.autograd.backward((logits.log_softmax(-1) @ weighed).sum())
    alone = model.model.embed_tokens.weight.grad
    assert (gradient - alone).norm() < 1e-4 * alone.norm()


def test_recomputation_and_adapters_change_nothing() -> None:
    """Gradients of a LoRA adapter over a pack, with recomputed activations or without."""
    ids, positions = row_of([FIRST, SECOND])
    found = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        model = model_with(PACKED)
        if recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", r=4)).train()
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(1))
        logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits
        logits.log_softmax(-1)[..., 0].sum().backward()
        found.append([w.grad for _, w in model.named_parameters() if w.requires_grad])
    torch.testing.assert_close(*found)
    assert sum(float(gradient.abs().sum()) for gradient in found[0]) > 0
