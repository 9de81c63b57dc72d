"""One trajectory, two private contexts: what the restart of positions is worth."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from real_runs import log_probs

from medserl_agentloop.backends import engines
from medserl_agentloop.testing.tiny import tiny_model

FIRST, SECOND = 37, 53  # tokens of the two contexts


def model_with(attention: str) -> Any:
    """A tiny model that attends by SDPA, by Transformers' eager code, or by ours."""
    if attention == engines.PACKED:
        return engines.instead_of_sdpa(tiny_model(512))
    return tiny_model(512, attention=attention)


def row_of(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and positions (T,) of sequences of these lengths, one after the other."""
    ids = torch.randint(
        0, 512, (sum(lengths),), generator=torch.Generator().manual_seed(sum(lengths))
    )
    return ids, torch.cat([torch.arange(length) for length in lengths])


@pytest.mark.parametrize("attention", ["sdpa", "eager", engines.PACKED])
def test_packed_log_probs_equal_separate_forwards_only_with_the_restart(attention: str) -> None:
    model, (ids, restarted) = model_with(attention), row_of([FIRST, SECOND])
    alone = log_probs(model, ids[FIRST:], torch.arange(SECOND))

    packed = log_probs(model, ids, restarted)
    assert (packed[FIRST:] - alone).abs().max() < 1e-5
    assert (
        packed[: FIRST - 1] - log_probs(model, ids[:FIRST], torch.arange(FIRST))
    ).abs().max() < 1e-5

    leaking = log_probs(model, ids, torch.arange(FIRST + SECOND))
    assert (leaking[FIRST:] - alone).abs().max() > 0.1


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_packed_sequences_and_weights_get_what_they_get_alone(lengths: list[int]) -> None:
    model, (ids, positions) = model_with(engines.PACKED), row_of(lengths)
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


@pytest.mark.parametrize("window", [None, 8])
def test_the_packed_attention_is_sdpa_with_a_window_and_with_padding(window: int | None) -> None:
    ids, positions = row_of([FIRST, SECOND])
    found = []
    for attention in ("sdpa", engines.PACKED):
        model = model_with(attention)
        if window:
            changes = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
            changes |= {
                "layer_types": ["full_attention", "sliding_attention"],
                "attn_implementation": attention,
            }
            config = type(model.config)(**model.config.to_dict() | changes)
            torch.manual_seed(0)
            model = type(model)(config).eval()
            config._attn_implementation = attention
        packed = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits
        padding = torch.ones(2, FIRST, dtype=torch.long)
        padding[0, :5] = 0
        padded = model(input_ids=ids[: 2 * FIRST].reshape(2, FIRST), attention_mask=padding).logits[
            :, 5:
        ]
        written = model.generate(ids[None, :FIRST], max_new_tokens=5, do_sample=False)
        found.append((packed, padded, written))
    for of_sdpa, of_packed in zip(*found, strict=True):
        torch.testing.assert_close(of_sdpa, of_packed, atol=1e-5, rtol=1e-5)


def test_a_pack_has_no_mask_of_all_its_tokens_and_is_taken_apart_once() -> None:
    """Or time and memory would grow with the square of the pack, and each layer would wait for the
    GPU.
    """
    model, (ids, positions), longest = model_with(engines.PACKED), row_of([FIRST, SECOND]), []
    forward = torch.nn.functional.scaled_dot_product_attention
    with pytest.MonkeyPatch.context() as patch:

        def seen(
            query: torch.Tensor,
            key: torch.Tensor,
            *args: object,
            attn_mask: object = None,
            **options: object,
        ):
            longest.append((query.shape[2], key.shape[2], attn_mask))
            return forward(query, key, *args, attn_mask=attn_mask, **options)

        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
        patch.setattr(torch, "nonzero", nonzero := Mock(side_effect=torch.nonzero))
        log_probs(model, ids, positions)
    assert nonzero.call_count == 1
    assert longest == [(FIRST, FIRST, None), (SECOND, SECOND, None)] * 2


def test_a_checkpoint_does_not_need_this_package(tmp_path: Path) -> None:
    model_with(engines.PACKED).save_pretrained(tmp_path)
    assert engines.PACKED not in (tmp_path / "config.json").read_text(encoding="utf-8")
