"""Per-token columns of a batch that know contexts and roles: read from and written to verl's TransferQueue.

Called by the trainer. verl keeps a batch as ragged rows of one response each; padding rows are
copies of others with an empty mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.workers.utils.padding import response_to_nested

from medserl_agentloop.core.loss import ANCHOR_COLUMN, anchor_coefficients
from medserl_agentloop.core.records import GameRecord

TOKEN_ROLES = "token_roles"
"""Column (T,) of the role in whose context each token stands, prompts included, counted from 1; 0 is nobody's."""


def without_padding(batch: KVBatchMeta) -> KVBatchMeta:
    """The games of a batch, without the rows that verl added as padding."""
    rows = zip(batch.keys, batch.tags, strict=True)
    return batch.select_keys([key for key, tag in rows if not tag.get("is_padding")])


def read_columns(batch: KVBatchMeta, *names: str) -> TensorDict:
    """Columns of a batch by name."""
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(names))


def write_columns(batch: KVBatchMeta, columns: Mapping[str, torch.Tensor]) -> KVBatchMeta:
    """Write columns by name, each a nested tensor with a row for each of the batch's."""
    fields = TensorDict(dict(columns), batch_size=len(batch))
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


def restarted(context_lengths: torch.Tensor) -> torch.Tensor:
    """Position ids (T,) of a row whose contexts have these lengths: they count from 0 in each."""
    return torch.cat([torch.arange(int(length)) for length in context_lengths])


def token_roles(context_lengths: torch.Tensor, role_ids: torch.Tensor) -> torch.Tensor:
    """The role (T,) in whose context each token of a row stands; 0 where the policy generated nothing in it.

    ``role_ids`` are of the response, as in ``SelfPlayOutput``.
    """
    own = torch.nn.functional.pad(role_ids, (int(context_lengths.sum()) - len(role_ids), 0))
    contexts = torch.split(own, context_lengths.tolist())
    return torch.cat([context.max().expand(len(context)) for context in contexts])


def write_token_roles(batch: KVBatchMeta) -> None:
    """Write the column that says which role's adapter a token goes through. Padding rows get 0."""
    games = without_padding(batch)
    columns = read_columns(games, "context_lengths", "role_ids")
    roles = map(token_roles, columns["context_lengths"].unbind(), columns["role_ids"].unbind())
    roles_by_key = dict(zip(games.keys, roles, strict=True))
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        roles_by_key.setdefault(key, torch.zeros(tag["seq_len"], dtype=torch.int64))
    every = torch.nested.as_nested_tensor([roles_by_key[key] for key in batch.keys], layout=torch.jagged)
    write_columns(batch, {TOKEN_ROLES: every})


def restart_positions(batch: KVBatchMeta) -> None:
    """Rewrite the batch's ``position_ids`` so that they count from 0 in every private context.

    verl's FSDP engine passes position ids and no attention mask, and Transformers reads each 0 as
    the start of a new packed sequence. Rows that verl added as padding keep theirs.
    """
    games = without_padding(batch)
    positions = []
    context_lengths = read_columns(games, "context_lengths")["context_lengths"].unbind()
    for key, tag, lengths in zip(games.keys, games.tags, context_lengths, strict=True):
        assert int(lengths.sum()) == tag["seq_len"], f"game {key}: its contexts do not add up to its sequence"
        positions.append(restarted(lengths))
    write_columns(games, {"position_ids": torch.nested.as_nested_tensor(positions, layout=torch.jagged)})


def write_anchor(batch: KVBatchMeta, per_role: Mapping[int, float]) -> None:
    """Write the anchor's coefficient of each token, for the loss, from those by role id. Padding rows get 0."""
    columns = read_columns(batch, "response_mask", "role_ids")
    rows = columns.pop("role_ids").unbind()
    mask = columns["response_mask"].to_padded_tensor(0)
    coefficients = anchor_coefficients(stacked(rows, mask), mask, per_role)
    write_columns(batch, {ANCHOR_COLUMN: response_to_nested(coefficients, columns["response_mask"])})


def stacked(rows: Sequence[torch.Tensor], response_mask: torch.Tensor) -> torch.Tensor:
    """Numbers of each row's tokens, stacked to the shape (B, T) of ``response_mask``, 0 where there is no token.

    A row that verl added as padding holds the numbers of another row; its mask is all 0, so that does not matter.
    """
    columns = torch.zeros_like(response_mask, dtype=torch.int64)
    width = response_mask.shape[1]
    for number, row in enumerate(rows):
        columns[number, : min(len(row), width)] = row[:width]
    return columns


