"""Causal attention within each context of a pack, using only PyTorch.

verl trains on packs: many trajectories in one row, and a context starts where positions restart.
With ``sdpa`` Transformers masks attention between all tokens, so time and memory grow with the
square of the pack; here they grow with the square of a context.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

PACKED = "packed_sdpa"
"""Name of this attention in Transformers. It is not in a run's config: verl writes that into
checkpoints, which have to load without this package.
"""

# torch 2.12 and later need this flag; 2.11's kernel groups heads without it.
_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


@dataclass(frozen=True)
class Pack:
    """The contexts of one packed row of tokens."""

    lengths: list[int]  # tokens of each context
    starts: torch.Tensor  # cumulative lengths from 0: (contexts + 1,), int32, on the row's device

    @classmethod
    def of(cls, position_ids: torch.Tensor) -> Pack:
        """Find the contexts of positions (1, T): one starts where positions stop counting up."""
        if position_ids not in _PACKS:
            row = position_ids[0]
            ends = row.new_tensor([0, len(row)])
            starts = torch.cat([ends[:1], torch.nonzero(row.diff() != 1).flatten() + 1, ends[1:]])
            _PACKS[position_ids] = cls(starts.diff().tolist(), starts.to(torch.int32))
        return _PACKS[position_ids]  # type: ignore[no-any-return]


_PACKS = WeakTensorKeyDictionary()  # by positions: the CPU waits for the GPU once, not per layer


def attend_within_contexts(model: Any) -> Any:
    """Return a Transformers model, switched to :func:`packed_attention` if it used SDPA."""
    AttentionInterface.register(PACKED, packed_attention)
    AttentionMaskInterface.register(PACKED, mask_unless_packed)
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(PACKED)
    return model


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each context of a row; with plain SDPA if there is a mask or several rows.

    ``query`` is (1, H, T, D), ``key`` and ``value`` are (1, H_kv, T, D), and ``position_ids`` (1,
    T); ``attention_mask`` is what :func:`mask_unless_packed` made. On a GPU one call of PyTorch's
    kernel handles all contexts; on a CPU, or if the kernel cannot, SDPA handles each. Returns the
    output (1, T, H, D), and None for the weights.
    """
    rows, _, tokens, _ = query.shape
    if attention_mask is not None or rows != 1 or key.shape[2] != tokens:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output, None
    if position_ids is None or position_ids.shape != (1, tokens):
        position_ids = torch.arange(tokens, device=query.device)[None]
    pack = Pack.of(position_ids)
    if query.is_cuda and kernel_takes(module, query, value, options):
        return varlen(query, key, value, pack, sliding_window, options.get("scaling")), None
    return one_by_one(module, query, key, value, pack, sliding_window, **options), None


def one_by_one(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pack: Pack,
    sliding_window: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """Attend within each context with one call to SDPA."""
    # Not slices: the gradient of each would be as long as the pack.
    split = (torch.split(states, pack.lengths, dim=2) for states in (query, key, value))
    parts = []
    for states in zip(*split, strict=True):
        mask = _window_mask(states[0].shape[2], sliding_window, query.device)
        parts.append(sdpa_attention_forward(module, *states, mask, **options)[0])
    return torch.cat(parts, dim=1)


def varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pack: Pack,
    sliding_window: int | None = None,
    scaling: float | None = None,
) -> torch.Tensor:
    """Attend within all contexts in one call to PyTorch's flash attention."""
    if query.dtype == torch.float32:  # as SDPA does under autocast
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (states.to(dtype) for states in (query, key, value))
    query, key, value = (s.squeeze(0).transpose(0, 1) for s in (query, key, value))  # (T, H, D)
    starts, longest = pack.starts, max(pack.lengths)
    # A window of w tokens is the token itself and w - 1 before it.
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    options: dict[str, Any] = {"scale": scaling, "window_size": window, **_GROUPED}
    output = varlen_attn(query, key, value, starts, starts, longest, longest, **options)
    return output.unsqueeze(0)  # type: ignore[union-attr]  # a pair only if it is asked for


def mask_unless_packed(**batch: Any) -> torch.Tensor | None:
    """Return SDPA's mask; None for a single row, where positions and window are enough."""
    one_row = (
        batch["batch_size"] == 1
        and batch.get("attention_mask") is None
        and not batch.get("kv_offset")
        and batch.get("q_length") == batch["kv_length"]
    )
    causal = "allow_is_bidirectional_skip" not in batch
    # Llama 4's chunks are also passed as a local size.
    window = batch.get("local_size") in (None, getattr(batch["config"], "sliding_window", None))
    return None if one_row and causal and window else sdpa_mask(**batch)


def _window_mask(tokens: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """The mask (1, 1, T, T) of a context that is longer than its layer's window."""
    if window is None or tokens <= window:
        return None
    places = torch.arange(tokens, device=device)
    before = places[:, None] - places
    return ((before >= 0) & (before < window))[None, None]


def kernel_takes(
    module: torch.nn.Module, query: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
) -> bool:
    """Return whether the kernel supports these states; if not, log why, once."""
    size, dtype, causal = query.shape[-1], query.dtype, options.get("is_causal")
    if dtype == torch.float32 and torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
    if dtype not in (torch.bfloat16, torch.float16):
        reason = f"states are {dtype}"
    elif size % 8 != 0 or size > 256 or value.shape[-1] != size:
        reason = f"heads have {size} numbers"
    elif options.get("dropout"):
        reason = "attention has dropout"
    elif not (getattr(module, "is_causal", True) if causal is None else causal):
        reason = "the model is not causal"
    else:
        return True
    warnings.warn(f"Attention handles one context at a time: {reason}.", stacklevel=2)
    return False
