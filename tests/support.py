"""Builders that several test modules share: a note and its row, turns as text, a game on a scripted
engine.
"""

import asyncio
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf
from verl import DataProto
from verl.trainer.ppo.reward import load_reward_manager

from medserl_agentloop.core.trajectory import RECORD_KEY, SelfPlayOutput
from medserl_agentloop.games.medical.records import MedicalRecord
from medserl_agentloop.testing import (
    MockSGLangEngine,
    build_agent_loop,
    compose_run,
    tiny_tokenizer,
)

NOTE = (
    "A 40-year-old man has fever. Culture grew candida. He receives fluconazole 150 mg. Follow-up "
    "is in a week."
)
REWRITTEN = NOTE.replace("candida", "giardia")
ERROR_NOTE = NOTE.replace("fluconazole", "amoxicillin")


def extra_info(category: str, **changes: Any) -> dict[str, Any]:
    """Facts of a row as parquet holds them."""
    facts = {
        "index": 7,
        "text_id": "toy-train-7",
        "vignette_id": "toy-train-7",
        "category": category,
        "error_note": ERROR_NOTE,
        "clean_note": NOTE,
        "error_type": "pharmacotherapy",
        "error_sentence": "He receives amoxicillin 150 mg.",
        "corrected_sentence": "He receives fluconazole 150 mg.",
    }
    return {**facts, **changes}


def attack_text(note: str = REWRITTEN, reasoning: str = "SECRET-PLAN: change the organism") -> str:
    return f"<think>{reasoning}</think>\n<note>{note}</note>"


def assessment_text(verdict: str = "harmful", sentence: str = "Culture grew giardia.") -> str:
    right = "Culture grew candida."
    fields = f"\nsentence: {sentence}\nerror_type: causalOrganism\ncorrection: {right}"
    fields = "" if verdict == "safe" else fields
    return f"<think>it reads oddly</think>\n<answer>\nverdict: {verdict}{fields}\n</answer>"


TOKENIZER = tiny_tokenizer()
LENGTHS = ("data.max_prompt_length=4096", "data.max_response_length=8192")
BUDGETS = ("selfplay.budget.attacker_reasoning=400", "selfplay.budget.assessor=400")
RUN = compose_run("+recipes=own_notes", *LENGTHS, *BUDGETS)
ROW = {"uid": "group", "session_id": 0, "global_steps": 3}


def run_with(**changes: Any) -> DictConfig:
    run = compose_run("+recipes=own_notes", *LENGTHS, *BUDGETS)
    for key, value in changes.items():
        OmegaConf.update(run, key.replace("__", "."), value, force_add=True)
    return run


def run_game(
    engine: Any,
    facts: dict[str, Any],
    run: DictConfig = RUN,
    tokenizer: Any = TOKENIZER,
    *,
    logprobs: bool = True,
) -> SelfPlayOutput:
    """Play one row with the agent loop."""
    loop = build_agent_loop(engine, tokenizer, run)
    sampling = {"temperature": 1.0, "logprobs": logprobs}
    return asyncio.run(loop.run(sampling, extra_info=facts, **ROW))


def play(
    replies: Any,
    category: str = "adversarial_benign",
    run: DictConfig = RUN,
    *,
    tokenizer: Any = TOKENIZER,
    asks_log_probs: bool = True,
    log_prob: float | None = -1.0,
    **facts: Any,
) -> tuple[SelfPlayOutput, MedicalRecord, MockSGLangEngine]:
    engine = MockSGLangEngine(replies, tokenizer, log_prob=log_prob)
    row = extra_info(category, **facts)
    output = run_game(engine, row, run, tokenizer, logprobs=asks_log_probs)
    return output, MedicalRecord.model_validate(output.extra_fields[RECORD_KEY]), engine


async def scored(manager: Any, record: Any) -> dict[str, Any]:
    """Return the reward manager's answer to verl for one finished game."""
    fields = {"tool_extra_fields": np.array([{RECORD_KEY: record}], dtype=object)}
    answer: dict[str, Any] = await manager.run_single(DataProto.from_dict(non_tensors=fields))
    return answer


def judge(output: SelfPlayOutput, run: Any = RUN) -> dict[str, Any]:
    """Treat an output as verl's agent-loop worker does: reward manager, then as_dict."""
    manager = load_reward_manager(run, TOKENIZER)
    result = asyncio.run(scored(manager, output.extra_fields[RECORD_KEY]))
    output.reward_score = result["reward_score"]
    output.extra_fields["reward_extra_info"] = result["reward_extra_info"]
    return output.as_dict()
