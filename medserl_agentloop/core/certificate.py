"""The certificate of a run: isolation, credit and loss, measured before the first update.

A model, an estimator or a loss that couples the roles trains without an error and reports success. So each claim is
measured on a few two-turn games, on the run's own workers and with its own settings: two forward passes of the actor's
size, no generation. Called by the trainer; ``medserl certify`` runs it alone.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics
from verl.utils import tensordict_utils
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.utils.padding import no_padding_2_padding, response_from_nested, response_to_nested

from medserl_agentloop.core.columns import restart_positions
from medserl_agentloop.core.encoding import ChatEncoder
from medserl_agentloop.core.interaction import Interaction, Turn
from medserl_agentloop.core.loss import ANCHOR_COLUMN, selfplay_loss
from medserl_agentloop.core.records import GameRecord
from medserl_agentloop.core.trajectory import Trajectory, TrajectoryTurn

CERTIFICATE_FILE = "certificate.json"
FORMS = ("packed", "alone", "joined")
"""Each game as three rows: both contexts in one row, the second context as a row of its own, and one conversation."""

ISOLATION_LIMIT = 0.1
"""Largest distance of the packed row to the second context alone, as a share of its distance to one conversation.

Measured on a CPU with tiny models: at most 5e-6 where the contexts are apart in fp32, and 0.011 in bf16; 0.28 to 0.41
where some layers carry state across; 90 and more where positions do not restart."""

COUPLING_LIMIT = 1e-5
"""Largest change of one role's numbers by the other role's, as a share of the largest number. Exact zero is usual."""

PARTITION = "certificate"
_RANDOM_SEED = 0


class CertificateError(RuntimeError):
    """A claim of the run does not hold; the message says which, and what the cause is."""


@dataclass(frozen=True)
class Measure:
    """One claim, measured.

    Attributes:
        claim: ``isolation``, ``credit`` or ``loss``.
        of: What was measured, e.g. ``actor``.
        value: A share; the claim holds if it is not above ``limit``.
        limit: The largest share that is accepted.
        details: The numbers behind ``value``.
        problem: The sentence to show if the claim does not hold.
    """

    claim: str
    of: str
    value: float
    limit: float
    details: Mapping[str, float]
    problem: str

    @property
    def holds(self) -> bool:
        """Whether the claim holds; NaN does not."""
        return self.value <= self.limit


@dataclass(frozen=True)
class Certificate:
    """All measures of one start of a run.

    Attributes:
        step: Step of the checkpoint that was measured; 0 at the start of training.
        games: How many two-turn games were measured.
        seconds: Wall time it took.
        not_claimed: Why a claim was not measured, by its name.
    """

    measures: Sequence[Measure]
    step: int
    games: int
    seconds: float
    not_claimed: Mapping[str, str] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        """A sentence for each claim that does not hold."""
        return [measure.problem for measure in self.measures if not measure.holds]

    @property
    def metrics(self) -> dict[str, float]:
        """The measures as metrics of the first step."""
        return {f"selfplay/certificate/{m.claim}/{m.of}": m.value for m in self.measures}

    def __str__(self) -> str:
        parts = [f"{m.claim} of {m.of} {m.value:.2g} (limit {m.limit:g})" for m in self.measures]
        parts += [f"{claim} not claimed ({reason})" for claim, reason in self.not_claimed.items()]
        return f"{'; '.join(parts)}; {'DOES NOT HOLD' if self.problems else 'holds'}, {self.seconds:.1f} s"

    def write(self, folder: str | Path) -> Path:
        """Write ``certificate.json`` into a run's folder."""
        path = Path(folder) / CERTIFICATE_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        measures = [{**asdict(m), "holds": m.holds, "problem": None if m.holds else m.problem} for m in self.measures]
        path.write_text(json.dumps({**asdict(self), "measures": measures, "holds": not self.problems}, indent=1))
        return path


