"""The certificate of a run: isolation, credit and loss, measured before the first update.

A model, an estimator or a loss that couples the roles trains without an error and reports success. So each claim is
measured on a few two-turn games, on the run's own workers and with its own settings: one forward pass of each of
actor, reference and critic, no generation. Called by the trainer; ``medserl certify`` runs it alone.
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

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics
from verl.utils import tensordict_utils
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.utils.padding import response_from_nested

from medserl_agentloop.core.claims import (
    CREDITED,
    FORMS,
    RANDOM_SEED,
    Measure,
    credit,
    isolation,
    loss_measure,
    probe_loss,
)
from medserl_agentloop.core.columns import TOKEN_ROLES, read_columns, restart_positions, write_token_roles
from medserl_agentloop.core.encoding import ChatEncoder
from medserl_agentloop.core.interaction import Interaction, Turn
from medserl_agentloop.core.loss import selfplay_loss
from medserl_agentloop.core.records import GameRecord
from medserl_agentloop.core.trajectory import Trajectory, TrajectoryTurn

CERTIFICATE_FILE = "certificate.json"
PARTITION = "certificate"


class CertificateError(RuntimeError):
    """A claim of the run does not hold; the message says which, and what the cause is."""


@dataclass(frozen=True)
class Certificate:
    """All measures of one start of a run, from ``games`` two-turn games, and why the other claims were not measured.

    ``step`` is that of the checkpoint, 0 at the start of training; ``seconds`` is wall time.
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
    """A game per pair of opening turns, without generation: everyone answers with the next pair's untrusted text.

    A model that sees the first turn expects its text again, so a leak shows as strongly as it can.
    """
    texts = ["\n".join(turns[0].prompt.data.values()) or turns[0].prompt.messages[-1]["content"] for turns in samples]
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
    """The columns of each game's three ``FORMS``, in this order, as verl's agent-loop worker writes them."""
    rows = []
    for turns in games:
        for isolated, form in ((True, turns), (True, turns[1:]), (False, turns)):
            trajectory = Trajectory(roles, isolated, has_log_probs=False, turns=form)
            output = trajectory.to_output(record, AgentLoopMetrics(), {}, pad_token_id)
            prompts, responses = torch.tensor(output.prompt_ids), torch.tensor(output.response_ids)
            role_ids = torch.tensor(output.role_ids)
            mask = sum((role_ids == roles.index(role) + 1).long() for role in trained)
            rows.append(
                {
                    "prompts": prompts,
                    "responses": responses,
                    "input_ids": torch.cat([prompts, responses]),
                    "position_ids": torch.arange(len(prompts) + len(responses)),
                    "response_mask": mask,
                    "loss_mask": mask,
                    "role_ids": role_ids,
                    "context_lengths": torch.tensor(output.context_lengths),
                    "kind": output.kind,
                }
            )
    return rows


def certify(trainer: Any, encoder: ChatEncoder) -> Certificate:
    """Measure the claims of a run, whose workers are up, on these workers. Changes nothing of the run."""
    started = time.monotonic()
    roles = trainer.game.roles
    # Two games per worker, so that they divide evenly among any number of data-parallel ranks.
    count = 2 * trainer.actor_rollout_wg.world_size
    record, samples = _short_samples(trainer.interaction, trainer.train_dataset, count)
    games = two_context_games(samples, encoder)
    trained = [role for role in roles if trainer.selfplay.trains(role)]
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
        if trainer.selfplay.adapters == "per_role":
            write_token_roles(batch)
        columns = tq.kv_batch_get(keys=keys, partition_id=PARTITION)
        measures, not_claimed = [], {}
        workers, compute_log_prob = trainer.actor_rollout_wg, trainer.actor_rollout_wg.compute_log_prob
        workers.set_loss_fn(partial(probe_loss, trainer.actor_config(), measured))
        try:
            log_probs, metrics = _pass(trainer, columns, compute_log_prob, "log_probs", compute_loss=True)
        finally:
            workers.set_loss_fn(partial(selfplay_loss, trainer.actor_config()))
        if trainer.selfplay.context == "isolated":
            measures.append(isolation("actor", log_probs, games))
            if trainer.use_reference_policy:
                compute, flags = compute_log_prob, {"no_lora_adapter": True}
                if not trainer.ref_in_actor:
                    compute, flags = trainer.ref_policy_wg.compute_ref_log_prob, {}
                reference, _ = _pass(trainer, columns, compute, "log_probs", compute_loss=False, **flags)
                measures.append(isolation("reference", reference, games))
            if trainer.use_critic:
                values, _ = _pass(trainer, columns, trainer.critic_wg.infer_batch, "values", compute_loss=False)
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
    return Certificate(measures, trainer.global_steps, len(games), time.monotonic() - started, not_claimed)


