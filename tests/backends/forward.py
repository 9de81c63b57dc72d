"""What a plain forward says, to compare the CPU backend with."""

from collections.abc import Sequence
from typing import Any

import torch

from medserl_agentloop.backends.cpu_sampling import Completion, SamplingSettings, processed_log_probs

PROMPTS = [[5, 6, 7], [8], [20, 21, 22, 23, 24, 25, 26], [30, 31], [9, 9, 9, 9]]


@torch.no_grad()
def forward_log_probs(
    model: Any, prompt: Sequence[int], completion: Completion, settings: SamplingSettings
) -> list[float]:
    """Log-probs of the completion by one plain forward over the whole sequence: no cache, no padding."""
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen = torch.tensor(completion.token_ids)[:, None]
    return processed_log_probs(logits, settings).gather(1, chosen)[:, 0].tolist()