def two_context_games(samples: Sequence[Sequence[Turn]], encoder: ChatEncoder) -> list[list[TrajectoryTurn]]:
    """One game per sample, without generation: everyone answers with the untrusted text of the next sample.

    A model that sees the first turn expects its text again, so a leak shows as strongly as it can.

    Args:
        samples: For each game its first two conversations' opening turns.
        encoder: The run's encoder.
    """
    texts = ["\n".join(turns[0].prompt.data.values()) or turns[0].prompt.messages[-1]["content"] for turns in samples]
    games = []
    for turns, answer in zip(samples, [*texts[1:], texts[0]], strict=True):
        ids = encoder.encode_text(answer)
        games.append([TrajectoryTurn(turn.role, encoder.opening(turn).ids, ids, None) for turn in turns])
    return games


def game_rows(
    games: Sequence[list[TrajectoryTurn]],
    record: GameRecord,
    pad_token_id: int,
    roles: Sequence[str],
    trained: Collection[str] | None = None,
) -> list[dict[str, Any]]:
    """The columns of each game's three ``FORMS``, in this order, as verl's agent-loop worker writes them.

    The masks leave out roles that are not ``trained``; None trains all.
    """
    rows = []
    for turns in games:
        for isolated, form in ((True, turns), (True, turns[1:]), (False, turns)):
            trajectory = Trajectory(roles, isolated, has_log_probs=False, turns=form)
            output = trajectory.to_output(record, AgentLoopMetrics(), {}, pad_token_id)
            role_ids = torch.tensor(output.role_ids)
            mask = sum((role_ids == roles.index(role) + 1).long() for role in (roles if trained is None else trained))
            ids = torch.tensor([*output.prompt_ids, *output.response_ids])
            rows.append(
                {
                    "prompts": torch.tensor(output.prompt_ids),
                    "responses": torch.tensor(output.response_ids),
                    "input_ids": ids,
                    "position_ids": torch.arange(len(ids)),
                    "response_mask": mask,
                    "loss_mask": mask,
                    "role_ids": role_ids,
                    "context_lengths": torch.tensor(output.context_lengths),
                    "extra_fields": output.extra_fields,
                }
            )
    return rows


def isolation(of: str, columns: Sequence[torch.Tensor], games: Sequence[list[TrajectoryTurn]]) -> Measure:
    """Compare the second turn's numbers in the three forms of each game.

    Args:
        of: Whose numbers these are, e.g. ``actor``.
        columns: Per row of ``game_rows`` (T,) its response's log-probs or values.
        games: The games of the rows.
    """
    to_alone, to_joined = [], []
    for number, turns in enumerate(games):
        own = slice(-len(turns[1].response_ids), None)
        packed, alone, joined = (columns[len(FORMS) * number + form][own].double() for form in range(len(FORMS)))
        to_alone.append((packed - alone).abs())
        to_joined.append((packed - joined).abs())
    alone_gap, joined_gap = torch.cat(to_alone).mean().item(), torch.cat(to_joined).mean().item()
    # Equal to one conversation is a leak, unless nothing differs at all, as in a critic that answers 0 everywhere.
    value = alone_gap / joined_gap if joined_gap else (float("inf") if alone_gap else 0.0)
    cause = (
        "These are the numbers of one conversation: position ids do not restart, or nothing reads that they do."
        if value > 1
        else "Part of its layers ignore that position ids restart. Use a model with full or sliding-window attention."
    )
    return Measure(
        "isolation",
        of,
        value,
        ISOLATION_LIMIT,
        {"gap_to_alone": alone_gap, "gap_to_joined": joined_gap},
        f"the {of} reads across the border of the private contexts: on the second context's tokens its numbers differ "
        f"by {alone_gap:.3g} on average from those of that context alone, and by {joined_gap:.3g} from those of "
        f"one conversation. {cause}",
    )


