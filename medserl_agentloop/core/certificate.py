"""The certificate of a run: isolation, credit and loss, measured before the first update.

A model, an estimator or a loss that couples the roles trains without an error. So each claim is
measured on a few two-turn games, with forward passes of the run's own workers and the trainer's own
step from rewards to advantages. Nothing is generated, and the run's state does not change.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.utils.padding import response_from_nested

from medserl_agentloop.core.columns import ANCHOR_COLUMN, read_columns
from medserl_agentloop.core.encoding import ChatEncoder
from medserl_agentloop.core.interaction import Interaction, Turn
from medserl_agentloop.core.records import GameRecord
from medserl_agentloop.core.trajectory import Trajectory, TrajectoryTurn

CERTIFICATE_FILE = "certificate.json"
PARTITION = "certificate"

ISOLATION_LIMIT = 0.1
"""Tiny models on a CPU: at most 5e-6 where the contexts are apart in fp32, and 0.011 in bf16; 0.28
to 0.41 where some layers carry state across; 90 and more where positions do not restart.
"""

COUPLING_LIMIT = 1e-5  # exact zero is usual

LOG_PROB = -1.0  # of every token, as in the probe of the loss

CREDITED = ("advantages", "response_mask", "rollout_is_weights")

Game = Sequence[TrajectoryTurn]
Row = dict[str, Any]
Numbers = Mapping[str, Sequence[torch.Tensor]]  # columns by name, with a tensor (T,) per row


@dataclass(frozen=True)
class Measure:
    """One claim, measured."""

    claim: str  # isolation, credit or loss
    of: str  # the actor, the critic, an estimator
    value: float  # a share
    limit: float
    details: Mapping[str, float]  # the numbers behind the value
    problem: str  # said if the claim does not hold

    @property
    def holds(self) -> bool:
        return self.value <= self.limit  # NaN does not


class CertificateError(RuntimeError):
    """A claim of the run fails; the message names the claim and the cause."""


@dataclass(frozen=True)
class Certificate:
    """All measures of one start of a run at ``step``."""

    measures: Sequence[Measure]
    step: int
    games: int
    seconds: float
    not_claimed: Mapping[str, str] = field(default_factory=dict)  # claims, and why

    @property
    def problems(self) -> list[str]:
        return [measure.problem for measure in self.measures if not measure.holds]

    @property
    def metrics(self) -> dict[str, float]:
        return {f"selfplay/certificate/{m.claim}/{m.of}": m.value for m in self.measures}

    def __str__(self) -> str:
        parts = [f"{m.claim} of {m.of}: {m.value:.2g}, limit {m.limit:g}" for m in self.measures]
        parts += [f"{claim} not claimed ({reason})" for claim, reason in self.not_claimed.items()]
        parts.append("DOES NOT HOLD" if self.problems else "holds")
        return f"{'; '.join(parts)}, {self.seconds:.1f} s"

    def write(self, folder: str | Path) -> Path:
        path = Path(folder) / CERTIFICATE_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        written = asdict(self) | {"holds": not self.problems}
        for measure, row in zip(self.measures, written["measures"], strict=True):
            row |= {"holds": measure.holds, "problem": None if measure.holds else measure.problem}
        path.write_text(json.dumps(written, indent=1))
        return path


# -- the games that are measured, as rows of a training batch --------------------------------------


def sample_games(
    interaction: Interaction[Any, Any], dataset: Any, encoder: ChatEncoder, count: int
) -> list[Game]:
    """Make ``count`` games of two opening turns from the shortest rows, repeated if too few.

    Every role answers with the next game's text, so that a leak is as visible as possible.
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
        name = type(interaction).__name__
        raise CertificateError(
            f"{name}.sample_turns gives the turns of fewer than two conversations"
        )
    chosen = (list(pairs.values())[:count] * count)[:count]
    prompts = [first.prompt for first, _ in chosen]
    texts = ["\n".join(of.data.values()) or of.messages[-1]["content"] for of in prompts]
    answers = [encoder.encode_text(text) for text in (*texts[1:], texts[0])]
    return [
        [TrajectoryTurn(turn.role, encoder.opening(turn).ids, ids, None) for turn in turns]
        for turns, ids in zip(chosen, answers, strict=True)
    ]


