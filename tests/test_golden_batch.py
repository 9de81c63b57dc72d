"""Sixty-four recorded medical games still give the same columns, rewards and advantages.

Where they are meant to change, ``PYTHONPATH=tests python tests/test_golden_batch.py`` plays and
records them again.
"""

import gzip
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support import TOKENIZER, judge, run_game, run_with

from medserl_agentloop.core.advantages import ROLE_ESTIMATORS, Baselines, RoleBatch
from medserl_agentloop.core.columns import restarted
from medserl_agentloop.core.config import CreditSettings
from medserl_agentloop.core.trajectory import RECORD_KEY
from medserl_agentloop.games.medical.case import Role
from medserl_agentloop.games.medical.records import MedicalRecord
from medserl_agentloop.testing import MockReply, MockSGLangEngine

FILE = Path(__file__).parent / "golden" / "medical_64.json.gz"
GOLDEN = json.loads(gzip.decompress(FILE.read_bytes()))

# The batch was recorded when decoys were played for points, a cut-off assessment was nobody's, and
# guesses were paid.
TERMS = {"decoy": 1.0, "cut_off_assessment": 0.0, "guessed": 0.0}
RUNS = {
    "medserl": run_with(selfplay__judge="labels", selfplay__reward_terms=TERMS),
    "brief": run_with(
        selfplay__judge="labels", selfplay__profile="brief", selfplay__reward="zero_sum"
    ),
    "shared": run_with(
        selfplay__judge="labels", selfplay__context="shared", selfplay__reward_terms=TERMS
    ),
}


def play_game(game: dict[str, Any]) -> dict[str, Any]:
    """One game through agent loop, reward manager and ``as_dict``."""
    run = RUNS[game["run"]]
    engine = MockSGLangEngine([_scripted(reply) for reply in game["replies"]], TOKENIZER)
    columns = judge(run_game(engine, game["extra_info"], run), run)
    record = MedicalRecord.model_validate(columns["extra_fields"][RECORD_KEY])
    tensors = {
        name: torch.as_tensor(columns[name]).tolist()
        for name in ("prompts", "responses", "response_mask", "role_ids", "context_lengths",
        "rm_scores",
                     "rollout_log_probs")
    }  # fmt: skip
    return {
        **tensors,
        "position_ids": restarted(columns["context_lengths"]).tolist(),
        "max_tokens": [call.sampling_params["max_tokens"] for call in engine.calls],
        "outcome": record.outcome.value,
        "rewards": {
            str(getattr(role, "value", role)): parts for role, parts in record.rewards.items()
        },
    }


def _scripted(reply: dict[str, Any]) -> MockReply:
    ids = list(TOKENIZER.encode(reply["text"], add_special_tokens=False))
    if not reply.get("abort"):
        ids = [*ids, TOKENIZER.eos_token_id][: reply.get("truncate_to")]
    stop_reason = "abort" if reply.get("abort") else "length" if "truncate_to" in reply else None
    return MockReply(
        token_ids=ids, log_probs=[-0.01 * (i % 7) for i in range(len(ids))], stop_reason=stop_reason
    )


def replay(
    games: Sequence[dict[str, Any]],
) -> tuple[list[dict[str, Any]], dict[str, list[list[float]]]]:
    """The columns of each game, and the advantages (of trained tokens, in order) of the batch by
    estimator.
    """
    columns = [play_game(game) for game in games]
    width = max(len(c["responses"]) for c in columns)

    def padded(name: str) -> torch.Tensor:
        return torch.tensor([[*c[name], *[0] * (width - len(c[name]))] for c in columns])

    mask = padded("response_mask")
    batch = RoleBatch(
        rewards=padded("rm_scores"),
        mask=mask,
        role_ids=padded("role_ids"),
        groups=[game["uid"] for game in games],
        roles=[role.value for role in Role],
        kinds=[game["extra_info"]["category"] for game in games],
        values=torch.sin(padded("responses").double()),
        gamma=0.99,
        lam=0.9,
    )
    credited = {
        name: estimator(batch, CreditSettings(), Baselines()).advantages
        for name, estimator in ROLE_ESTIMATORS.items()
    }
    trained = {
        name: [row[m > 0].tolist() for row, m in zip(a, mask, strict=True)]
        for name, a in credited.items()
    }
    return columns, trained


@cache
def played() -> Any:
    return replay(GOLDEN["games"])


@pytest.mark.parametrize("number", range(64))
def test_the_columns_of_a_recorded_game_are_what_they_were(number: int) -> None:
    assert played()[0][number] == GOLDEN["games"][number]["columns"]


@pytest.mark.parametrize("estimator", sorted(GOLDEN["advantages"]))
def test_the_advantages_of_the_recorded_batch_are_what_they_were(estimator: str) -> None:
    recorded, now = GOLDEN["advantages"][estimator], played()[1][estimator]
    assert len(recorded) == len(now)
    for before, after in zip(recorded, now, strict=True):
        assert after == pytest.approx(before, abs=1e-6)


if __name__ == "__main__":
    columns, advantages = played()
    for game, recorded in zip(GOLDEN["games"], columns, strict=True):
        game["columns"] = recorded
    with gzip.GzipFile(FILE, "wb", mtime=0) as file:
        file.write(json.dumps({"games": GOLDEN["games"], "advantages": advantages}).encode())
