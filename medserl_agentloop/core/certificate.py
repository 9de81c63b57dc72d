"""The certificate of a run: isolation, credit and loss, measured before the first update.

A model, an estimator or a loss that couples the roles trains without an error. So each claim is
measured on a few two-turn games, on the run's own workers: one forward pass of each of actor,
reference and critic, no generation.
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
from verl.workers.utils.padding import (
    no_padding_2_padding,
    response_from_nested,
    response_to_nested,
)

from medserl_agentloop.core.columns import (
    ANCHOR_COLUMN,
    TOKEN_COUNTS,
    TOKEN_ROLES,
    read_columns,
    restart_positions,
    token_counts,
    write_token_roles,
)
from medserl_agentloop.core.encoding import ChatEncoder
from medserl_agentloop.core.interaction import Interaction, Turn
from medserl_agentloop.core.records import GameRecord
from medserl_agentloop.core.trajectory import Trajectory, TrajectoryTurn

CERTIFICATE_FILE = "certificate.json"
PARTITION = "certificate"

FORMS = ("packed", "alone", "joined")
"""Each game as three rows: both contexts in one row, the second context as a row of its own, and
one conversation.
"""

ISOLATION_LIMIT = 0.1
"""Largest distance of the packed row to the second context alone, as a share of its distance to one
conversation.

Tiny models on a CPU: at most 5e-6 where the contexts are apart in fp32, and 0.011 in bf16; 0.28 to
0.41 where some layers carry state across; 90 and more where positions do not restart."""

COUPLING_LIMIT = 1e-5
"""Largest change of one role's numbers by the other role's, as a share of the largest number.

