"""Before verl computes a log-prob, positions count from 0 in every private context of a game."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from medserl_agentloop.core import columns
from medserl_agentloop.core.trainer import PPOTrainer, SelfPlayTrainerSync

CONTEXTS = {"two turns": [3, 2], "one turn": [4], "three turns": [2, 2, 3]}


class Queue:
    """The transfer queue, in this process."""

    def __init__(self, rows: dict[str, dict[str, torch.Tensor]]) -> None:
        self.rows = rows

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        return list_of_dict_to_tensordict(
            [{name: self.rows[key][name] for name in select_fields if name in self.rows[key]} for key in keys]
        )

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: TensorDict) -> None:
        for name, column in fields.items():
            for key, row in zip(keys, column.unbind(), strict=True):
                self.rows[key][name] = row


def test_positions_restart_in_every_context_before_verl_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = {**CONTEXTS, "padding": [3, 2]}
    rows = {
        key: {
            "context_lengths": torch.tensor(contexts),
            "position_ids": torch.arange(sum(contexts)),  # as verl's agent loop counts them
            "old_log_probs": torch.zeros(2),
            "response_mask": torch.ones(2),
        }
        for key, contexts in lengths.items()
    }
    tags = [{"seq_len": sum(contexts), "is_padding": key == "padding"} for key, contexts in lengths.items()]
    batch = KVBatchMeta(keys=list(lengths), tags=tags, partition_id="train")
    monkeypatch.setattr(columns, "tq", Queue(rows))
    read: dict[str, list[int]] = {}

    def compute(self: Any, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        read.update({key: row["position_ids"].tolist() for key, row in rows.items()})
        return batch

    monkeypatch.setattr(PPOTrainer, "_compute_old_log_prob", compute)
    trainer: Any = object.__new__(SelfPlayTrainerSync)
    trainer.selfplay = SimpleNamespace(adapters="shared")
    trainer._compute_old_log_prob(batch, {})
    assert read == {
        "two turns": [0, 1, 2, 0, 1],
        "one turn": [0, 1, 2, 3],
        "three turns": [0, 1, 0, 1, 0, 1, 2],
        "padding": [0, 1, 2, 3, 4],
    }
