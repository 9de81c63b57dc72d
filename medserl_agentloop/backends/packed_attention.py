"""Attention over a pack of sequences with PyTorch's SDPA, one sequence at a time: for machines without flash attention.

verl trains on packs: many trajectories in one row, each with one or more contexts, and a context starts where positions
restart. With ``attn_implementation=sdpa`` Transformers lets every token of the pack look at every other one behind a
mask, so time and memory grow with the square of the pack. Here they grow with the square of a context.

The engines put it in place of ``sdpa`` once a model is loaded. It is not in the config, because verl writes
``override_config`` into checkpoints, and theirs have to load where this package is not installed.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

NAME = "packed_sdpa"


def instead_of_sdpa(model: Any) -> Any:
    """A model of Transformers', which attends by this module from now on if it did by SDPA."""
    AttentionInterface.register(NAME, packed_sdpa)
    AttentionMaskInterface.register(NAME, mask_unless_packed)
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)
    return model


def packed_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence of a pack; plain SDPA with a mask, or where nothing is packed.

    ``query`` is (1, H, T, D), ``key`` and ``value`` are (1, H_kv, T, D), and ``position_ids`` (1, T): a sequence starts
    wherever a position does not follow the one before. ``attention_mask`` is what :func:`mask_unless_packed` made.
    Returns the output (1, T, H, D), and None for the weights.
    """
    starts = [0] if attention_mask is not None or position_ids is None else sequence_starts(position_ids)
    if len(starts) == 1:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output, None
    lengths = [end - start for start, end in pairwise([*starts, query.shape[2]])]
    # Not slices: the gradient of each would be as long as the pack.
    sequences = zip(*(torch.split(states, lengths, dim=2) for states in (query, key, value)), strict=True)
    parts = [sdpa_attention_forward(module, *states, None, **options)[0] for states in sequences]
    return torch.cat(parts, dim=1), None


def sequence_starts(position_ids: torch.Tensor) -> list[int]:
    """Where the sequences of a pack start; ``[0]`` for a batch of several rows, which is not a pack."""
    if len(position_ids) != 1:
        return [0]
    restarts = torch.nonzero(position_ids[0].diff() != 1).flatten() + 1
    return [0, *restarts.tolist()]


def mask_unless_packed(**batch: Any) -> torch.Tensor | None:
    """SDPA's mask; None for one row without padding, where positions say what belongs together.

    A layer that attends to a window needs the mask, so a model with such layers gets it: right, and not faster.
    """
    one_row = batch["batch_size"] == 1 and batch.get("attention_mask") is None and not batch.get("kv_offset")
    whole = batch.get("q_length") == batch["kv_length"] and getattr(batch["config"], "sliding_window", None) is None
    return None if one_row and whole else sdpa_mask(**batch)
