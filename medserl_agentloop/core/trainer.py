"""verl's trainer with what a game of several roles needs.

It restarts ``position_ids`` at each private context, keeps the roles' advantages and losses
separate, and has the games recorded. ``recipes/core.yaml`` names it
(``trainer.v1.trainer_mode=selfplay_sync``), its data set and its replay buffer.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf, open_dict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.dataset.rl_dataset import RLHFDataset

from medserl_agentloop.core import loss as losses
from medserl_agentloop.core import step_file
from medserl_agentloop.core.advantages import ROLE_ESTIMATORS, RoleCredit
from medserl_agentloop.core.certificate import CertificateError, certify
from medserl_agentloop.core.columns import (
    read_columns,
    restart_positions,
    without_padding,
    write_anchor,
    write_rewards,
    write_token_roles,
)
from medserl_agentloop.core.config import (
    ROLE_ADAPTERS,
    ROUTER_ADDRESS,
    SelfPlayConfig,
    game_class,
    refuse,
)
from medserl_agentloop.core.encoding import ChatEncoder
from medserl_agentloop.core.interaction import overlong
from medserl_agentloop.core.liveness import (
    ANSWER_WITHIN_S,
    NODE_DECLARED_DEAD_WITHIN_S,
    ProcessDied,
    dead_processes,
    game_processes,
    living_nodes,
    lost_nodes,
    watched,
)
from medserl_agentloop.core.metrics import HealthError
from medserl_agentloop.core.recorder import StepRecorder, finish_loggers, resume_wandb_run
from medserl_agentloop.core.run_check import RunConfig, check_run, machine, resume
from medserl_agentloop.core.trajectory import RECORD_KEY
from medserl_agentloop.terminal import announce

# verl's own buffer looks at its queue every 2 s, which is most of a tiny model's step
POLL_INTERVAL_S = 0.1
CHECK_INTERVAL_S = 5.0


class SelfPlayDataset(RLHFDataset):  # type: ignore[misc]  # verl is untyped
    """verl's data set. With ``data.filter_overlong_prompts`` it skips and counts rows whose game is
    too long.

    verl's own filter measures the column ``prompt``, but a game renders its own prompts.
    """

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        if not self.filter_overlong_prompts:
            return dataframe
        selfplay = SelfPlayConfig.from_run(OmegaConf.select(self.config, ".."))
        game = game_class(selfplay.game)(selfplay, ChatEncoder.of_run(self.tokenizer, self.config))
        rows = list(dataframe["extra_info"])
        plans = map(game.plan, rows)
        fitting = [number for number, plan in enumerate(plans) if not overlong(plan, self.config)]
        files, left_out = ", ".join(self.data_files), len(rows) - len(fitting)
        announce(f"{files}: data.filter_overlong_prompts leaves out {left_out} of {len(rows)} rows")
        return dataframe.select(fitting)


class SelfPlayReplayBuffer(ReplayBuffer):  # type: ignore[misc]  # verl is untyped
    """verl's replay buffer, which checks the run while it waits for games.

    ``check``, which the trainer sets, is called at most every 5 s; it raises to end the run. verl
    does not tell custom samplers about ``algorithm.filter_groups`` and
    ``sync_refill_failed_groups``, so neither has an effect here.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, poll_interval=POLL_INTERVAL_S)
        self.check: Callable[[], None] = lambda: None
        self._next_check = 0.0

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        if time.monotonic() >= self._next_check:
            self.check()
            self._next_check = time.monotonic() + CHECK_INTERVAL_S
        result: float = super()._wait_for_next_poll(partition_id, last_debug_time)
        return result

    def _materialize_batch(
        self, partition_id: str, prompts: list[str], games: dict[str, dict[str, Any]]
    ) -> KVBatchMeta:
        """verl's batch in the order of its rows, so that a run is repeatable."""
        rows = {uid: number for number, uid in enumerate(self.prompt_global_steps[partition_id])}

        def place(key: str) -> tuple[int, ...]:
            uid, *session_and_index = key.split("_")
            return rows.get(uid, -1), *map(int, session_and_index)

        in_order = {key: games[key] for key in sorted(games, key=place)}
        return super()._materialize_batch(partition_id, prompts, in_order)


