"""Loaded into a run's processes by VERL_USE_EXTERNAL_MODULES=probe: looks into a run, or spoils its
weight push.

``PROBE_TENSORS`` names a file that gets the first step's log-probs; ``PROBE_PUSH`` is ``off`` (no
push after the first), ``no-flush`` (a push that leaves the prefix cache as it is) or ``swapped``
(each role gets the other's adapter).
"""

import medserl_agentloop.plugin  # noqa: F401  # first, so that what is done here comes last

# isort: split
import os
from typing import Any

import ray
import torch
import transfer_queue as tq
from verl.workers.rollout.base import _ROLLOUT_REGISTRY

PUSH = os.environ.get("PROBE_PUSH")

if PUSH:
    _ROLLOUT_REGISTRY[("sglang", "async")] = "spoilt_push.SpoiltAdapter"

if ray.is_initialized() and "PROBE_TENSORS" in os.environ:
    from medserl_agentloop.core.trainer import SelfPlayTrainer

    compute_old_log_prob = SelfPlayTrainer._compute_old_log_prob
    NAMES = [
        "input_ids",
        "position_ids",
        "responses",
        "response_mask",
        "rollout_log_probs",
        "old_log_probs",
    ]

    def and_save(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = compute_old_log_prob(self, batch, metrics)
        if self.global_steps == 1:
            columns = tq.kv_batch_get(
                keys=batch.keys, partition_id=batch.partition_id, select_fields=NAMES
            )
            torch.save(
                {name: list(columns[name].unbind()) for name in NAMES}, os.environ["PROBE_TENSORS"]
            )
        return batch

    SelfPlayTrainer._compute_old_log_prob = and_save
