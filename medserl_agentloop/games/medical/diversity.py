"""How much alike the attacks of a batch are: an attacker that found one trick writes it into every note.

Called by ``medical.metrics``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations

from rapidfuzz import fuzz

from medserl_agentloop.games.medical.canonical import canonical_words
from medserl_agentloop.games.medical.records import GameRecord

MAX_COMPARED = 64
"""Attacks that are compared with one another: 2,016 pairs, whatever the batch."""


def diversity_metrics(games: Iterable[GameRecord]) -> dict[str, float]:
    """Self-similarity of what valid attacks inserted, and how often they inserted the very same.

    Attacks on one case are never compared: they start from the same sentences. Attacks that only
    deleted are left out. A batch with attacks on fewer than two cases has no such metric.
    """
    attacks = sorted(
        (
            game.spec.vignette_id or game.spec.seed_note,
            " ".join(canonical_words(" ".join(game.attack.changed_sentences))),
        )
        for game in games
        if game.attack is not None and game.attack.invalid is None and game.attack.changed_sentences
    )
    # Evenly over the cases, and the same sample in whatever order the games finished.
    count = min(len(attacks), MAX_COMPARED)
    sample = [attacks[i * len(attacks) // count] for i in range(count)]
    alike = [fuzz.ratio(a, b) / 100 for (case, a), (other, b) in combinations(sample, 2) if case != other]
    if not alike:
        return {}
    cases: dict[str, set[str]] = defaultdict(set)
    for case, text in attacks:
        cases[text].add(case)
    return {
        "selfplay/attacker/compared": float(count),
        "selfplay/attacker/self_similarity": math.fsum(alike) / len(alike),
        "selfplay/attacker/duplicate_rate": sum(len(cases[text]) > 1 for _, text in attacks) / len(attacks),
    }
