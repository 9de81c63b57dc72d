"""Every input of the corpus, and a few hundred mutations of it, go through their target of
``targets.py``.
"""

from itertools import islice

import pytest
from fuzz.run import corpus, mutations
from fuzz.targets import PIECES, SEEN, TARGETS
from rollout.families import FAMILIES

REACHED = {
    "parsers": [
        "contradictory",
        "verdict",
        "valid attack",
        "valid edit",
        "invalid_attack",
        "unreadable_assessment",
    ],
    "readers": ["refused", ".csv", ".jsonl", "openrlhf", "pair"],
    "records": ["refused", "game", "invalid_attack", "unreadable_assessment", "correct_detection"],
    "judge_answers": [
        "verdict",
        "no JSON",
        "no judgement",
        "judgement",
        "no chat",
        "chat, verdict",
    ],
    "templates": list(FAMILIES),
}


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_breaks_a_target_and_the_inputs_reach_what_they_are_for(target: str) -> None:
    SEEN.clear()
    kept = corpus(target)
    for data in (b"", *kept, *islice(mutations(0, kept, PIECES[target]), 400)):
        TARGETS[target](data)
    assert all(SEEN[what] >= 3 for what in REACHED[target]), SEEN
