"""Per-token columns of a batch that know contexts and roles, and the actor's loss that reads one of them.

The trainer reads and writes them in verl's TransferQueue, which keeps a batch as ragged rows of one response each;
padding rows are copies of others with an empty mask. Roles that share weights drift where one of them is trained: the
anchor to the reference policy, with a coefficient per role, holds on to tokens that the policy loss does not see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import kl_penalty
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding, response_to_nested

from medserl_agentloop.core.records import GameRecord

ANCHOR_COLUMN = "anchor_coef"
"""(B, T) coefficient of each token's KL to the reference policy; absent in runs without an anchor."""

DIFFS = ("rollout_probs_diff_mean", "rollout_probs_diff_max")  # verl's names, after "training/"

GAPS = ("gap_first", "gap_later", "tokens_first", "tokens_later", "games_later")
"""Sums over a batch, of its games' first contexts and of later ones: what ``context_leak_metrics`` divides."""

TOKEN_ROLES = "token_roles"
"""Column (T,) of the role in whose context each token stands, prompts included, counted from 1; 0 is nobody's."""


def without_padding(batch: KVBatchMeta) -> KVBatchMeta:
    """The games of a batch, without the rows that verl added as padding."""
    rows = zip(batch.keys, batch.tags, strict=True)
    return batch.select_keys([key for key, tag in rows if not tag.get("is_padding")])


def read_columns(batch: KVBatchMeta, *names: str) -> TensorDict:
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(names))


def write_columns(batch: KVBatchMeta, columns: Mapping[str, torch.Tensor]) -> KVBatchMeta:
    """Write columns by name, each a nested tensor with a row for each of the batch's."""
    fields = TensorDict(dict(columns), batch_size=len(batch))
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


def restarted(context_lengths: torch.Tensor) -> torch.Tensor:
    """Position ids (T,) of a row whose contexts have these lengths: they count from 0 in each."""
    return torch.cat([torch.arange(int(length)) for length in context_lengths])


def token_roles(context_lengths: torch.Tensor, role_ids: torch.Tensor) -> torch.Tensor:
    """The role (T,) in whose context each token stands, by the response's ``role_ids``; 0 where there is none."""
    own = torch.nn.functional.pad(role_ids, (int(context_lengths.sum()) - len(role_ids), 0))
    contexts = torch.split(own, context_lengths.tolist())
    return torch.cat([context.max().expand(len(context)) for context in contexts])


def write_token_roles(batch: KVBatchMeta) -> None:
    """Write the column that says which role's adapter a token goes through. Padding rows get 0."""
    columns = read_columns(batch, "context_lengths", "role_ids")
    rows = zip(batch.tags, columns["context_lengths"].unbind(), columns["role_ids"].unbind(), strict=True)
    roles = [
        torch.zeros(tag["seq_len"], dtype=torch.int64) if tag.get("is_padding") else token_roles(contexts, own)
        for tag, contexts, own in rows
    ]
    write_columns(batch, {TOKEN_ROLES: torch.nested.as_nested_tensor(roles, layout=torch.jagged)})


def restart_positions(batch: KVBatchMeta) -> None:
    """Let the batch's ``position_ids`` count from 0 in every private context; padding rows keep theirs.

    verl's FSDP engine passes them and no attention mask, and Transformers reads each 0 as a new packed sequence.
    """
    games = without_padding(batch)
    context_lengths = read_columns(games, "context_lengths")["context_lengths"].unbind()
    assert [int(lengths.sum()) for lengths in context_lengths] == [tag["seq_len"] for tag in games.tags]
    positions = torch.nested.as_nested_tensor([restarted(own) for own in context_lengths], layout=torch.jagged)
    write_columns(games, {"position_ids": positions})


def write_anchor(batch: KVBatchMeta, per_role: Mapping[int, float]) -> None:
    """Write the anchor's coefficient of each generated token, from those by role id. Void games and padding get 0."""
    columns = read_columns(batch, "response_mask", "role_ids")
    mask = columns["response_mask"].to_padded_tensor(0)
    role_ids = stacked(columns["role_ids"].unbind(), mask)
    coefficients = torch.zeros(mask.shape, dtype=torch.float32)
    for role, coefficient in per_role.items():
        coefficients += coefficient * ((role_ids == role) & (mask > 0))
    write_columns(batch, {ANCHOR_COLUMN: response_to_nested(coefficients, columns["response_mask"])})


