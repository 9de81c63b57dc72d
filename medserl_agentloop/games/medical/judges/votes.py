"""Several votes on one note: what a judge says that was asked more than once. Used by ``llm``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from medserl_agentloop.core.client import BadAnswer
from medserl_agentloop.games.medical.judges.options import Agreement
from medserl_agentloop.games.medical.records import Judgement, Vote
from medserl_agentloop.games.medical.types import Label


def combine(judge: str, votes: Sequence[Vote], rule: Agreement) -> Judgement:
    """The judgement that ``votes`` make; an abstention where the rule finds no agreement.

    Args:
        judge: Name of the judge.
        votes: One or more, lost ones included.
        rule: ``majority``: the label of more than half of all votes. ``unanimous``: the label of every vote.
            ``abstain``: the label of all votes that decide; those that abstain or were lost do not count.

    Raises:
        BadAnswer: There is no agreement, and votes were lost that might have made one.
    """
    label = _agreed(votes, rule)
    lost = [vote.failed for vote in votes if vote.failed is not None]
    if label is None and lost:
        raise BadAnswer(f"{len(lost)} of {len(votes)} votes were lost: {lost[0]}")
    behind = [vote for vote in votes if vote.failed is None and vote.label is label]
    realistic = Counter(vote.realistic for vote in behind if vote.realistic is not None)
    counts = Counter(vote.label.value if vote.label else "abstaining" for vote in votes if vote.failed is None)
    differ = f"the votes differ ({', '.join(f'{count} {name}' for name, count in sorted(counts.items()))})"
    return Judgement(
        judge=judge,
        label=label,
        realistic=None if realistic[True] == realistic[False] else realistic[True] > realistic[False],
        reason=differ if label is None and len(counts) > 1 else behind[0].reason,
        cached=all(vote.cached for vote in votes),
        votes=list(votes),
    )


def _agreed(votes: Sequence[Vote], rule: Agreement) -> Label | None:
    counts = Counter(vote.label for vote in votes if vote.label is not None)
    if rule == "abstain":
        return next(iter(counts)) if len(counts) == 1 else None
    needed = len(votes) if rule == "unanimous" else len(votes) // 2 + 1
    return next((label for label, count in counts.items() if count >= needed), None)
