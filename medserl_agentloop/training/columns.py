"""Per-token columns of a batch that know contexts and roles: read from and written to verl's TransferQueue.

Called by the trainer. verl keeps a batch as ragged rows of one response each; padding rows are
copies of others with an empty mask.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.workers.utils.padding import response_to_nested

from medserl_agentloop.game.types import Role
from medserl_agentloop.training.loss import ANCHOR_COLUMN, anchor_coefficients


def restart_positions(batch: KVBatchMeta) -> None:
    """Rewrite the batch's ``position_ids`` so that they count from 0 in every private context.

    verl's FSDP engine passes position ids and no attention mask, and Transformers reads each 0 as
    the start of a new packed sequence. Rows that verl added as padding keep theirs.
    """
    rows = [(key, tag) for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
    keys = [key for key, _ in rows]
    columns = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["context_lengths"])
    positions = []
    for (key, tag), lengths in zip(rows, columns["context_lengths"].unbind(), strict=True):
        if int(lengths.sum()) != tag["seq_len"]:
            raise RuntimeError(
                f"game {key}: its contexts hold {int(lengths.sum())} tokens, its sequence {tag['seq_len']}; "
                "the agent loop and the trajectory disagree"
            )
        positions.append(torch.cat([torch.arange(int(n)) for n in lengths]))
    tq.kv_batch_put(
        keys=keys,
        partition_id=batch.partition_id,
        fields=TensorDict(
            {"position_ids": torch.nested.as_nested_tensor(positions, layout=torch.jagged)},
            batch_size=len(keys),
        ),
    )


def write_anchor(batch: KVBatchMeta, per_role: Mapping[Role, float]) -> None:
    """Write the anchor's coefficient of each token, for the loss. Padding rows get 0."""
    columns = tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask", "role_ids"]
    )
    rows = list(columns.pop("role_ids").unbind())
    mask = columns["response_mask"].to_padded_tensor(0)
    coefficients = anchor_coefficients(pad_role_ids(rows, mask), mask, per_role)
    nested = {ANCHOR_COLUMN: response_to_nested(coefficients, columns["response_mask"])}
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(nested, batch_size=len(batch)))


def pad_role_ids(rows: list[torch.Tensor], response_mask: torch.Tensor) -> torch.Tensor:
    """Stack the role ids of rows to the shape (B, T) of ``response_mask``, 0 where there is no token.

    A row that verl added as padding holds the role ids of the row it was copied from; its mask is
    all 0, which takes it out of every estimator whatever it holds.
    """
    role_ids = torch.zeros_like(response_mask)
    width = response_mask.shape[1]
    for number, row in enumerate(rows):
        role_ids[number, : min(len(row), width)] = row[:width]
    return role_ids


def role_token_metrics(
    columns: Mapping[str, torch.Tensor], response_mask: torch.Tensor, role_ids: torch.Tensor
) -> dict[str, float]:
    """Mean and spread of per-token columns over each role's trained tokens, and how many there are.

    Args:
        columns: (B, T) tensors by the name their metrics shall have.
        response_mask: (B, T) 1 on tokens that are trained on.
        role_ids: (B, T) role of each token.
    """
    metrics: dict[str, float] = {}
    for role in Role:
        mask = (role_ids == role.id) & (response_mask > 0)
        tokens = int(mask.sum())
        metrics[f"selfplay/{role.value}/trained_tokens"] = float(tokens)
        if not tokens:
            continue
        for name, column in columns.items():
            values = column[mask]
            metrics[f"selfplay/{role.value}/{name}_mean"] = values.mean().item()
            metrics[f"selfplay/{role.value}/{name}_std"] = values.std(unbiased=False).item()
    return metrics
