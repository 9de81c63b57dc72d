"""Per-token columns with contexts and roles.

The trainer reads and writes them in verl's TransferQueue, which keeps a batch as ragged rows of one
response each; padding rows are copies of others with an empty mask.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.workers.utils.padding import response_to_nested

ANCHOR_COLUMN = "anchor_coef"
"""(B, T) coefficient of each token's KL to the reference policy; absent without an anchor."""

TOKEN_ROLES = "token_roles"
"""Column (T,) of the role of each token's context, including prompts, from 1; 0: none."""

TOKEN_COUNTS = "token_counts"
"""Key of a mini-batch's :func:`token_counts` over all workers."""


def without_padding(batch: KVBatchMeta) -> KVBatchMeta:
    """The games of a batch, without the rows that verl added as padding."""
    rows = zip(batch.keys, batch.tags, strict=True)
    return batch.select_keys([key for key, tag in rows if not tag.get("is_padding")])


def read_columns(batch: KVBatchMeta, *names: str) -> TensorDict:
    return tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=list(names)
    )


def write_columns(batch: KVBatchMeta, columns: Mapping[str, torch.Tensor]) -> KVBatchMeta:
    """Write columns by name, each a nested tensor with one row per game."""
    fields = TensorDict(dict(columns), batch_size=len(batch))
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


def _jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def restarted(context_lengths: torch.Tensor) -> torch.Tensor:
    """Position ids (T,) of a row whose contexts have these lengths: they count from 0 in each."""
    return torch.cat([torch.arange(int(length)) for length in context_lengths])


def token_roles(context_lengths: torch.Tensor, role_ids: torch.Tensor) -> torch.Tensor:
    """The role (T,) of each token's context, from the response's ``role_ids``, or 0."""
    own = torch.nn.functional.pad(role_ids, (int(context_lengths.sum()) - len(role_ids), 0))
    contexts = torch.split(own, context_lengths.tolist())
    return torch.cat([context.max().expand(len(context)) for context in contexts])


def write_token_roles(batch: KVBatchMeta) -> None:
    """Write the column that selects each token's role adapter. Padding rows get 0."""
    columns = read_columns(batch, "context_lengths", "role_ids")
    own = (columns[name].unbind() for name in ("context_lengths", "role_ids"))
    roles = [
        torch.zeros(tag["seq_len"], dtype=torch.int64)
        if tag.get("is_padding")
        else token_roles(contexts, role_ids)
        for tag, contexts, role_ids in zip(batch.tags, *own, strict=True)
    ]
    write_columns(batch, {TOKEN_ROLES: _jagged(roles)})


def restart_positions(batch: KVBatchMeta) -> None:
    """Restart the batch's ``position_ids`` at 0 in every private context; padding rows keep theirs.

    verl's FSDP engine passes no attention mask, and Transformers reads each 0 as a new sequence.
    """
    games = without_padding(batch)
    context_lengths = read_columns(games, "context_lengths")["context_lengths"].unbind()
    lengths = [int(own.sum()) for own in context_lengths]
    assert lengths == [tag["seq_len"] for tag in games.tags]
    rows = [restarted(own) for own in context_lengths]
    write_columns(games, {"position_ids": _jagged(rows)})


def write_rewards(batch: KVBatchMeta, rewards: Sequence[Mapping[int, float]]) -> None:
    """Write the rewards of each game, by role id, on the role's last token; others keep theirs."""
    columns = read_columns(batch, "rm_scores", "role_ids")
    rows = zip(columns["rm_scores"].unbind(), columns["role_ids"].unbind(), rewards, strict=True)
    scores = []
    for own, roles, of_roles in rows:
        own = own.clone()
        for role, reward in of_roles.items():
            if len(tokens := (roles == role).nonzero()):  # an opponent's turns have none here
                own[tokens[-1]] = reward
        scores.append(own)
    write_columns(batch, {"rm_scores": _jagged(scores)})


def write_anchor(batch: KVBatchMeta, per_role: Mapping[int, float]) -> None:
    """Write each generated token's anchor coefficient, given by role id; 0 in void games."""
    columns = read_columns(batch, "response_mask", "role_ids")
    mask = columns["response_mask"].to_padded_tensor(0)
    role_ids = stacked(columns["role_ids"].unbind(), mask)
    coefficients = torch.zeros(mask.shape, dtype=torch.float32)
    for role, coefficient in per_role.items():
        coefficients += coefficient * ((role_ids == role) & (mask > 0))
    column = response_to_nested(coefficients, columns["response_mask"])
    write_columns(batch, {ANCHOR_COLUMN: column})


def token_counts(data: TensorDict) -> Counter[tuple[str, int]]:
    """Token counts by column and role id: trained and anchored ones."""
    counts: Counter[tuple[str, int]] = Counter()
    for name in ("response_mask", ANCHOR_COLUMN):
        if name in data:
            column = data[name].to_padded_tensor(0)
            own = stacked(data["role_ids"].unbind(), column)
            for role in torch.unique(own).tolist():
                counts[name, role] += int((column[own == role] > 0).sum())
    return counts


def stacked(rows: Sequence[torch.Tensor], response_mask: torch.Tensor) -> torch.Tensor:
    """Pad per-token numbers to the shape (B, T) of ``response_mask``, with 0 elsewhere."""
    columns = torch.zeros_like(response_mask, dtype=torch.int64)
    for column, row in zip(columns, rows, strict=True):
        column[: len(row)] = row[: len(column)]
    return columns


def context_ids(context_lengths: torch.Tensor, tokens: int) -> torch.Tensor:
    """Number of the context of each of the last ``tokens`` tokens of a row, its response."""
    numbers = torch.arange(len(context_lengths))
    return torch.repeat_interleave(numbers, context_lengths.cpu())[-tokens:]
