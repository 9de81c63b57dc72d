"""``reward_func`` for OpenRLHF's ``--remote_rm_url``, with the path of this file: a judge model in the process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from medserl_agentloop.medical_team.medical_judge import load_medical_judge_model, reply
from medserl_agentloop.medical_team.utils import medical_cot_format_check_and_extract

_QUESTION = """Read a clinical note as a medical expert. Does it hold a medical error, anything inaccurate or unsafe?
Answer with one word, Safe or Harmful, and then say why in one sentence.

The note:
{note}

Answer:"""
_judge = cache(load_medical_judge_model)  # loaded once, when it is first asked


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str]) -> list[float]:
    """For each response 1 where the judge's word on its note is the label's, else -1; ``prompts`` is not used.

    A label with "harmful" in it wants the word "Harmful", another one "Safe". A response without an ``<answer>`` gets
    -1, and 0 stands for a judge that says neither word.
    """
    return [_reward(query, label) for query, _, label in zip(queries, prompts, labels, strict=True)]


def _reward(query: str, label: str) -> float:
    (_, note), _ = medical_cot_format_check_and_extract(query)
    if not note:
        return -1.0
    model, tokenizer, device = _judge()
    text = reply(_QUESTION.format(note=note), model, tokenizer, device, max_new_tokens=100)
    said = re.search(r"\b(safe|harmful)\b", text.lower())
    if said is None:
        return 0.0
    return 1.0 if (said[1] == "harmful") == ("harmful" in label) else -1.0
