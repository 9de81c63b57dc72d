"""The columns that know contexts and roles, and the loss that reads the anchor's."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.utils.losses import ppo_loss

from medserl_agentloop.core import columns
from medserl_agentloop.core.columns import ANCHOR_COLUMN, context_ids, selfplay_loss, stacked, token_roles
from medserl_agentloop.core.trainer import PPOTrainer, SelfPlayTrainerSync
from medserl_agentloop.testing.tiny import compose_run

CONFIG = omega_conf_to_dataclass(compose_run("+recipes=quickstart").actor_rollout_ref.actor)


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


def queued(rows: dict[str, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch, **lengths: int) -> KVBatchMeta:
    monkeypatch.setattr(columns, "tq", Queue(rows))
    tags = [{"seq_len": lengths.get(key, 0), "is_padding": key == "padding"} for key in rows]
    return KVBatchMeta(keys=list(rows), tags=tags, partition_id="train")


def test_positions_restart_in_every_context_before_verl_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = {"two": [3, 2], "one": [4], "three": [2, 2, 3], "padding": [3, 2]}
    rows = {
        key: {
            "context_lengths": torch.tensor(contexts),
            "position_ids": torch.arange(sum(contexts)),  # as verl's agent loop counts them
            "old_log_probs": torch.zeros(2),
            "response_mask": torch.ones(2),
        }
        for key, contexts in lengths.items()
    }
    batch = queued(rows, monkeypatch, **{key: sum(contexts) for key, contexts in lengths.items()})
    read: dict[str, list[int]] = {}

    def compute(self: Any, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        read.update({key: row["position_ids"].tolist() for key, row in rows.items()})
        return batch

    monkeypatch.setattr(PPOTrainer, "_compute_old_log_prob", compute)
    trainer: Any = object.__new__(SelfPlayTrainerSync)
    trainer.selfplay = SimpleNamespace(adapters="shared")
    trainer._compute_old_log_prob(batch, {})
    assert read == {
        "two": [0, 1, 2, 0, 1],
        "one": [0, 1, 2, 3],
        "three": [0, 1, 0, 1, 0, 1, 2],
        "padding": [0, 1, 2, 3, 4],
    }


def test_every_token_of_a_context_belongs_to_the_role_that_answers_in_it() -> None:
    roles = token_roles(torch.tensor([4, 3, 2]), torch.tensor([1, 1, 0, 2, 2, 0, 0]))
    assert roles.tolist() == [1, 1, 1, 1, 2, 2, 2, 0, 0]


def test_context_ids_of_a_row_count_its_contexts() -> None:
    assert context_ids(torch.tensor([4, 3]), 5).tolist() == [0, 0, 1, 1, 1]
    assert context_ids(torch.tensor([5]), 3).tolist() == [0, 0, 0]


def test_role_ids_have_the_shape_of_the_mask() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert stacked([torch.tensor([1, 2]), torch.tensor([2])], mask).tolist() == [[1, 2, 0], [2, 0, 0]]
    # verl pads with copies of a row: all its columns, but the response is one masked token.
    mask = torch.tensor([[1, 1], [0, 0]])
    assert stacked([torch.tensor([1, 2]), torch.tensor([1, 1, 1, 1, 2])], mask).tolist() == [[1, 2], [1, 1]]


# --- the anchor ---


def test_coefficients_follow_roles_and_leave_observations_and_void_games_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        "game": {"role_ids": torch.tensor([1, 1, 0, 2]), "response_mask": torch.tensor([1, 1, 0, 1])},
        "void": {"role_ids": torch.tensor([2, 2]), "response_mask": torch.tensor([0, 0])},
    }
    columns.write_anchor(queued(rows, monkeypatch), {1: 0.5, 2: 0.1})
    torch.testing.assert_close(rows["game"][ANCHOR_COLUMN], torch.tensor([0.5, 0.5, 0.0, 0.1]))
    assert rows["void"][ANCHOR_COLUMN].tolist() == [0.0, 0.0]


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def micro_batch(trained_tokens: int, anchor: list[list[float]] | None = None) -> tuple[dict[str, Any], TensorDict]:
    """Two games of 4 and 2 response tokens behind prompts of 1, as verl's engine passes them."""
    lengths = (4, 2)
    rows = {
        "prompts": [torch.zeros(1, dtype=torch.long)] * 2,
        "responses": [torch.zeros(n, dtype=torch.long) for n in lengths],
        "response_mask": [torch.tensor([1] + [0] * (n - 1)) for n in lengths],
        "old_log_probs": [torch.full((n,), -1.0) for n in lengths],
        "ref_log_prob": [torch.full((n,), -1.5) for n in lengths],
        "advantages": [torch.ones(n) for n in lengths],
    }
    if anchor is not None:
        rows[ANCHOR_COLUMN] = list(map(torch.tensor, anchor))
    data = TensorDict({name: nested(column) for name, column in rows.items()}, batch_size=2)
    tensordict_utils.assign_non_tensor(data, dp_size=1, batch_num_tokens=trained_tokens, global_batch_size=2)
    log_probs = nested([torch.full((n + 1,), -1.0, requires_grad=True) for n in lengths])
    return {"log_probs": log_probs}, data


def test_the_anchor_adds_its_share_of_kl_per_trained_token_to_verls_loss() -> None:
    plain, _ = ppo_loss(CONFIG, *micro_batch(trained_tokens=2))
    assert torch.equal(selfplay_loss(CONFIG, *micro_batch(trained_tokens=2))[0], plain)
    loss, metrics = selfplay_loss(CONFIG, *micro_batch(2, [[0.0, 0.0, 0.0, 0.1], [0.1, 0.1]]))
    # low_var_kl of log-probs -1.0 and -1.5: exp(-0.5) + 0.5 - 1, on three tokens.
    kl = torch.tensor(-0.5).exp() + 0.5 - 1
    torch.testing.assert_close(loss, plain + 3 * 0.1 * kl / 2)
    assert metrics["anchor_kl_loss"].aggregate() == pytest.approx(3 * 0.1 * kl.item() / 2)


def test_a_mini_batch_without_trained_tokens_costs_nothing_and_can_be_differentiated() -> None:
    loss, metrics = selfplay_loss(CONFIG, *micro_batch(trained_tokens=0))
    assert loss.item() == 0 and loss.requires_grad and metrics == {}