def context_ids(context_lengths: torch.Tensor, tokens: int) -> torch.Tensor:
    """Number of the context that each of the last ``tokens`` tokens of a row, its response, is in."""
    return torch.repeat_interleave(torch.arange(len(context_lengths)), context_lengths.cpu())[-tokens:]


LOG_PROB_RESOLUTION = 1e-6
"""Smallest mean difference of log-probs that means something in float32."""


def context_leak_metrics(
    rollout_log_probs: torch.Tensor, actor_log_probs: torch.Tensor, generated_mask: torch.Tensor
) -> dict[str, float]:
    """How much further rollout and actor are apart in later contexts than in the first one of each game.

    The first context cannot hold another one, so it is the control group: what the two engines differ by there is
    their precision. A context that leaks is seen by the actor and not by the rollout. All columns are (B, T);
    ``generated_mask`` is 1 on generated tokens, whether trained on or not.

    Returns mean absolute differences in nats and their ratio; nothing if no game has a second context.
    """
    first = generated_mask.cumprod(1).bool()
    later = (generated_mask > 0) & ~first
    if not later.any() or not first.any():
        return {}
    gap = (rollout_log_probs - actor_log_probs).abs().double()
    control, measured = gap[first].mean().item(), gap[later].mean().item()
    return {
        "selfplay/log_prob_gap/first_context": control,
        "selfplay/log_prob_gap/later_contexts": measured,
        "selfplay/context_leak": measured / max(control, LOG_PROB_RESOLUTION),
        "selfplay/context_leak_games": float(later.any(1).sum()),
    }


def equal_role_tokens(advantages: torch.Tensor, mask: torch.Tensor, role_ids: torch.Tensor) -> torch.Tensor:
    """Advantages (B, T) scaled so that a mean over all trained tokens is the mean of the roles' own means.

    The factor of a role depends on the numbers of tokens alone, so nothing that one role earns changes another's.
    They are counted over the whole step; in a single mini-batch the roles' weights are nearly equal, not exactly.
    """
    trained = role_ids * (mask > 0)
    roles, counts = torch.unique(trained[trained > 0], return_counts=True)
    scaled = advantages.clone()
    for role, count in zip(roles.tolist(), counts.tolist(), strict=True):
        scaled[trained == role] *= counts.sum().item() / (len(roles) * count)
    return scaled


def role_token_metrics(
    columns: Mapping[str, torch.Tensor], response_mask: torch.Tensor, role_ids: torch.Tensor, roles: Sequence[str]
) -> dict[str, float]:
    """Mean and spread of (B, T) columns, by name, over each role's trained tokens, and how many there are.

    ``signal_share`` is a role's share of the gradient signal: of the sum of the column |advantage|.
    """
    metrics: dict[str, float] = {}
    signal = columns["advantage"].abs() * (response_mask > 0)
    for number, role in enumerate(roles, start=1):
        own = (role_ids == number) & (response_mask > 0)
        metrics[f"selfplay/{role}/trained_tokens"] = float(own.sum())
        if signal.any():
            metrics[f"selfplay/{role}/signal_share"] = (signal[own].sum() / signal.sum()).item()
        for name, column in columns.items() if own.any() else ():
            metrics[f"selfplay/{role}/{name}_mean"] = column[own].mean().item()
            metrics[f"selfplay/{role}/{name}_std"] = column[own].std(unbiased=False).item()
    return metrics


def turn_metrics(
    records: Sequence[GameRecord], role_ids: Sequence[torch.Tensor], roles: Sequence[str]
) -> dict[str, float]:
    """How many turns the policy took as each role in games that count, and their mean length in tokens.

    ``role_ids`` are (T,) per game; between two turns there is an observation.
    """
    metrics = {}
    counted = [ids for record, ids in zip(records, role_ids, strict=True) if not record.is_void]
    for number, role in enumerate(roles, start=1):
        own = [(ids == number).int() for ids in counted]
        turns = sum(int((ids.diff(prepend=ids.new_zeros(1)) > 0).sum()) for ids in own)
        if turns:
            metrics[f"selfplay/{role}/turns"] = float(turns)
            metrics[f"selfplay/{role}/tokens"] = sum(int(ids.sum()) for ids in own) / turns
    return metrics