def selfplay_loss(
    config: Any, model_output: Any, data: Any, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """verl's ``ppo_loss`` plus ``anchor_kl_loss``: ``sum(coef * KL(policy || reference)) / trained tokens``.

    The anchor is normalised as verl's token-mean policy loss is, so a coefficient weighs a token of an untrained role
    like one of a trained role. KL per token is estimated as ``actor.kl_loss_type`` says. A mini-batch without a trained
    token, because all of its games are void, costs 0 where verl's own loss would divide by their number. Old log-probs
    that nobody wrote are those of this pass, and are compared with the rollout's (``DIFFS``, ``GAPS``).
    """
    log_prob, compared = no_padding_2_padding(model_output["log_probs"], data), {}
    if not data["batch_num_tokens"]:
        return 0.0 * log_prob.sum(), {}
    if "old_log_probs" not in data:
        own, columns = log_prob.detach(), data.select("rollout_log_probs", "response_mask").to_padded_tensor(0)
        rollout, trained = columns["rollout_log_probs"], columns["response_mask"] > 0
        # Of an untrained role, too: its context may be the control group.
        generated = (stacked(data["role_ids"].unbind(), trained) > 0) & trained.any(1, keepdim=True)
        apart = (rollout.exp() - own.exp()).abs() * trained
        sums = {DIFFS[0]: apart.sum() / data["batch_num_tokens"], **context_gaps(rollout, own, generated)}
        compared = Metric.from_dict({name: of * data["dp_size"] for name, of in sums.items()}, AggregationType.SUM)
        compared[DIFFS[1]] = apart.max().item()
        data = data.copy().update({"old_log_probs": response_to_nested(own, data["response_mask"])})
    loss, metrics = ppo_loss(config, model_output, data, dp_group)
    if ANCHOR_COLUMN not in data:
        return loss, metrics | compared
    columns = data.select(ANCHOR_COLUMN, "ref_log_prob").to_padded_tensor()
    kl = kl_penalty(logprob=log_prob, ref_logprob=columns["ref_log_prob"], kl_penalty=config.kl_loss_type)
    anchor = (columns[ANCHOR_COLUMN] * kl).sum() / data["batch_num_tokens"] * data["dp_size"]
    metrics["anchor_kl_loss"] = Metric(value=anchor, aggregation=AggregationType.SUM)
    return loss + anchor, metrics | compared


def stacked(rows: Sequence[torch.Tensor], response_mask: torch.Tensor) -> torch.Tensor:
    """Numbers of each row's tokens in the shape (B, T) of ``response_mask``, 0 elsewhere."""
    columns = torch.zeros_like(response_mask, dtype=torch.int64)
    for column, row in zip(columns, rows, strict=True):
        column[: len(row)] = row[: len(column)]
    return columns


def context_ids(context_lengths: torch.Tensor, tokens: int) -> torch.Tensor:
    """Number of the context that each of the last ``tokens`` tokens of a row, its response, is in."""
    return torch.repeat_interleave(torch.arange(len(context_lengths)), context_lengths.cpu())[-tokens:]


LOG_PROB_RESOLUTION = 1e-6  # the smallest mean difference of log-probs that means something in float32


def context_gaps(
    rollout_log_probs: torch.Tensor, actor_log_probs: torch.Tensor, generated_mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """``GAPS`` of (B, T) columns: absolute differences in nats, and tokens, by context; games with a later context.

    ``generated_mask`` is 1 on generated tokens, trained on or not.
    """
    first = generated_mask.cumprod(1).bool()
    later = (generated_mask > 0) & ~first
    gap = (rollout_log_probs - actor_log_probs).abs().double()
    return dict(zip(GAPS, (of.sum() for of in (gap[first], gap[later], first, later, later.any(1))), strict=True))


def context_leak_metrics(gaps: Mapping[str, Any]) -> dict[str, float]:
    """How much further rollout and actor are apart in later contexts than in the first one of each game.

    The first context cannot hold another one, so it is the control group: what the two engines differ by there is
    their precision. A context that leaks is seen by the actor and not by the rollout. Returns mean absolute
    differences in nats and their ratio; nothing if no game has a second context.
    """
    gap_first, gap_later, tokens_first, tokens_later, games = (float(gaps[name]) for name in GAPS)
    if not tokens_first or not tokens_later:
        return {}
    control, measured = gap_first / tokens_first, gap_later / tokens_later
    return {
        "selfplay/log_prob_gap/first_context": control,
        "selfplay/log_prob_gap/later_contexts": measured,
        "selfplay/context_leak": measured / max(control, LOG_PROB_RESOLUTION),
        "selfplay/context_leak_games": games,
    }


def role_token_metrics(
    columns: Mapping[str, torch.Tensor], response_mask: torch.Tensor, role_ids: torch.Tensor, roles: Sequence[str]
) -> dict[str, float]:
    """Mean and spread of (B, T) columns over a role's trained tokens, their number, and their share of |advantage|."""
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
    """How many turns the policy took as each role in games that count, and their mean length; ``role_ids`` are (T,)."""
    metrics = {}
    counted = [ids for record, ids in zip(records, role_ids, strict=True) if not record.is_void]
    for number, role in enumerate(roles, start=1):
        own = [(ids == number).int() for ids in counted]
        turns = sum(int((ids.diff(prepend=ids.new_zeros(1)) > 0).sum()) for ids in own)
        if turns:
            metrics[f"selfplay/{role}/turns"] = float(turns)
            metrics[f"selfplay/{role}/tokens"] = sum(int(ids.sum()) for ids in own) / turns
    return metrics
