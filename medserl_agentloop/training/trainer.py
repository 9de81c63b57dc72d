"""The trainer: verl's own, taught the three things the game needs.

It restarts ``position_ids`` at each private context before any log-probability is computed, it
keeps the roles' advantages and losses apart, and it writes the games. Chosen by
``trainer.v1.trainer_mode=selfplay_sync``.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.trainer.ppo.ray_trainer import apply_kl_penalty
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer
from verl.workers.utils.padding import response_to_nested

from medserl_agentloop.config import check_run
from medserl_agentloop.game.metrics import role_metrics
from medserl_agentloop.game.records import GameRecord
from medserl_agentloop.game.types import Role
from medserl_agentloop.prompting import load_profile
from medserl_agentloop.rollout.encoding import ChatEncoder
from medserl_agentloop.rollout.trajectory import GAME_KEY
from medserl_agentloop.training.advantages import ROLE_ESTIMATORS
from medserl_agentloop.training.dataset_check import check_dataset
from medserl_agentloop.training.rollout_servers import RolloutServerDied, dead_servers, watched
from medserl_agentloop.training.step_file import GAMES_FILE, METRICS_FILE, StepFile


class SelfPlayMixin:
    """What self-play adds to a trainer of verl's; mixed in before it."""

    def __init__(self, config: Any) -> None:
        self.selfplay = check_run(config)
        self.games_file = StepFile(Path(self.selfplay.records) / GAMES_FILE)
        self.metrics_file = StepFile(Path(self.selfplay.records) / METRICS_FILE)
        super().__init__(config)  # type: ignore[call-arg]  # verl's trainer comes next in the MRO

    def _init_dataloader(self) -> None:
        super()._init_dataloader()  # type: ignore[misc]
        trainer: Any = self
        data = trainer.config.data
        template_kwargs: Any = OmegaConf.to_container(
            OmegaConf.create(dict(data.get("apply_chat_template_kwargs") or {}))
        )
        encoder = ChatEncoder(trainer.tokenizer, load_profile(self.selfplay.profile), template_kwargs)
        for dataset, key in (
            (trainer.train_dataset, "data.train_files"),
            (trainer.val_dataset, "data.val_files"),
        ):
            line = check_dataset(
                dataset,
                f"{key}={data[key.removeprefix('data.')]}",
                self.selfplay,
                encoder,
                prompt_length=data.max_prompt_length,
                response_length=data.max_response_length,
            )
            print(f"[medserl] {line}", flush=True)

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()  # type: ignore[misc]
        step = self.global_steps  # type: ignore[attr-defined]
        if step:
            total = self.total_training_steps  # type: ignore[attr-defined]
            rest = "nothing is left to train" if step >= total else f"{total - step} steps are left"
            print(f"[medserl] resuming after step {step} of {total}: {rest}", flush=True)
        for file in (self.games_file, self.metrics_file):
            removed = file.cut_after(step)
            if removed:
                print(f"[medserl] {file.path}: removed {removed} lines of steps after {step}", flush=True)

    def fit(self, agent_loop_manager: Any) -> None:
        """verl's training loop; an error that a dead rollout server is behind names the server.

        Raises:
            RolloutServerDied: A rollout server's process ended.
        """
        try:
            with watched(self.llm_server_manager.get_replicas()):  # type: ignore[attr-defined]
                super().fit(agent_loop_manager)  # type: ignore[misc]
        except RolloutServerDied:
            raise
        except Exception as error:
            self._check_servers(error)
            raise

    def on_sample_end(self) -> None:
        # The games that a dying server had finished are not a batch to train on.
        self._check_servers()
        super().on_sample_end()  # type: ignore[misc]

    def _check_servers(self, error: Exception | None = None) -> None:
        dead = dead_servers(self.llm_server_manager.get_replicas())  # type: ignore[attr-defined]
        if dead:
            trainer: Any = self
            message = (
                f"{'; '.join(dead)} in step {trainer.global_steps}. The log says above what it said last. The same "
                f"command resumes from the last checkpoint in {trainer.config.trainer.default_local_dir}"
            )
            print(f"[medserl] {message}", flush=True)
            raise RolloutServerDied(message) from error

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        restart_positions(batch)
        return super()._compute_old_log_prob(batch, metrics)  # type: ignore[misc]

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """verl's own step with role-separated estimators; the rest of it is as upstream.

        Also narrows ``response_mask`` and ``loss_mask`` to the roles that are trained: verl weights
        its loss by the latter, so the other role leaves the token counts as well.
        """
        trainer: Any = self
        algorithm = trainer.config.algorithm
        if algorithm.adv_estimator not in ROLE_ESTIMATORS:  # verl's own, for comparison
            return super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        columns = tq.kv_batch_get(
            keys=batch.keys,
            partition_id=batch.partition_id,
            select_fields=[
                "uid",
                "response_mask",
                "role_ids",
                "rm_scores",
                "rollout_log_probs",
                "old_log_probs",
                "ref_log_prob",
                "values",
            ],
        )
        uids = np.array(columns.pop("uid").tolist(), dtype=object)
        role_rows = list(columns.pop("role_ids").unbind())
        lengths = columns["response_mask"]
        data = DataProto(batch=columns.to_padded_tensor(), non_tensor_batch={"uid": uids})
        role_ids = pad_role_ids(role_rows, data.batch["response_mask"])
        for role in Role:
            if not self.selfplay.trains(role):
                data.batch["response_mask"] *= role_ids != role.id

        data.batch["token_level_scores"] = data.batch["rm_scores"]
        if algorithm.use_kl_in_reward:
            data, kl_metrics = apply_kl_penalty(
                data, kl_ctrl=trainer.kl_ctrl_in_reward, kl_penalty=algorithm.kl_penalty
            )
            metrics.update(kl_metrics)
        else:
            data.batch["token_level_rewards"] = data.batch["token_level_scores"]

        correction = algorithm.get("rollout_correction", None)
        if correction is not None and "rollout_log_probs" in data.batch and not correction.get("bypass_mode", False):
            data, correction_metrics = compute_rollout_correction_and_add_to_batch(data, correction)
            metrics.update(correction_metrics)

        data.batch["advantages"], data.batch["returns"] = ROLE_ESTIMATORS[algorithm.adv_estimator](
            data.batch["token_level_rewards"],
            data.batch["response_mask"],
            role_ids,
            index=uids,
            gamma=algorithm.gamma,
        )
        metrics.update(advantage_metrics(data.batch["advantages"], data.batch["response_mask"], role_ids))

        data.batch["loss_mask"] = data.batch["response_mask"]
        written = ["advantages", "returns", "response_mask", "loss_mask"]
        written += [c for c in ("token_level_rewards", "rollout_is_weights") if c in data.batch]
        nested = {name: response_to_nested(data.batch[name], lengths) for name in written}
        return tq.kv_batch_put(
            keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(nested, batch_size=len(batch))
        )

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, Any], sample_batch_size: int) -> KVBatchMeta:
        batch = super()._step_once(metrics, timing_raw, sample_batch_size)  # type: ignore[misc]
        records = self._read_records(batch)
        self.games_file.append(record.to_json() for record in records)
        metrics.update(role_metrics(records))
        # verl logs a game whose worker crashed and trains on with the rest: here it is at least counted.
        lost = sample_batch_size * self.config.actor_rollout_ref.rollout.n - len(records)  # type: ignore[attr-defined]
        if lost:
            metrics["selfplay/lost_games"] = float(lost)
        return batch

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        """One training step of verl's; its metrics are on disk before verl can checkpoint it.

        verl adds its own data and timing metrics later, for its loggers.
        """
        started = time.monotonic()
        batch = super().step(metrics, timing_raw)  # type: ignore[misc]
        step, total = self.global_steps, self.total_training_steps  # type: ignore[attr-defined]
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float, np.number))}
        numbers |= {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()}
        numbers["timing_s/step"] = time.monotonic() - started
        self.metrics_file.append([{"step": step, **numbers}])
        print(f"[medserl] step {step}/{total}: {step_line(numbers)}", flush=True)
        return batch

    def _read_records(self, batch: KVBatchMeta) -> list[GameRecord]:
        keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
        columns = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
        records = [GameRecord.model_validate(extra[GAME_KEY]) for extra in list(columns["extra_fields"])]
        for record in records:
            record.step = self.global_steps  # type: ignore[attr-defined]
        return records