Exact zero is usual.
"""

RANDOM_SEED = 0


@dataclass(frozen=True)
class Measure:
    """One claim (``isolation``, ``credit`` or ``loss``), measured ``of`` the actor, the critic, an
    estimator.

    ``value`` is a share and ``details`` are the numbers behind it. ``problem`` is said if the claim
    does not hold.
    """

    claim: str
    of: str
    value: float
    limit: float
    details: Mapping[str, float]
    problem: str

    @property
    def holds(self) -> bool:
        return self.value <= self.limit  # NaN does not


class CertificateError(RuntimeError):
    """A claim of the run does not hold; the message names the claim and the cause."""


@dataclass(frozen=True)
class Certificate:
    """All measures of one start of a run at ``step``, in ``seconds``, and why other claims were not
    measured.
    """

    measures: Sequence[Measure]
    step: int
    games: int
    seconds: float
    not_claimed: Mapping[str, str] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        return [measure.problem for measure in self.measures if not measure.holds]

    @property
    def metrics(self) -> dict[str, float]:
        return {f"selfplay/certificate/{m.claim}/{m.of}": m.value for m in self.measures}

    def __str__(self) -> str:
        parts = [f"{m.claim} of {m.of}: {m.value:.2g}, limit {m.limit:g}" for m in self.measures]
        parts += [f"{claim} not claimed ({reason})" for claim, reason in self.not_claimed.items()]
        return (
            f"{'; '.join(parts)}; {'DOES NOT HOLD' if self.problems else 'holds'}, "
            f"{self.seconds:.1f} s"
        )

    def write(self, folder: str | Path) -> Path:
        path = Path(folder) / CERTIFICATE_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        measures = [
            {**asdict(m), "holds": m.holds, "problem": None if m.holds else m.problem}
            for m in self.measures
        ]
        path.write_text(
            json.dumps({**asdict(self), "measures": measures, "holds": not self.problems}, indent=1)
        )
        return path


def two_context_games(
    samples: Sequence[Sequence[Turn]], encoder: ChatEncoder
) -> list[list[TrajectoryTurn]]:
    """A game per pair of turns: everyone answers with the next pair's text, so a leak shows as
    strongly as it can.
    """
    texts = [
        "\n".join(turns[0].prompt.data.values()) or turns[0].prompt.messages[-1]["content"]
        for turns in samples
    ]
    answers = [encoder.encode_text(text) for text in (*texts[1:], texts[0])]
    return [
        [TrajectoryTurn(turn.role, encoder.opening(turn).ids, ids, None) for turn in turns]
        for turns, ids in zip(samples, answers, strict=True)
    ]


def game_rows(
    games: Sequence[list[TrajectoryTurn]],
    record: GameRecord,
    pad_token_id: int,
    roles: Sequence[str],
    trained: Collection[str],
) -> list[dict[str, Any]]:
    """The columns of each game's three ``FORMS``, in this order, as verl's agent-loop worker writes
    them.
    """
    rows = []
    for turns in games:
        for isolated, form in ((True, turns), (True, turns[1:]), (False, turns)):
            trajectory = Trajectory(roles, isolated, has_log_probs=False, turns=form)
            output = trajectory.to_output(record, AgentLoopMetrics(), {}, pad_token_id)
            row = {
                name: torch.tensor(getattr(output, name))
                for name in ("role_ids", "context_lengths")
            }
            row |= {
                "prompts": torch.tensor(output.prompt_ids),
                "responses": torch.tensor(output.response_ids),
            }
            row["input_ids"] = torch.cat([row["prompts"], row["responses"]])
            row["position_ids"] = torch.arange(len(row["input_ids"]))
            own = [(row["role_ids"] == roles.index(role) + 1).long() for role in trained]
            row["response_mask"] = row["loss_mask"] = torch.stack(own).sum(0)
            rows.append({**row, "kind": output.kind})
    return rows


def certify(trainer: Any, encoder: ChatEncoder) -> Certificate:
    """Measure the claims of a run, whose workers are up, on these workers.

    Changes nothing of the run.
    """
    started, roles = time.monotonic(), trainer.game.roles
    # Two games per worker, so that they divide evenly among any number of data-parallel ranks.
    count = 2 * trainer.actor_rollout_wg.world_size
    record, samples = _short_samples(trainer.interaction, trainer.train_dataset, count)
    games = two_context_games(samples, encoder)
    trained = [role for role in roles if trainer.selfplay.trains(role)]
    measured = {turn.role: roles.index(turn.role) + 1 for turn in games[0]}
    rows = game_rows(games, record, trainer.tokenizer.pad_token_id, roles, trained)
    keys, uids = [], [uuid4().hex for _ in games[::2]]  # prompt groups of two
    for number, row in enumerate(rows):
        game, form = divmod(number, len(FORMS))
        row["uid"] = uids[game // 2]
        keys.append(
            f"{row['uid']}_{game % 2}_{form}"
        )  # verl reads uid, session and index (trainer/ppo/v1/utils.py)
    tags = [{"seq_len": len(row["input_ids"])} for row in rows]
    batch = KVBatchMeta(partition_id=PARTITION, keys=keys, tags=tags)
    tq.kv_batch_put(
        keys=keys, partition_id=PARTITION, tags=tags, fields=list_of_dict_to_tensordict(rows)
    )
    try:
        restart_positions(batch)
        if trainer.selfplay.adapters == "per_role":
            write_token_roles(batch)
        columns = tq.kv_batch_get(keys=keys, partition_id=PARTITION)
        measures, not_claimed = [], {}
        workers, compute_log_prob = (
            trainer.actor_rollout_wg,
            trainer.actor_rollout_wg.compute_log_prob,
        )
        workers.set_loss_fn(partial(probe_loss, trainer.actor_loss, measured))
        try:
            log_probs, metrics = _pass(
                trainer, columns, compute_log_prob, "log_probs", compute_loss=True
            )
        finally:
            workers.set_loss_fn(trainer.actor_loss)
        if trainer.selfplay.context == "isolated":
            measures.append(isolation("actor", log_probs, games))
            if trainer.use_reference_policy:
                in_actor = trainer.ref_in_actor
                compute = (
                    compute_log_prob if in_actor else trainer.ref_policy_wg.compute_ref_log_prob
                )
                flags = {"no_lora_adapter": True} if in_actor else {}
                reference, _ = _pass(
                    trainer, columns, compute, "log_probs", compute_loss=False, **flags
                )
                measures.append(isolation("reference", reference, games))
            if trainer.use_critic:
                values, _ = _pass(
                    trainer, columns, trainer.critic_wg.infer_batch, "values", compute_loss=False
                )
                measures.append(isolation("critic", values, games))
        else:
            not_claimed["isolation"] = f"selfplay.context={trainer.selfplay.context}"
        if len(measured) > 1:
            packed = batch.select_keys(keys[:: len(FORMS)])
            measures.append(_credit_of_run(trainer, packed, rows[:: len(FORMS)], measured))
            measures.append(loss_measure(metrics, measured, trained))
        else:
            not_claimed |= dict.fromkeys(("credit", "loss"), "the game has one role")
    finally:
        tq.kv_clear(keys=keys, partition_id=PARTITION)
    return Certificate(
        measures, trainer.global_steps, len(games), time.monotonic() - started, not_claimed
    )


def _short_samples(
    interaction: Interaction[Any, Any], dataset: Any, count: int
) -> tuple[GameRecord, list[list[Turn]]]:
    """A record, and the pairs of opening turns of ``count`` of the shortest rows, repeated if there
    are too few.
    """
    rows = list(zip(dataset.dataframe["prompt"], dataset.dataframe["extra_info"], strict=True))
    rows.sort(key=lambda row: (len(str(row[0])), str(row[0])))
    pairs: dict[str, list[Turn]] = {}
    for _, facts in rows[: 8 * count]:
        turns = interaction.sample_turns(facts)
        # The first turn is paired with the first of another role, or else the next one.
        others = [turn for turn in turns if turn.role != turns[0].role] or turns[1:]
        if others:
            pairs[str([turns[0], others[0]])] = [turns[0], others[0]]
    if not pairs:
        raise CertificateError(
            f"{type(interaction).__name__}.sample_turns gives fewer than two conversations, so "
            "that nothing can be "
            "measured. Have it return the opening turns of two."
        )
    chosen = list(pairs.values())[:count]
    return interaction.new_game(rows[0][1]).record, (chosen * count)[:count]


def forward(
    compute: Callable[[TensorDict], Any], columns: TensorDict, temperature: float, **flags: Any
) -> Any:
    """Ask verl's workers about a batch, with a game's three forms in one micro-batch; they raise
    for MRoPE.
    """
    names = [
        "prompts",
        "responses",
        "input_ids",
        "position_ids",
        "response_mask",
        "loss_mask",
        "role_ids",
    ]
    batch = columns.select(*names, TOKEN_ROLES, strict=False).clone()
    sizes = {"global_batch_size": len(batch), "micro_batch_size_per_gpu": len(FORMS)}
    tensordict_utils.assign_non_tensor(
        batch, calculate_entropy=False, temperature=temperature, **sizes, **flags
    )
    try:
        output = compute(batch)
        return output.get() if hasattr(output, "futures") else output
    except Exception as error:
        reason = str(error).strip().splitlines()[-1]
        raise CertificateError(
            f"the model cannot run a row of two contexts whose position ids restart ({reason}). "
            "Set actor_rollout_ref."
            "model.use_remove_padding=True if it is not, use a model with one position per token, "
            "or set "
            "selfplay.context=shared."
        ) from error


def _pass(
    trainer: Any,
    columns: TensorDict,
    compute: Callable[[TensorDict], Any],
    column: str,
    **flags: Any,
) -> tuple[Sequence[torch.Tensor], Mapping[str, Any]]:
    """A column of each row's response, and the metrics of the workers' loss."""
    output = forward(
        compute, columns, trainer.config.actor_rollout_ref.rollout.temperature, **flags
    )
    return response_from_nested(output[column], columns["response_mask"]).unbind(), output[
        "metrics"
    ]


def _credit_of_run(
    trainer: Any, batch: KVBatchMeta, rows: list[dict[str, Any]], roles: Mapping[str, int]
) -> Measure:
    """The claim on credit, through the trainer's own step from rewards to advantages."""
    generator = torch.Generator().manual_seed(RANDOM_SEED)
    noise = [0.1 * torch.randn(len(row["responses"]), generator=generator) for row in rows]

    def assign(
        rewards: list[torch.Tensor], drift: list[torch.Tensor]
    ) -> Mapping[str, list[torch.Tensor]]:
        fields = []
        for row, reward, d, n in zip(rows, rewards, drift, noise, strict=True):
            log_probs = {
                "old_log_probs": n - 1.0,
                "rollout_log_probs": n - 1.0 - d,
                "ref_log_prob": n - 1.1,
            }
            fields.append(
                {
                    "rm_scores": reward,
                    "values": n,
                    "response_mask": row["response_mask"],
                    **log_probs,
                }
            )
        tq.kv_batch_put(
            keys=batch.keys, partition_id=PARTITION, fields=list_of_dict_to_tensordict(fields)
        )
        baselines = copy.deepcopy(trainer.credit.baselines)
        controller = copy.deepcopy(vars(trainer).get("kl_ctrl_in_reward"))
        trainer.assign_credit(batch, {})
        trainer.credit.baselines.clear()
        trainer.credit.baselines.update(baselines)
        if controller is not None:
            trainer.kl_ctrl_in_reward = controller
        written = read_columns(batch, *CREDITED)
        # a TensorDict
        return {name: list(written[name].unbind()) for name in written.keys()}  # noqa: SIM118

    return credit(
        trainer.config.algorithm.adv_estimator, assign, [row["role_ids"] for row in rows], roles
    )


