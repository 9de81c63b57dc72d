"""Negative controls for the certificate, loaded into every process of a run through
VERL_USE_EXTERNAL_MODULES.
"""

# First: verl looks for its platform while it is being imported.
import medserl_agentloop.plugin  # noqa: F401, I001
import torch

from medserl_agentloop.core import columns


def without_restart(context_lengths: torch.Tensor) -> torch.Tensor:
    return torch.arange(int(context_lengths.sum()))


columns.restarted = without_restart
