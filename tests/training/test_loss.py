"""The anchor's column and its share of the loss."""

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import ppo_loss

from medserl_agentloop.core.loss import ANCHOR_COLUMN, anchor_coefficients, selfplay_loss
from medserl_agentloop.games.medical.types import Role
from medserl_agentloop.testing.tiny import compose_run

A, B = Role.ATTACKER.id, Role.ASSESSOR.id
ROLES = torch.tensor([[A, A, 0, B], [B, B, 0, 0]])
GENERATED = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0]])
CONFIG = omega_conf_to_dataclass(compose_run("+recipes=quickstart").actor_rollout_ref.actor)


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def micro_batch(anchor: torch.Tensor | None, trained_tokens: int) -> tuple[dict[str, Any], TensorDict]:
    """Two games of 4 and 2 response tokens behind prompts of 1, as verl's engine passes them."""
    lengths = (4, 2)
    columns = {
        "prompts": [torch.zeros(1, dtype=torch.long)] * 2,
        "responses": [torch.zeros(n, dtype=torch.long) for n in lengths],
        "response_mask": [torch.zeros(n, dtype=torch.long).index_fill(0, torch.tensor([0]), 1) for n in lengths],
        "old_log_probs": [torch.full((n,), -1.0) for n in lengths],
        "ref_log_prob": [torch.full((n,), -1.5) for n in lengths],
        "advantages": [torch.ones(n) for n in lengths],
    }
    if anchor is not None:
        columns[ANCHOR_COLUMN] = [anchor[row, :n] for row, n in enumerate(lengths)]
    data = TensorDict({name: nested(rows) for name, rows in columns.items()}, batch_size=2)
    tensordict_utils.assign_non_tensor(data, dp_size=1, batch_num_tokens=trained_tokens, global_batch_size=2)
    log_probs = nested([torch.full((n + 1,), -1.0, requires_grad=True) for n in lengths])
    return {"log_probs": log_probs}, data


def test_coefficients_follow_roles_and_leave_observations_and_void_games_out() -> None:
    generated = GENERATED.clone()
    generated[1] = 0  # a void game
    coefficients = anchor_coefficients(ROLES, generated, {Role.ATTACKER.id: 0.5, Role.ASSESSOR.id: 0.1})
    torch.testing.assert_close(coefficients, torch.tensor([[0.5, 0.5, 0.0, 0.1], [0.0, 0.0, 0.0, 0.0]]))
    assert not anchor_coefficients(ROLES, GENERATED, {}).any()


def test_the_anchor_adds_its_share_of_kl_per_trained_token_to_verls_loss() -> None:
    coefficients = anchor_coefficients(ROLES, GENERATED, {Role.ASSESSOR.id: 0.1})
    plain, _ = ppo_loss(CONFIG, *micro_batch(None, trained_tokens=2))
    loss, metrics = selfplay_loss(CONFIG, *micro_batch(coefficients, trained_tokens=2))
    # low_var_kl of log-probs -1.0 and -1.5: exp(-0.5) + 0.5 - 1, on three tokens of the assessor's.
    kl = torch.tensor(-0.5).exp() + 0.5 - 1
    torch.testing.assert_close(loss, plain + 3 * 0.1 * kl / 2)
    assert metrics["anchor_kl_loss"].aggregate() == pytest.approx(3 * 0.1 * kl.item() / 2)


def test_without_an_anchor_the_loss_is_verls() -> None:
    loss, _ = selfplay_loss(CONFIG, *micro_batch(None, trained_tokens=2))
    expected, _ = ppo_loss(CONFIG, *micro_batch(None, trained_tokens=2))
    assert torch.equal(loss, expected)


def test_a_mini_batch_without_trained_tokens_costs_nothing_and_can_be_differentiated() -> None:
    loss, metrics = partial(selfplay_loss, CONFIG)(*micro_batch(None, trained_tokens=0))
    assert loss.item() == 0 and loss.requires_grad and metrics == {}
