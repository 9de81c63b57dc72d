"""Negative controls for the certificate, loaded into every process of a run through VERL_USE_EXTERNAL_MODULES."""

import medserl_agentloop.plugin  # noqa: F401, I001  # first: verl looks for its platform while it is being imported
import torch
from verl.trainer.ppo.core_algos import compute_policy_loss_gspo, register_policy_loss

from medserl_agentloop.core import columns

# A loss of a user's own, which takes one ratio over a row's tokens.
register_policy_loss("one_ratio_per_row")(compute_policy_loss_gspo)


def without_restart(context_lengths: torch.Tensor) -> torch.Tensor:
    return torch.arange(int(context_lengths.sum()))


columns.restarted = without_restart
