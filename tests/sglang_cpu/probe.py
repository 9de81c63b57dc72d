"""Loaded into a run's processes by VERL_USE_EXTERNAL_MODULES=probe: looks into a run, or spoils its weight push.

``PROBE_TENSORS`` names a file that gets the first step's log-probs; ``PROBE_PUSH`` is ``off`` (no push after the
first) or ``no-flush`` (a push that leaves the prefix cache as it is).
"""

import os
from typing import Any

import ray
import torch
import transfer_queue as tq
from verl.workers.rollout.base import _ROLLOUT_REGISTRY

import medserl_agentloop.plugin  # noqa: F401  # first, so that what is registered here comes last

PUSH = os.environ.get("PROBE_PUSH")

if PUSH:
    _ROLLOUT_REGISTRY[("sglang", "async")] = "spoilt_push.SpoiltAdapter"

if ray.is_initialized():
    from verl.trainer.ppo.v1 import register_trainer

    from medserl_agentloop.training.trainer import SelfPlayTrainerSync

    @register_trainer("selfplay_sync")
    class Probe(SelfPlayTrainerSync):
        def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
            batch = super()._compute_old_log_prob(batch, metrics)
            path = os.environ.get("PROBE_TENSORS")
            if path and self.global_steps == 1:
                names = [
                    "input_ids",
                    "position_ids",
                    "responses",
                    "response_mask",
                    "rollout_log_probs",
                    "old_log_probs",
                ]
                columns = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
                torch.save({name: list(columns[name].unbind()) for name in names}, path)
            return batch
