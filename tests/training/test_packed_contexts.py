"""One trajectory, two private contexts: what the restart of positions is worth."""

import pytest
import torch

from medserl_agentloop.testing.tiny import tiny_model

FIRST, SECOND = 37, 53  # tokens of the two contexts


def log_probs(model: torch.nn.Module, ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Log-probs (T - 1,) of each next token, called as verl's engine does with removed padding."""
    with torch.no_grad():
        logits = model(input_ids=ids[None], position_ids=position_ids[None], use_cache=False).logits[0]
    return logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_log_probs_equal_those_of_two_separate_forwards_only_with_the_restart(attention: str) -> None:
    model = tiny_model(512, attention=attention)
    ids = torch.randint(0, 512, (FIRST + SECOND,), generator=torch.Generator().manual_seed(1))
    restarted = torch.cat([torch.arange(FIRST), torch.arange(SECOND)])
    alone = log_probs(model, ids[FIRST:], torch.arange(SECOND))

    packed = log_probs(model, ids, restarted)
    assert (packed[FIRST:] - alone).abs().max() < 1e-5
    assert (packed[: FIRST - 1] - log_probs(model, ids[:FIRST], torch.arange(FIRST))).abs().max() < 1e-5

    leaking = log_probs(model, ids, torch.arange(FIRST + SECOND))
    assert (leaking[FIRST:] - alone).abs().max() > 0.1


def test_the_second_context_does_not_depend_on_the_first() -> None:
    model = tiny_model(512)
    generator = torch.Generator().manual_seed(2)
    second = torch.randint(0, 512, (SECOND,), generator=generator)
    restarted = torch.cat([torch.arange(FIRST), torch.arange(SECOND)])
    scores = [
        log_probs(model, torch.cat([torch.randint(0, 512, (FIRST,), generator=generator), second]), restarted)[FIRST:]
        for _ in range(2)
    ]
    assert (scores[0] - scores[1]).abs().max() < 1e-5