@register_trainer("selfplay_sync")
class SelfPlayTrainer(PPOTrainerSync):  # type: ignore[misc]  # verl is untyped
    """verl's synchronous trainer, for games of several roles."""

    total_training_steps: int
    nodes: frozenset[str] = frozenset()  # Ray's ids of those that the run trains on
    run_state: dict[str, step_file.State]  # kept in checkpoints
    rows_begin_anew = False  # whether another run's checkpoint has other rows

    def __init__(self, config: Any) -> None:
        announce("Ray is up; reading the data")
        self.selfplay = check_run(config)
        self.game = game_class(self.selfplay.game)
        self.roles = dict(enumerate(self.game.roles, start=1))  # by their ids
        if self.selfplay.adapters == "per_role":
            weigh = self.selfplay.credit.role_weights.get
            rates = {r: weigh(r, 1.0) * self.selfplay.trains(r) for r in self.game.roles}
            with open_dict(config.actor_rollout_ref.model.lora) as lora:
                lora[ROLE_ADAPTERS] = rates
        self.files = step_file.RunFiles(self.selfplay.records)
        run = RunConfig(config, self.selfplay)
        self.logs_to_wandb = "wandb" in run.names("trainer.logger")
        if self.selfplay.certify != "only":
            refuse(found for found in resume.checkpoints(run) if isinstance(found, str))
            self.files.open(resume.config_text(run), config.trainer.default_local_dir)
        else:  # what is measured is the run as it begins, whatever its folder holds
            config.trainer.resume_mode = "disable"
        self.rows_begin_anew = resume.rows_begin_anew(run)
        self.credit = RoleCredit(config.algorithm, self.selfplay, self.game.roles)
        # verl would remove the best checkpoint, and forgets those from before a resume.
        self.kept_checkpoints = config.trainer.max_actor_ckpt_to_keep
        config.trainer.max_actor_ckpt_to_keep = config.trainer.max_critic_ckpt_to_keep = None
        # verl's trainer branches by its own name of the mode (trainer_base.py).
        config.trainer.v1.trainer_mode = "sync"
        super().__init__(config)

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        data = self.config.data
        self.encoder = encoder = ChatEncoder.of_run(self.tokenizer, data)
        self.interaction = self.game(self.selfplay, encoder)
        recorder = StepRecorder(self.interaction, self.files, to_wandb=self.logs_to_wandb)
        kept = {"baselines": self.credit.baselines, "counts": {}, "alarms": recorder.health.state}
        self.recorder, self.run_state = recorder, kept
        stop_strings = encoder.stop(self.interaction.stop_strings).get("stop", [])
        machine.check_stop_strings(stop_strings, self.config.actor_rollout_ref.rollout)
        for dataset, key, batch in (
            (self.train_dataset, "train_files", data.train_batch_size),
            (self.val_dataset, "val_files", 1),
        ):
            name = f"data.{key}={data[key]}"
            announce(machine.check_dataset(dataset, name, self.interaction, data, batch=batch))
        self.interaction.view.read_validation_set(self.val_dataset)
        announce("starting the workers: they import torch and load the model")

    def _setup(self) -> None:
        super()._setup()
        # verl tells only its reward workers; the agent loops, which start later, read the config.
        with open_dict(self.config.reward.reward_model) as served:
            served[ROUTER_ADDRESS] = self.reward_loop_manager.reward_router_address
        announce("the workers are up; measuring the certificate")
        # Workers start with verl's own loss and no knowledge of roles.
        actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        trained = [n for n, role in self.roles.items() if self.selfplay.trains(role)]
        apart = trained if self.selfplay.credit.loss == "per_role" else ()
        self.actor_loss = partial(losses.selfplay_loss, actor, apart)
        self.actor_rollout_wg.set_loss_fn(self.actor_loss)
        self._certify()

    def _certify(self) -> None:
        """Measure the run's claims; CertificateError if one fails, unless the run only warns."""
        certificate = certify(self, self.encoder)
        path = certificate.write(self.selfplay.records)
        for line in (f"{certificate} ({path})", *certificate.problems):
            announce(f"certificate: {line}")
        if certificate.problems and self.selfplay.certify != "warn":
            raise CertificateError(" ".join(certificate.problems))
        self._certificate_metrics = certificate.metrics

    def _val_metrics_update(
        self, sources: Any, uids: Any, facts: Any, *rest: Any, **more: Any
    ) -> dict[str, float]:
        # a validation without the games that raised would look like a complete one
        self.check_processes()
        metrics: dict[str, float] = super()._val_metrics_update(sources, uids, facts, *rest, **more)
        for numbers, line in self.interaction.view.validation_scores(sources, facts):
            metrics.update(numbers)
            announce(line)
        self.recorder.validation(self.global_steps, metrics)
        self._stop_if_nothing_got_better()
        return metrics

    def _stop_if_nothing_got_better(self) -> None:
        """End after this step if the best validation is too long ago."""
        own, step = self.selfplay, self.global_steps
        scores = step_file.read_scores(own.records, own.best_by)
        best, patience = step_file.best_step(scores), own.stop_after_evaluations
        since = sum(of > best for of in scores) if best is not None else 0
        if patience and since >= patience and step < self.total_training_steps:
            announce(
                f"step {step} is the last one: {since} validations since the best {own.best_by}, "
                f"in step {best} (selfplay.stop_after_evaluations)"
            )
            self.total_training_steps = step

    @property
    def _checkpoint_folder(self) -> Path:
        return Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"

    def _save_checkpoint(self) -> None:
        folder, own = self._checkpoint_folder, self.selfplay
        try:
            scores = step_file.read_scores(own.records, own.best_by)
            step_file.remove_old(folder.parent, self.global_steps, self.kept_checkpoints, scores)
            step_file.save_state(folder, self.run_state)
            super()._save_checkpoint()
        except Exception as error:  # on a full disk torch says "unexpected pos", and names no file
            free = shutil.disk_usage(folder.parent).free / 2**20
            raise RuntimeError(
                f"the checkpoint {folder} cannot be written ({type(error).__name__}); {free:.0f} "
                "MB are free there. Free some space if that is too little; the same command "
                "resumes from the previous checkpoint"
            ) from error

    def _load_checkpoint(self) -> None:
        own = self.config.trainer
        fresh = self.train_dataloader.state_dict() if self.rows_begin_anew else None
        chosen = own.resume_from_path if own.resume_mode == "resume_path" else None
        try:
            super()._load_checkpoint()
        except Exception as error:  # torch may raise anything for a damaged file
            raise ValueError(
                f"the checkpoint {chosen or self._checkpoint_folder} cannot be loaded "
                f"({type(error).__name__}). Resume from another one: set "
                "trainer.resume_mode=resume_path and trainer.resume_from_path"
            ) from error
        if fresh is not None:
            self.train_dataloader.load_state_dict(fresh)
            announce("the rows are not those of the checkpoint: they start over")
        step, total = self.global_steps, self.total_training_steps
        if step:
            for name in step_file.load_state(chosen or self._checkpoint_folder, self.run_state):
                announce(f"the checkpoint holds no {name}: they start over")
            rest = "nothing is left to train" if step >= total else f"{total - step} steps are left"
            announce(f"resuming after step {step} of {total}: {rest}")
        if self.selfplay.certify == "only":
            return
        self.files.resume_after(step)
        self._stop_if_nothing_got_better()
        run = RunConfig(self.config, self.selfplay)
        if step and resume.validation_is_missing(run, self.files, step, total):
            announce(f"the validation of step {step} was not done: it runs now")
            own.val_before_train = True
        if step < self.total_training_steps:
            step_file.write_prompts(self.selfplay.records, step + 1, self.interaction.prompts())

    def fit(self, agent_loop_manager: Any) -> None:
        """Run verl's training loop; ProcessDied names the dead process or node behind an error."""
        if self.selfplay.certify == "only":
            return
        self.nodes = living_nodes()
        # The wait for games would only sleep meanwhile, and a busy process may be asked again.
        self.replay_buffer.check = partial(self.check_processes, within_s=1.0)
        if self.logs_to_wandb:
            resume_wandb_run(Path(self.selfplay.records), resumed=self.global_steps > 0)
        exit_code = 1
        try:
            with watched(self.llm_server_manager.get_replicas()):
                super().fit(agent_loop_manager)
            exit_code = 0
        except ProcessDied:
            raise
        except Exception as error:
            self.check_processes(cause=error)
            raise
        finally:
            finish_loggers(getattr(self, "logger", None), exit_code)

    def check_processes(
        self, cause: Exception | None = None, within_s: float = ANSWER_WITHIN_S
    ) -> None:
        """Raise ProcessDied if a node was lost or a process that plays games died, RuntimeError if
        a game's code raised.
        """
        several = len(self.nodes) > 1
        dead = (several and lost_nodes(self.nodes)) or dead_processes(
            game_processes(self), within_s
        )
        if several and (dead or cause):
            # Ray declares a node lost later than its processes.
            dead = lost_nodes(self.nodes, NODE_DECLARED_DEAD_WITHIN_S) or dead
        if dead:
            message = (
                f"{'; '.join(dead)} in step {self.global_steps}. Its last output is above in the "
                "log. The same command resumes from the last checkpoint in "
                f"{self.config.trainer.default_local_dir}"
            )
            announce(message)
            raise ProcessDied(message) from cause

    def on_sample_end(self) -> None:
        # The games that are left when a process has died are not a batch to train on.
        self.check_processes()
        # SGLang's scheduler cannot sleep while it still generates what games gave up on.
        self.checkpoint_manager.abort_replicas()
        self.checkpoint_manager.resume_generation_replicas()
        super().on_sample_end()

    def write_contexts(self, batch: KVBatchMeta) -> None:
        """Restart positions and mark each token's role; also called by the certificate."""
        restart_positions(batch)
        if self.selfplay.adapters == "per_role":
            write_token_roles(batch)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self.write_contexts(batch)
        if self.selfplay.reuse_log_probs:
            return batch
        batch = super()._compute_old_log_prob(batch, metrics)
        fields = ("rollout_log_probs", "old_log_probs", "response_mask")
        columns = read_columns(batch, *fields).to_padded_tensor(0)
        # With verl's bypass_mode, old log-probs are the rollout's own, and there is no entropy.
        if "actor/entropy" in metrics and "rollout_log_probs" in columns:
            gaps = losses.context_gaps(*(columns[name] for name in fields))
            metrics.update(losses.context_leak_metrics(gaps))
        return batch

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = super()._compute_ref_log_prob(batch, metrics)
        # verl leaves it for the next readers, the critic and the actor's update.
        batch.extra_info.pop("no_lora_adapter", None)
        if anchors := self.selfplay.anchors(self.global_steps / self.total_training_steps):
            write_anchor(batch, {n: anchors.get(role, 0.0) for n, role in self.roles.items()})
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._settle(batch)
        return self.assign_credit(batch, metrics)

    def assign_credit(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Compute advantages from the rewards on the tokens; also called by the certificate."""
        algorithm, repeated = self.config.algorithm, self.interaction.repeated_roles
        if algorithm.adv_estimator not in ROLE_ESTIMATORS:  # verl's own, for comparison
            return super()._compute_advantage(batch, metrics)
        kl_controller = self.kl_ctrl_in_reward if algorithm.use_kl_in_reward else None
        batch, credit_metrics = self.credit.assign(batch, repeated, kl_controller)
        metrics.update(credit_metrics)
        return batch

    def _settle(self, batch: KVBatchMeta) -> None:
        """Complete the rewards that depend on earlier steps, in the records and on the tokens."""
        games = without_padding(batch)
        columns = read_columns(games, "extra_fields")
        records = [extra[RECORD_KEY] for extra in list(columns["extra_fields"])]
        self._records = dict(zip(games.keys, records, strict=True))

        def rewards() -> list[dict[int, Any]]:
            return [{n: of.reward(role) for n, role in self.roles.items()} for of in records]

        before = rewards()
        self.interaction.settle(records, self.run_state["counts"])
        pairs = zip(before, rewards(), strict=True)
        changed = [{n: now[n] for n in now if now[n] != was[n]} for was, now in pairs]
        if any(changed):
            write_rewards(games, changed)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = super()._update_actor(batch, metrics)
        metrics.update(losses.compared_metrics(metrics))
        return batch

    def _step_once(
        self, metrics: dict[str, Any], timing_raw: dict[str, Any], sample_batch_size: int
    ) -> KVBatchMeta:
        batch = super()._step_once(metrics, timing_raw, sample_batch_size)
        games = without_padding(batch)
        records = [self._records[key] for key in games.keys]
        role_ids = list(read_columns(games, "role_ids")["role_ids"].unbind())
        expected = sample_batch_size * self.config.actor_rollout_ref.rollout.n
        metrics.update(self.recorder.games(self.global_steps, records, role_ids, expected))
        return batch

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        """One training step; its metrics are on disk before verl's checkpoint. HealthError if an
        alarm stops it.
        """
        if self.recorder.stop_reason is not None:
            raise HealthError(self.recorder.stop_reason)
        started = time.monotonic()
        step, total = self.global_steps, self.total_training_steps
        batch = super().step(metrics, timing_raw)
        metrics.update(self._certificate_metrics)
        self._certificate_metrics = {}  # only for the first step after a start
        timing = {**timing_raw, "step": time.monotonic() - started}
        metrics.update(self.recorder.step(step, total, metrics, timing))
        if self.recorder.stop_reason is not None:
            save_freq = self.config.trainer.save_freq
            if save_freq > 0 and step % save_freq and step < total:  # after other steps verl saves
                self._save_checkpoint()
        return batch