# -- the claims: each compares numbers that the run computed itself --------------------------------


def isolation(
    of: str, columns: Sequence[torch.Tensor], games: Sequence[list[TrajectoryTurn]]
) -> Measure:
    """Compare the second turn's numbers, log-probs or values (T,) per row, in the three forms of
    each game.
    """
    # Each (tokens,): those of all games' second turns in one of the forms.
    packed, alone, joined = (
        torch.cat(
            [
                rows[-len(turns[1].response_ids) :].double()
                for rows, turns in zip(form, games, strict=True)
            ]
        )
        for form in (columns[number :: len(FORMS)] for number in range(len(FORMS)))
    )
    alone_gap, joined_gap = (
        (packed - alone).abs().mean().item(),
        (packed - joined).abs().mean().item(),
    )
    # Equal to one conversation is a leak, unless nothing differs at all, as in a critic that
    # answers 0 everywhere. The floor keeps the number finite: other numbers are no metrics.
    value = alone_gap / max(joined_gap, 1e-9)
    cause = (
        "These are the numbers of one conversation: position ids do not restart, or nothing reads "
        "that they do."
        if value > 1
        else "Part of its layers ignore that position ids restart. Use a model with full or "
        "sliding-window attention."
    )
    return Measure(
        "isolation",
        of,
        value,
        ISOLATION_LIMIT,
        {"gap_to_alone": alone_gap, "gap_to_joined": joined_gap},
        f"the {of} reads across the border of the private contexts: on the second context's tokens "
        "its numbers differ "
        f"by {alone_gap:.3g} on average from those of that context alone, and by {joined_gap:.3g} "
        "from those of "
        f"one conversation. {cause}",
    )


