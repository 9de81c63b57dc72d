"""Games to judge, and what the reward manager makes of many at once."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import torch
from game.builders import CLEAN_NOTE, HARMFUL_ANSWER, SAFE_ANSWER, attack_text, game
from omegaconf import OmegaConf
from support import TOKENIZER, run_with
from verl import DataProto
from verl.trainer.ppo.reward import load_reward_manager

from medserl_agentloop.core.trajectory import GAME_KEY
from medserl_agentloop.games.medical.config import JudgeServer
from medserl_agentloop.games.medical.records import MedicalRecord
from medserl_agentloop.games.medical.types import Category


def played(
    number: int = 0, category: Category | str = Category.ADVERSARIAL_BENIGN, *, verdict: str = "harmful"
) -> MedicalRecord:
    """A finished, unjudged game on a note of its own."""
    note = CLEAN_NOTE.replace("52", str(1000 + number))
    if Category(category).seed_label == "harmful":
        note = note.replace("heparin", "warfarin")
    playing = game(category, seed_note=note)
    if Category(category).has_attack:
        playing.play(attack_text(note.replace("500 units", f"{number + 2} grams")))
    playing.play(HARMFUL_ANSWER if verdict == "harmful" else SAFE_ANSWER)
    return playing.record


def reward_manager(judge: str, server: JudgeServer, **changes: Any) -> Any:
    """verl's reward manager of a run with this judge, as its reward-loop workers build it."""
    run = run_with(selfplay__judge=judge)
    run.selfplay.judge_server = server.model_dump()
    for key, value in changes.items():
        OmegaConf.update(run, key.replace("__", "."), value)
    return load_reward_manager(run, TOKENIZER)


async def reward(manager: Any, record: MedicalRecord) -> tuple[MedicalRecord, dict[str, Any]]:
    """One game through the manager: its judged record, and all that the manager returns."""
    fields = {GAME_KEY: record.to_json()}
    data = DataProto.from_dict(
        tensors={"responses": torch.tensor([[1]])},
        non_tensors={"tool_extra_fields": np.array([fields], dtype=object)},
    )
    result = await manager.run_single(data)
    return MedicalRecord.model_validate(result["reward_extra_info"][GAME_KEY]), result


def reward_all(manager: Any, games: list[MedicalRecord]) -> list[MedicalRecord]:
    """Many games at once; checks that none is lost and no void one is rewarded."""

    async def all_at_once() -> list[tuple[MedicalRecord, dict[str, Any]]]:
        return await asyncio.gather(*(reward(manager, record) for record in games))

    results = asyncio.run(all_at_once())
    assert [record.spec for record, _ in results] == [record.spec for record in games]
    for record, result in results:
        if record.void is not None:
            assert (record.rewards, result["reward_score"]) == ({}, 0.0)
            assert result["reward_extra_info"]["void"] == 1.0
        else:
            assert record.judgement is not None and record.judgement.label is not None
            assert record.rewards
    return [record for record, _ in results]