def _short_samples(interaction: Interaction[Any, Any], dataset: Any, count: int) -> tuple[GameRecord, list[list[Turn]]]:
    """A record, and the pairs of opening turns of ``count`` of the shortest rows, repeated if there are too few."""
    rows = list(zip(dataset.dataframe["prompt"], dataset.dataframe["extra_info"], strict=True))
    rows.sort(key=lambda row: (len(str(row[0])), str(row[0])))
    pairs: dict[str, list[Turn]] = {}
    for _, facts in rows[: 8 * count]:
        turns = interaction.sample_turns(facts)
        # Beside the first turn stands the first of another role, or else the next one.
        others = [turn for turn in turns if turn.role != turns[0].role] or turns[1:]
        if others:
            pairs[str([turns[0], others[0]])] = [turns[0], others[0]]
    if not pairs:
        raise CertificateError(
            f"{type(interaction).__name__}.sample_turns gives fewer than two conversations, so that nothing can be "
            "measured. Have it return the opening turns of two."
        )
    chosen = list(pairs.values())[:count]
    return interaction.new_game(rows[0][1]).record, (chosen * count)[:count]


def forward(compute: Callable[[TensorDict], Any], columns: TensorDict, temperature: float, **flags: Any) -> Any:
    """What verl's workers answer to a batch, a game's three forms in one micro-batch.

    They raise for models with positions of several dimensions (MRoPE).
    """
    names = ("prompts", "responses", "input_ids", "position_ids", "response_mask", "loss_mask", "role_ids")
    batch = columns.select(*names, *(name for name in (TOKEN_ROLES,) if name in columns)).clone()
    tensordict_utils.assign_non_tensor(
        batch,
        calculate_entropy=False,
        temperature=temperature,
        global_batch_size=len(batch),
        micro_batch_size_per_gpu=len(FORMS),
        **flags,
    )
    try:
        output = compute(batch)
        return output.get() if hasattr(output, "futures") else output
    except Exception as error:
        reason = str(error).strip().splitlines()[-1]
        raise CertificateError(
            f"the model cannot run a row of two contexts whose position ids restart ({reason}). Set actor_rollout_ref."
            "model.use_remove_padding=True if it is not, use a model with one position per token, or set "
            "selfplay.context=shared."
        ) from error


def _pass(
    trainer: Any, columns: TensorDict, compute: Callable[[TensorDict], Any], column: str, **flags: Any
) -> tuple[Sequence[torch.Tensor], Mapping[str, Any]]:
    """A column of each row's response, and the metrics of the workers' loss."""
    output = forward(compute, columns, trainer.config.actor_rollout_ref.rollout.temperature, **flags)
    return response_from_nested(output[column], columns["response_mask"]).unbind(), output["metrics"]


def _credit_of_run(trainer: Any, batch: KVBatchMeta, rows: list[dict[str, Any]], roles: Mapping[str, int]) -> Measure:
    """The claim on credit, through the trainer's own step from rewards to advantages."""
    generator = torch.Generator().manual_seed(RANDOM_SEED)
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
        tq.kv_batch_put(keys=batch.keys, partition_id=PARTITION, fields=list_of_dict_to_tensordict(fields))
        baselines = trainer.credit.baselines.to_dict()
        controller = copy.deepcopy(vars(trainer).get("kl_ctrl_in_reward"))
        trainer._compute_advantage(batch, {})
        trainer.credit.baselines.load_dict(baselines)
        if controller is not None:
            trainer.kl_ctrl_in_reward = controller
        written = read_columns(batch, *CREDITED)
        return {name: list(written[name].unbind()) for name in written.keys()}  # noqa: SIM118  # a TensorDict

    return credit(trainer.config.algorithm.adv_estimator, assign, [row["role_ids"] for row in rows], roles)