def probe_loss(
    config: Any, roles: Mapping[str, int], model_output: Any, data: Any, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """In place of the loss, on a worker: what one role's numbers change in the loss's gradient for the other role.

    The gradient is taken with respect to each token's log-prob. For each role it is taken again with the role's
    advantages and old log-probs changed, and with the role's tokens out of the mask.

    Args:
        config: verl's ``ActorConfig``.
        roles: The roles that are measured, each with its id.
        model_output: ``log_probs`` (nested) of a micro-batch.
        data: The micro-batch as verl's engine passes it.
        dp_group: Unused, as in verl's losses.

    Returns:
        A loss of 0 and two metrics per role: ``coupling``, the largest change of the other role's gradient by it, and
        ``signal``, the largest gradient of the other role.
    """
    log_probs = model_output["log_probs"]
    actual = no_padding_2_padding(log_probs, data).detach()
    mask = data["response_mask"].to_padded_tensor(0)
    role_ids = data["role_ids"].to_padded_tensor(0)
    generator = torch.Generator().manual_seed(_RANDOM_SEED)
    advantages = torch.randn(mask.shape, generator=generator).to(actual)
    drift = 0.05 * torch.randn(mask.shape, generator=generator).to(actual)

    def gradient(advantages: torch.Tensor, drift: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        leaf = log_probs.values().detach().clone().requires_grad_()
        changed = {
            "advantages": advantages,
            "old_log_probs": actual - drift,
            "ref_log_prob": actual - 0.1,
            "rollout_is_weights": torch.ones_like(actual),
            ANCHOR_COLUMN: torch.full_like(actual, 0.1) * (role_ids > 0),
            "response_mask": mask,
        }
        nested = {name: response_to_nested(column, data["response_mask"]) for name, column in changed.items()}
        probe = data.copy().update(nested)
        with torch.enable_grad():
            output = {"log_probs": torch.nested.nested_tensor_from_jagged(leaf, log_probs.offsets())}
            loss, _ = selfplay_loss(config, output, probe)
            (found,) = torch.autograd.grad(loss, leaf)
        by_row: torch.Tensor = no_padding_2_padding(found, data)
        return by_row

    before = gradient(advantages, drift, mask)
    metrics = {}
    for role, number in roles.items():
        changed = role_ids == number
        other = (mask > 0) & ~changed
        variants = (
            gradient(torch.where(changed, 1 - 3 * advantages, advantages), torch.where(changed, 1.0, drift), mask),
            gradient(advantages, drift, mask * ~changed),
        )
        changes = [_largest(variant - before, other) for variant in variants]
        metrics[f"{role}/coupling"] = float(np.max(changes))  # unlike max(), NaN if one is NaN
        metrics[f"{role}/signal"] = _largest(before, other)
    return log_probs.values().sum() * 0.0, metrics


def _largest(column: torch.Tensor, where: torch.Tensor) -> float:
    """The largest absolute number among the chosen ones; 0 if none is chosen, NaN if one is NaN."""
    return column[where].abs().max().item() if where.any() else 0.0


def loss_measure(metrics: Mapping[str, Any], roles: Collection[str], trained: Collection[str]) -> Measure:
    """The claim on the loss, from what ``probe_loss`` gave in all micro-batches of all workers.

    A role is measured by its effect on the other one, if that is ``trained``.
    """

    def largest(name: str) -> float:
        return float(np.max(np.hstack(metrics[name])))

    return _coupling(
        "loss",
        "actor",
        # Without a gradient nothing is shown: NaN, which does not hold.
        {
            role: largest(f"{role}/coupling") / (largest(f"{role}/signal") or np.nan)
            for role in roles
            if set(trained) - {role}
        },
        "{role}'s advantages, drift or tokens change the gradient of the other role's tokens by {share:.3g} of its "
        "largest: this run's loss takes one number over both roles' tokens. Set "
        "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla and actor_rollout_ref.actor.loss_agg_mode=token-mean.",
    )


def _coupling(claim: str, of: str, shares: Mapping[str, float], problem: str) -> Measure:
    """A measure of how much each role's numbers change the other's; ``problem`` is about the worse one."""
    role = max(shares, key=lambda name: np.nan_to_num(shares[name], nan=np.inf))
    return Measure(
        claim, of, shares[role], COUPLING_LIMIT, shares, "the " + problem.format(role=role, share=shares[role])
    )


CREDITED = ("advantages", "response_mask", "rollout_is_weights")


def credit(
    of: str,
    assign: Callable[[list[torch.Tensor], list[torch.Tensor]], Mapping[str, list[torch.Tensor]]],
    role_ids: Sequence[torch.Tensor],
    roles: Mapping[str, int],
) -> Measure:
    """What one role's rewards and log-prob drift change in the numbers that the other role is trained with.

    Args:
        of: Name of the estimator.
        assign: The run's ``CREDITED`` columns, from rewards and the drift of the rollout's log-probs, per row (T,).
        role_ids: (T,) per row.
        roles: The roles that are measured, each with its id.
    """
    generator = torch.Generator().manual_seed(_RANDOM_SEED)
    rewards, drift = [], []
    for ids in role_ids:
        reward = torch.zeros(len(ids))
        for number in roles.values():
            reward[(ids == number).nonzero()[-1]] = torch.randn(1, generator=generator)
        rewards.append(reward)
        drift.append(0.05 * torch.randn(len(ids), generator=generator))
    before = assign(rewards, drift)

    shares = {}
    for role, number in roles.items():
        changed = [ids == number for ids in role_ids]
        after = assign(
            # The rows' order by reward turns round, so that ranks and signs change as well as sizes.
            [torch.where(c & (r != 0), 1 - 3 * r, r) for c, r in zip(changed, rewards, strict=True)],
            [torch.where(c, 1.0, d) for c, d in zip(changed, drift, strict=True)],
        )
        shares[role] = max(
            _share_of_change(before[name], after[name], [(r > 0) & (r != number) for r in role_ids]) for name in before
        )
    return _coupling(
        "credit",
        of,
        shares,
        "{role}'s rewards or log-probs change what the other role is trained with by {share:.3g} of its largest "
        f"advantage: algorithm.adv_estimator={of} or algorithm.rollout_correction takes one number over both roles. "
        "Set algorithm.adv_estimator to a role_ estimator and correct by token.",
    )


def _share_of_change(before: list[torch.Tensor], after: list[torch.Tensor], where: list[torch.Tensor]) -> float:
    chosen = [torch.cat([c[w].float() for c, w in zip(columns, where, strict=True)]) for columns in (before, after)]
    largest = chosen[0].abs().max().item()
    change = (chosen[1] - chosen[0]).abs().max().item()
    return change / largest if largest else change


def certify(trainer: Any, encoder: ChatEncoder) -> Certificate:
    """Measure a run's claims on its own workers. Changes nothing of the run.

    Args:
        trainer: A self-play trainer whose workers are up.
        encoder: The run's encoder.
    """
    started = time.monotonic()
    selfplay = trainer.selfplay
    roles = trainer.game.roles
    # Two games per worker, so that they divide evenly among any number of data-parallel ranks.
    record, samples = _short_samples(
        trainer.interaction, trainer.train_dataset, 2 * trainer.actor_rollout_wg.world_size
    )
    games = two_context_games(samples, encoder)
    trained = [role for role in roles if selfplay.trains(role)]
    measured = {turn.role: roles.index(turn.role) + 1 for turn in games[0]}
    rows = game_rows(games, record, trainer.tokenizer.pad_token_id, roles, trained)
    uids = [uuid4().hex for _ in games[::2]]  # prompt groups of two
    for number, row in enumerate(rows):
        row["uid"] = uids[number // len(FORMS) // 2]
    # verl reads {uid}_{session}_{index} out of a key (trainer/ppo/v1/utils.py).
    keys = [f"{row['uid']}_{number // len(FORMS) % 2}_{number % len(FORMS)}" for number, row in enumerate(rows)]
    tags = [{"seq_len": len(row["input_ids"])} for row in rows]
    batch = KVBatchMeta(partition_id=PARTITION, keys=keys, tags=tags)
    tq.kv_batch_put(keys=keys, partition_id=PARTITION, tags=tags, fields=list_of_dict_to_tensordict(rows))
    try:
        restart_positions(batch)
        columns = tq.kv_batch_get(keys=keys, partition_id=PARTITION)
        measures, not_claimed = [], {}
        log_probs, metrics = _actor_pass(trainer, columns, measured)
        if selfplay.context == "isolated":
            measures.append(isolation("actor", log_probs, games))
            if trainer.use_reference_policy:
                measures.append(isolation("reference", _reference_pass(trainer, columns), games))
            if trainer.use_critic:
                measures.append(isolation("critic", _critic_pass(trainer, columns), games))
        else:
            not_claimed["isolation"] = f"selfplay.context={selfplay.context}"
        packed = list(range(0, len(rows), len(FORMS)))
        if len(measured) > 1:
            measures.append(_credit_of_run(trainer, [keys[i] for i in packed], [rows[i] for i in packed], measured))
            measures.append(loss_measure(metrics, measured, trained))
        else:
            not_claimed |= dict.fromkeys(("credit", "loss"), "the game has one role")
    finally:
        tq.kv_clear(keys=keys, partition_id=PARTITION)
    return Certificate(measures, trainer.global_steps, len(games), time.monotonic() - started, not_claimed)


def _short_samples(interaction: Interaction[Any, Any], dataset: Any, count: int) -> tuple[GameRecord, list[list[Turn]]]:
    """A record, and two conversations of games on some of the shortest rows, repeated if there are too few.

    They are of two roles where the game has two.

    Raises:
        CertificateError: The game has no second conversation.
    """
    rows = list(zip(dataset.dataframe["prompt"], dataset.dataframe["extra_info"], strict=True))
    rows.sort(key=lambda row: (len(str(row[0])), str(row[0])))
    samples = [_pair(interaction.sample_turns(facts)) for _, facts in rows[: 8 * count]]
    distinct = {str(turns): turns for turns in samples if len(turns) == 2}
    if not distinct:
        raise CertificateError(
            f"{type(interaction).__name__}.sample_turns gives fewer than two conversations, so that nothing can be "
            "measured. Have it return the opening turns of two."
        )
    chosen = list(distinct.values())[:count]
    return interaction.new_game(rows[0][1]).record, (chosen * count)[:count]


def _pair(turns: Sequence[Turn]) -> list[Turn]:
    """The first turn and, of the later ones, the first of another role, or else the next one."""
    others = [turn for turn in turns[1:] if turn.role != turns[0].role]
    return [*turns[:1], *(others or turns[1:])[:1]]


def forward_batch(columns: TensorDict, temperature: float) -> TensorDict:
    """The batch of a forward pass, as verl's workers want it; a game's three forms share a micro-batch."""
    names = ("prompts", "responses", "input_ids", "position_ids", "response_mask", "loss_mask", "role_ids")
    batch = columns.select(*names).clone()
    tensordict_utils.assign_non_tensor(
        batch,
        calculate_entropy=False,
        temperature=temperature,
        global_batch_size=len(batch),
        micro_batch_size_per_gpu=len(FORMS),
    )
    return batch


def forward(compute: Callable[[TensorDict], Any], batch: TensorDict) -> Any:
    """What workers answer to a batch.

    Raises:
        CertificateError: They raise; models with positions of several dimensions (MRoPE) do.
    """
    try:
        output = compute(batch)
        return output.get() if hasattr(output, "futures") else output
    except Exception as error:
        reason = str(error).strip().splitlines()[-1]
        raise CertificateError(
            f"the model cannot run a row of two contexts whose position ids restart ({reason}). Use a model with one "
            "position per token, or set selfplay.context=shared."
        ) from error


def _pass(
    trainer: Any, columns: TensorDict, compute: Callable[[TensorDict], Any], column: str, **flags: Any
) -> tuple[Sequence[torch.Tensor], Mapping[str, Any]]:
    """A forward pass of workers: ``column`` of each row's response, and the metrics of the workers' loss."""
    batch = forward_batch(columns, trainer.config.actor_rollout_ref.rollout.temperature)
    tensordict_utils.assign_non_tensor(batch, **flags)
    output = forward(compute, batch)
    return response_from_nested(output[column], columns["response_mask"]).unbind(), output["metrics"]


def _actor_pass(
    trainer: Any, columns: TensorDict, roles: Mapping[str, int]
) -> tuple[Sequence[torch.Tensor], Mapping[str, Any]]:
    """Log-probs of all rows, and the metrics of ``probe_loss`` from the same pass."""
    workers = trainer.actor_rollout_wg
    workers.set_loss_fn(partial(probe_loss, trainer.actor_config(), roles))
    try:
        return _pass(trainer, columns, workers.compute_log_prob, "log_probs", compute_loss=True)
    finally:
        workers.set_loss_fn(partial(selfplay_loss, trainer.actor_config()))


def _reference_pass(trainer: Any, columns: TensorDict) -> Sequence[torch.Tensor]:
    if trainer.ref_in_actor:
        compute, flags = trainer.actor_rollout_wg.compute_log_prob, {"no_lora_adapter": True}
    else:
        compute, flags = trainer.ref_policy_wg.compute_ref_log_prob, {}
    return _pass(trainer, columns, compute, "log_probs", compute_loss=False, **flags)[0]


def _critic_pass(trainer: Any, columns: TensorDict) -> Sequence[torch.Tensor]:
    return _pass(trainer, columns, trainer.critic_wg.infer_batch, "values", compute_loss=False)[0]


def _credit_of_run(trainer: Any, keys: list[str], rows: list[dict[str, Any]], roles: Mapping[str, int]) -> Measure:
    """The claim on credit, through the trainer's own step from rewards to advantages."""
    generator = torch.Generator().manual_seed(_RANDOM_SEED)
    noise = [torch.randn(len(row["responses"]), generator=generator) for row in rows]

    def assign(rewards: list[torch.Tensor], drift: list[torch.Tensor]) -> Mapping[str, list[torch.Tensor]]:
        fields = [
            {
                "rm_scores": reward,
                "old_log_probs": -1.0 + 0.1 * n,
                "rollout_log_probs": -1.0 + 0.1 * n - d,
                "ref_log_prob": -1.1 + 0.1 * n,
                "values": 0.1 * n,
                "response_mask": row["response_mask"],
            }
            for row, reward, d, n in zip(rows, rewards, drift, noise, strict=True)
        ]
        tags = [{"seq_len": len(row["input_ids"])} for row in rows]
        tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=list_of_dict_to_tensordict(fields))
        baselines, controller = trainer.baselines.to_dict(), copy.deepcopy(vars(trainer).get("kl_ctrl_in_reward"))
        trainer._compute_advantage(KVBatchMeta(partition_id=PARTITION, keys=keys, tags=tags), {})
        trainer.baselines.load_dict(baselines)
        if controller is not None:
            trainer.kl_ctrl_in_reward = controller
        found = tq.kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=list(CREDITED))
        return {name: list(found[name].unbind()) for name in found.keys()}  # noqa: SIM118  # a TensorDict

    role_ids = [row["role_ids"] for row in rows]
    return credit(trainer.config.algorithm.adv_estimator, assign, role_ids, roles)