@dataclass(frozen=True)
class Probe:
    """Games of two turns as rows of a training batch."""

    games: Sequence[Game]
    roles: Sequence[str]  # of the kind of game
    trained: Collection[str]  # of these
    pad_token_id: int = 0

    @property
    def measured(self) -> list[str]:
        """The roles that have a turn in these games."""
        return list(dict.fromkeys(turn.role for turn in self.games[0]))

    def forms(self) -> list[Row]:
        """Return each game as three rows: packed, the second context alone, one conversation."""
        return [
            self._row(turns, isolated)
            for game in self.games
            for turns, isolated in ((game, True), (game[1:], True), (game, False))
        ]

    def rows(self, longer: str | None = None, absent: str | None = None) -> list[Row]:
        """Return each game as a packed row with rewards, advantages and log-probs.

        All turns use half of their tokens; the role ``longer`` uses all of them and other numbers.
        Tokens of the role ``absent`` do not count.
        """
        rows = []
        for number, game in enumerate(self.games):
            row = self._row([turn if turn.role == longer else _half(turn) for turn in game])
            role_ids = row["role_ids"]
            signal, drift, noise = torch.zeros(3, len(role_ids))
            counted = (role_ids > 0).long()
            for of, role in enumerate(self.roles, start=1):
                own = role_ids == of
                # No role's draws depend on the tokens of another one.
                draws = torch.Generator().manual_seed(number * len(self.roles) + of)
                drawn = torch.randn(3, int(own.sum()), generator=draws)
                signal[own], drift[own], noise[own] = drawn[0], 0.05 * drawn[1], 0.1 * drawn[2]
                if role == longer:
                    # Their order is reversed, so that ranks and signs change as well as sizes.
                    signal[own], drift[own], noise[own] = 1 - 3 * signal[own], 1.0, -1.0
                if role == absent:
                    counted[own] = 0
            row |= {
                **dict.fromkeys(("rm_scores", "advantages"), signal),
                **dict.fromkeys(("response_mask", "loss_mask"), row["response_mask"] * counted),
                "values": noise,
                "old_log_probs": LOG_PROB + noise,
                "rollout_log_probs": LOG_PROB + noise - drift,
                "ref_log_prob": LOG_PROB + noise - 0.1,
                ANCHOR_COLUMN: 0.1 * counted,
            }
            rows.append(row)
        return rows

    def numbers_of(
        self, roles: Sequence[str], rows: Sequence[Row], columns: Numbers
    ) -> dict[str, torch.Tensor]:
        """Return the numbers (tokens,) of these roles' tokens in each column."""
        where = [torch.isin(row["role_ids"], self._ids(roles)) for row in rows]
        return {
            name: torch.cat([of[own].double() for of, own in zip(column, where, strict=True)])
            for name, column in columns.items()
        }

    def _row(self, turns: Game, isolated: bool = True) -> Row:
        trajectory = Trajectory(self.roles, isolated, has_log_probs=False, turns=list(turns))
        output = trajectory.to_output(GameRecord(), self.pad_token_id)
        role_ids = torch.tensor(output.role_ids)
        mask = torch.isin(role_ids, self._ids(self.trained)).long()
        tokens = [*output.prompt_ids, *output.response_ids]
        return {
            "kind": output.kind,
            "prompts": torch.tensor(output.prompt_ids),
            "responses": torch.tensor(output.response_ids),
            "input_ids": torch.tensor(tokens),
            "position_ids": torch.arange(len(tokens)),
            "role_ids": role_ids,
            "context_lengths": torch.tensor(output.context_lengths),
            **dict.fromkeys(("response_mask", "loss_mask"), mask),
        }

    def _ids(self, roles: Collection[str]) -> torch.Tensor:
        return torch.tensor([self.roles.index(role) + 1 for role in roles])


