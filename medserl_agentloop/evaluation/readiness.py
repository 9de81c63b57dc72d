"""Check that a model can play: its turns that are cut, read and valid, and their lengths.

``medserl play`` prints it. It is worth knowing before a run is paid for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from medserl_agentloop.core.chat import TEMPLATE_KWARGS
from medserl_agentloop.core.interaction import Reply
from medserl_agentloop.terminal import table

Replies = defaultdict[str, list[Reply]]
"""All turns of a role."""

LEAST_PARSED, LEAST_VALID, MOST_CUT, MOST_SILENT = 0.9, 0.5, 0.02, 0.8
"""Shares that a model needs at the start of a run (docs/evaluation.md). No run has confirmed it."""


def lengths_table(replies: Mapping[str, Sequence[Reply]], most: int) -> Any:
    """Count each role's cut turns, measure their length, and suggest a budget."""
    rows = []
    for role, turns in replies.items():
        lengths = [_percentile([turn.tokens for turn in turns], share) for share in (50, 95, 99)]
        cut = f"{_cut(turns):.1%}".replace("%", " %")
        counted = [f"{length:,}" for length in lengths] if any(lengths) else ["not counted"] * 3
        budget = suggested_budget(turns)
        suggested = f"more than {most:,}" if budget is None else f"{budget:,}"
        rows.append((role, len(turns), cut, *counted, suggested if any(lengths) else "-"))
    columns = ["role", "turns", "cut", "tokens, 50 %", "95 %", "99 %", "budget"]
    return table("lengths of turns", columns, rows)


def suggested_budget(turns: Sequence[Reply]) -> int | None:
    """A tenth more than 99 % of the turns take; None if too many were cut to know."""
    if _cut(turns) > MOST_CUT:
        return None
    return 64 * math.ceil(1.1 * _percentile([turn.tokens for turn in turns], 99) / 64)


def can_play(
    metrics: Mapping[str, float], replies: Mapping[str, Sequence[Reply]], most: int
) -> Iterator[str]:
    """Say what is to be done before a run, or that nothing is."""
    found = []
    for role, turns in replies.items():
        if (cut := _cut(turns)) > MOST_CUT:
            found.append(
                f"a larger budget first: {cut:.0%} of the {role}'s turns were cut at {most:,} "
                "tokens. Play again with a larger --max-tokens, or without the model's reasoning "
                f"(--extra-body {TEMPLATE_KWARGS}.enable_thinking=false)"
            )
    for what, least, words in (
        ("parse_rate", LEAST_PARSED, "can be read"),
        ("valid_rate", LEAST_VALID, "are valid"),
    ):
        for role in replies:
            if (share := metrics.get(f"selfplay/{role}/{what}", 1.0)) < least:
                found.append(
                    f"a warm start first: {share:.0%} of the {role}'s turns {words}, and a run "
                    f"needs {least:.0%}"
                )
    for role in replies:
        if (share := metrics.get(f"selfplay/{role}/no_signal_rate", 0.0)) > MOST_SILENT:
            found.append(
                f"other rows first: in {share:.0%} of its groups the {role} earns the same in each "
                "game, and learns nothing"
            )
    yield from (line.replace("%", " %") for line in found)
    if replies and not found:
        yield "this model can play: its turns are whole, readable and valid often enough"


def _cut(turns: Sequence[Reply]) -> float:
    return sum(turn.truncated for turn in turns) / len(turns)


def _percentile(lengths: Sequence[int], share: int) -> int:
    """The least length that so many % of them do not exceed."""
    return sorted(lengths)[math.ceil(len(lengths) * share / 100) - 1]