def probe_loss(
    loss_fn: Callable[..., Any],
    roles: Mapping[str, int],
    model_output: Any,
    data: Any,
    dp_group: Any = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """In place of the run's loss, on a worker: what one role's numbers change in its gradient for
    the other role.

    The gradient is taken with respect to each token's log-prob, of a micro-batch as if it were all.
    For each role (name and id) it is taken again with the role's advantages and old log-probs
    changed, without the role's tokens, and with each of them counted twice. Returns a loss of 0 and
    two metrics per role: ``coupling``, the largest change of the other role's gradient, and
    ``signal``, the largest of it.
    """
    log_probs = model_output["log_probs"]
    actual = no_padding_2_padding(log_probs, data).detach()
    mask = data["response_mask"].to_padded_tensor(0)
    role_ids = data["role_ids"].to_padded_tensor(0)
    generator = torch.Generator().manual_seed(RANDOM_SEED)
    advantages = torch.randn(mask.shape, generator=generator).to(actual)
    drift = 0.05 * torch.randn(mask.shape, generator=generator).to(actual)

    def gradient(
        advantages: torch.Tensor, drift: torch.Tensor, times: torch.Tensor
    ) -> torch.Tensor:
        leaf = log_probs.values().detach().clone().requires_grad_()
        changed = {
            "advantages": advantages,
            "old_log_probs": actual - drift,
            "ref_log_prob": actual - 0.1,
            "rollout_is_weights": torch.ones_like(actual),
            ANCHOR_COLUMN: torch.full_like(actual, 0.1) * (role_ids > 0) * times,
            "response_mask": mask * times,
        }
        nested = {
            name: response_to_nested(column, data["response_mask"])
            for name, column in changed.items()
        }
        probe = data.copy().update(nested)
        counts = {TOKEN_COUNTS: token_counts(probe)}
        tensordict_utils.assign_non_tensor(
            probe, batch_num_tokens=int((mask * times).sum()), dp_size=1, **counts
        )
        with torch.enable_grad():
            output = {
                "log_probs": torch.nested.nested_tensor_from_jagged(leaf, log_probs.offsets())
            }
            loss, _ = loss_fn(output, probe)
            (gradient,) = torch.autograd.grad(loss, leaf)
        by_row: torch.Tensor = no_padding_2_padding(gradient, data)
        return by_row

    def largest(column: torch.Tensor, where: torch.Tensor) -> float:
        return column[where].abs().max().item() if where.any() else 0.0  # NaN if one is NaN

    once = torch.ones_like(mask)
    before = gradient(advantages, drift, once)
    metrics = {}
    for role, number in roles.items():
        own = role_ids == number
        other = (mask > 0) & ~own
        others = [
            gradient(
                torch.where(own, 1 - 3 * advantages, advantages), torch.where(own, 1.0, drift), once
            ),
            *(gradient(advantages, drift, torch.where(own, times, once)) for times in (0, 2)),
        ]
        changes = [largest(after - before, other) for after in others]
        metrics[f"{role}/coupling"] = float(np.max(changes))  # unlike max(), NaN if one is NaN
        metrics[f"{role}/signal"] = largest(before, other)
    return log_probs.values().sum() * 0.0, metrics


def loss_measure(
    metrics: Mapping[str, Any], roles: Collection[str], trained: Collection[str]
) -> Measure:
    """The claim on the loss, from all that ``probe_loss`` gave: each role's effect on another
    ``trained`` one.
    """
    shares = {}
    for role in roles:
        coupling, signal = (
            float(np.max(np.hstack(metrics[f"{role}/{of}"]))) for of in ("coupling", "signal")
        )
        if set(trained) - {role}:
            shares[role] = coupling / (
                signal or np.nan
            )  # Without a gradient nothing is shown: NaN, no claim holds.
    return _coupling(
        "loss",
        "actor",
        shares,
        "{role}'s advantages, drift or tokens change the gradient of the other role's tokens by "
        "{share:.3g} of its "
        "largest: this run's loss takes one number over both roles' tokens. Set "
        "selfplay.credit.loss=per_role.",
    )


def _coupling(claim: str, of: str, shares: Mapping[str, float], problem: str) -> Measure:
    """A measure of how much each role's numbers change the other's; ``problem`` is about the worse
    one.
    """
    role = max(shares, key=lambda name: np.nan_to_num(shares[name], nan=np.inf))
    problem = "the " + problem.format(role=role, share=shares[role])
    return Measure(claim, of, shares[role], COUPLING_LIMIT, shares, problem)


CREDITED = ("advantages", "response_mask", "rollout_is_weights")


def credit(
    of: str,
    assign: Callable[[list[torch.Tensor], list[torch.Tensor]], Mapping[str, list[torch.Tensor]]],
    role_ids: Sequence[torch.Tensor],
    roles: Mapping[str, int],
) -> Measure:
    """Measure how one role's rewards and log-prob drift change the numbers that the other role is
    trained with.

    ``assign`` gives the ``CREDITED`` columns of the run's estimator ``of`` from rewards and from
    the drift of the rollout's log-probs, per row (T,), as ``role_ids``. ``roles`` are those that
    are measured, each with its id.
    """
    generator = torch.Generator().manual_seed(RANDOM_SEED)
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
        own = [ids == number for ids in role_ids]
        other = torch.cat([(ids > 0) & (ids != number) for ids in role_ids])
        after = assign(
            # The rows' order by reward turns round, so that ranks and signs change as well as
            # sizes.
            [torch.where(o & (r != 0), 1 - 3 * r, r) for o, r in zip(own, rewards, strict=True)],
            [torch.where(o, 1.0, d) for o, d in zip(own, drift, strict=True)],
        )
        shares[role] = 0.0
        for name in before:
            was, now = (
                torch.cat(columns)[other].float() for columns in (before[name], after[name])
            )
            change, largest = (now - was).abs().max().item(), was.abs().max().item()
            shares[role] = max(shares[role], change / (largest or 1.0))
    return _coupling(
        "credit",
        of,
        shares,
        "{role}'s rewards or log-probs change what the other role is trained with by {share:.3g} "
        "of its largest "
        f"advantage: algorithm.adv_estimator={of} or algorithm.rollout_correction takes one number "
        "over both roles. "
        "Set algorithm.adv_estimator to a role_ estimator and correct by token.",
    )