def _half(turn: TrajectoryTurn) -> TrajectoryTurn:
    return replace(turn, response_ids=turn.response_ids[: (len(turn.response_ids) + 1) // 2])


# -- the run that is measured ----------------------------------------------------------------------


def certify(trainer: Any, encoder: ChatEncoder) -> Certificate:
    """Measure a run's claims on its own running workers."""
    started, selfplay, roles = time.monotonic(), trainer.selfplay, trainer.game.roles
    # Two games per worker, so that they divide evenly among any number of data-parallel ranks.
    count = 2 * trainer.actor_rollout_wg.world_size
    games = sample_games(trainer.interaction, trainer.train_dataset, encoder, count)
    trained = [role for role in roles if selfplay.trains(role)]
    probe = Probe(games, roles, trained, trainer.tokenizer.pad_token_id)
    measures, not_claimed = [], {}
    if selfplay.context == "isolated":
        with _queued(trainer, probe.forms()) as batch:
            for of, compute, column, flags in _models(trainer):
                numbers = _asked(trainer, batch, compute, column, compute_loss=False, **flags)
                measures.append(isolation(of, numbers, games))
    else:
        not_claimed["isolation"] = f"selfplay.context={selfplay.context}"
    if len(probe.measured) > 1:
        estimator = trainer.config.algorithm.adv_estimator
        measures.append(coupling("credit", estimator, probe, partial(_credited, trainer)))
        measures.append(coupling("loss", "actor", probe, partial(_gradients, trainer)))
    else:
        not_claimed |= dict.fromkeys(("credit", "loss"), "the game has only one role")
    seconds = time.monotonic() - started
    return Certificate(measures, trainer.global_steps, count, seconds, not_claimed)


@contextmanager
def _queued(trainer: Any, rows: Sequence[Row]) -> Iterator[KVBatchMeta]:
    """A batch of these rows in verl's queue, in prompt groups of two, as in training."""
    uids = [uuid4().hex for _ in rows[::2]]
    # verl reads uid, session and index out of a key (trainer/ppo/v1/utils.py).
    keys = [f"{uids[number // 2]}_{number % 2}_0" for number in range(len(rows))]
    tags = [{"seq_len": len(row["input_ids"])} for row in rows]
    fields = [{**row, "uid": uids[number // 2]} for number, row in enumerate(rows)]
    columns = list_of_dict_to_tensordict(fields)
    tq.kv_batch_put(keys=keys, partition_id=PARTITION, tags=tags, fields=columns)
    batch = KVBatchMeta(partition_id=PARTITION, keys=keys, tags=tags)
    try:
        trainer.write_contexts(batch)
        yield batch
    finally:
        tq.kv_clear(keys=keys, partition_id=PARTITION)


def _models(trainer: Any) -> Iterator[tuple[str, Callable[..., Any], str, dict[str, Any]]]:
    """Name, worker method, column and flags of each model that reads the batch."""
    workers = trainer.actor_rollout_wg
    yield "actor", workers.compute_log_prob, "log_probs", {}
    if trainer.use_reference_policy and trainer.ref_in_actor:
        yield "reference", workers.compute_log_prob, "log_probs", {"no_lora_adapter": True}
    elif trainer.use_reference_policy:
        yield "reference", trainer.ref_policy_wg.compute_ref_log_prob, "log_probs", {}
    if trainer.use_critic:
        yield "critic", trainer.critic_wg.infer_batch, "values", {}


def _asked(
    trainer: Any, batch: KVBatchMeta, compute: Callable[..., Any], column: str, **flags: Any
) -> Sequence[torch.Tensor]:
    columns = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION)
    temperature = trainer.config.actor_rollout_ref.rollout.temperature
    return forward(compute, columns, column, temperature=temperature, **flags)


def forward(
    compute: Callable[[TensorDict], Any], columns: TensorDict, column: str, **flags: Any
) -> Sequence[torch.Tensor]:
    """Ask verl's workers for a column of each row's response; they raise for MRoPE."""
    batch = columns.exclude("uid", "kind", "context_lengths").clone()
    sizes = {"global_batch_size": len(batch), "micro_batch_size_per_gpu": 2}
    tensordict_utils.assign_non_tensor(batch, calculate_entropy=False, **sizes, **flags)
    try:
        output = compute(batch)
        output = output.get() if hasattr(output, "futures") else output
    except Exception as error:
        reason = str(error).strip().splitlines()[-1]
        raise CertificateError(
            f"the model cannot run a row of two contexts whose position ids restart ({reason}). "
            "Set actor_rollout_ref.model.use_remove_padding=True if it is not, use a model with "
            "one position per token, or set selfplay.context=shared."
        ) from error
    answered: Sequence[torch.Tensor] = response_from_nested(
        output[column], columns["response_mask"]
    ).unbind()
    return answered


def _gradients(trainer: Any, rows: Sequence[Row]) -> Numbers:
    """The gradient of the run's loss in these rows, computed by the actor's workers."""
    workers = trainer.actor_rollout_wg
    workers.set_loss_fn(partial(gradient_of_loss, trainer.actor_loss))
    try:
        with _queued(trainer, rows) as batch:
            answer = _asked(trainer, batch, workers.compute_log_prob, "log_probs")
    finally:
        workers.set_loss_fn(trainer.actor_loss)
    return {"gradient": answer}


def gradient_of_loss(
    loss_fn: Callable[..., Any], model_output: Any, data: Any, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Replace the run's loss on a worker: return its gradient by each token's log-prob as
    ``log_probs``. All log-probs are ``LOG_PROB``, so the model's rounding does not matter.
    """
    log_probs = model_output["log_probs"]
    by_row = partial(torch.nested.nested_tensor_from_jagged, offsets=log_probs.offsets())
    leaf = torch.full_like(log_probs.values(), LOG_PROB).requires_grad_()
    with torch.enable_grad():
        loss, _ = loss_fn({"log_probs": by_row(leaf)}, data, dp_group)
        (gradient,) = torch.autograd.grad(loss, leaf)
    model_output["log_probs"] = by_row(gradient)
    return loss.detach(), {}


def _credited(trainer: Any, rows: Sequence[Row]) -> Numbers:
    """The trainer's credit for these rows' rewards and log-probs; its state does not change."""
    baselines = copy.deepcopy(trainer.credit.baselines)
    controller = copy.deepcopy(vars(trainer).get("kl_ctrl_in_reward"))
    with _queued(trainer, rows) as batch:
        trainer.assign_credit(batch, {})
        columns = {name: of.unbind() for name, of in read_columns(batch, *CREDITED).items()}
    trainer.credit.baselines.clear()
    trainer.credit.baselines.update(baselines)
    if controller is not None:
        trainer.kl_ctrl_in_reward = controller
    return columns


# -- the claims: each compares numbers that the run computed itself --------------------------------


def isolation(of: str, columns: Sequence[torch.Tensor], games: Sequence[Game]) -> Measure:
    """Compare the second turn's log-probs or values (T,) in the three forms of each game."""
    sizes = [len(turns[1].response_ids) for turns in games]
    # Each (tokens,): those of all games' second turns in one of the forms.
    packed, alone, joined = (
        torch.cat([row[-size:].double() for row, size in zip(columns[form::3], sizes, strict=True)])
        for form in range(3)
    )
    alone_gap = (packed - alone).abs().mean().item()
    joined_gap = (packed - joined).abs().mean().item()
    # Equal to one conversation is a leak, unless nothing differs at all, as in a critic that
    # answers 0 everywhere. The floor keeps the number finite: metrics must be finite.
    value = alone_gap / max(joined_gap, 1e-9)
    cause = (
        "These are the numbers of one conversation: position ids do not restart, or nothing acts "
        "on it."
        if value > 1
        else "Some of its layers ignore that position ids restart. Use a model with full or "
        "sliding-window attention."
    )
    problem = (
        f"the {of} reads across the border of the private contexts: its numbers for the second one "
        f"differ by {alone_gap:.3g} on average from those for that context alone, and by "
        f"{joined_gap:.3g} from those for one conversation. {cause}"
    )
    details = {"gap_to_alone": alone_gap, "gap_to_joined": joined_gap}
    return Measure("isolation", of, value, ISOLATION_LIMIT, details, problem)


COUPLED = {
    "credit": "the {role}'s rewards, log-probs or tokens change what the other role is trained "
    "with by {share:.3g} of its largest advantage: algorithm.adv_estimator={of} or "
    "algorithm.rollout_correction takes one number over both roles. Set algorithm.adv_estimator to "
    "a role_ estimator and correct by token.",
    "loss": "the {role}'s advantages, log-probs or tokens change the gradient of the other role's "
    "tokens by {share:.3g} of its largest: this run's loss takes one number over both roles' "
    "tokens. Set selfplay.credit.loss=per_role.",
}


def coupling(claim: str, of: str, probe: Probe, compute: Callable[[list[Row]], Numbers]) -> Measure:
    """Measure how far each role's numbers and tokens change other trained roles' credit.

    ``compute`` returns the ``CREDITED`` columns of rows by the run's estimator ``of``, or the
    gradient of its loss.
    """
    rows, shares = probe.rows(), dict[str, float]()
    before = compute(rows)
    for role in probe.measured:
        others = [other for other in probe.measured if other in probe.trained and other != role]
        if not others:
            continue
        was, changes = probe.numbers_of(others, rows, before), []
        for changed in (probe.rows(longer=role), probe.rows(absent=role)):
            now = probe.numbers_of(others, changed, compute(changed))
            for name, own in was.items():
                # Without a gradient nothing is shown: NaN, and the claim does not hold.
                largest = own.abs().max().item() or (np.nan if claim == "loss" else 1.0)
                changes.append((now[name] - own).abs().max().item() / largest)
        shares[role] = float(np.max(changes))  # unlike max(), NaN if one is NaN
    worse = max(shares, key=lambda role: np.nan_to_num(shares[role], nan=np.inf))
    problem = COUPLED[claim].format(role=worse, share=shares[worse], of=of)
    return Measure(claim, of, shares[worse], COUPLING_LIMIT, shares, problem)