@register_trainer("selfplay_sync")
class SelfPlayTrainerSync(SelfPlayMixin, PPOTrainerSync):  # type: ignore[misc]  # verl is untyped
    """Self-play on verl's synchronous trainer."""

    # verl's trainer branches on `self.trainer_mode == "sync"` (trainer_base.py): to it, this is that mode.
    trainer_mode = property(lambda self: "sync", lambda self, _: None)


def step_line(metrics: dict[str, float]) -> str:
    """The numbers that say whether a step is healthy, on one line; what a step lacks is left out."""
    shown = (
        ("lost games", "selfplay/lost_games"),
        ("attacker parsed", "selfplay/attacker/parse_rate"),
        ("valid", "selfplay/attacker/valid_rate"),
        ("undetected", "selfplay/attacker/success_rate"),
        ("reward", "selfplay/attacker/reward"),
        ("assessor parsed", "selfplay/assessor/parse_rate"),
        ("accuracy", "selfplay/assessor/accuracy"),
        ("reward", "selfplay/assessor/reward"),
        ("grad norm", "actor/grad_norm"),
        ("rollout/actor prob diff", "training/rollout_probs_diff_max"),
        ("seconds", "timing_s/step"),
    )
    return ", ".join(f"{label} {metrics[name]:.3g}" for label, name in shown if name in metrics)


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


def advantage_metrics(
    advantages: torch.Tensor, response_mask: torch.Tensor, role_ids: torch.Tensor
) -> dict[str, float]:
    """Mean and spread of each role's advantages over its trained tokens, and how many there are."""
    metrics: dict[str, float] = {}
    for role in Role:
        values = advantages[(role_ids == role.id) & (response_mask > 0)]
        metrics[f"selfplay/{role.value}/trained_tokens"] = float(values.numel())
        if values.numel():
            metrics[f"selfplay/{role.value}/advantage_mean"] = values.mean().item()
            metrics[f"selfplay/{role.value}/advantage_std"] = values.std(unbiased=False).item()
    return metrics
