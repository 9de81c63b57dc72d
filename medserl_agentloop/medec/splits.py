"""Which vignettes train and which validate: whole cases, and cases that share a note together.

Called by ``rows.py``.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import numpy as np

from medserl_agentloop.medec.store import Exclusions
from medserl_agentloop.medec.survey import Numbers, Survey
from medserl_agentloop.medec.vignettes import Vignette


def split_by_case(
    vignettes: Sequence[Vignette],
    facts: Survey,
    val_fraction: float,
    seed: int,
    val_from: int | None,
    exclusions: Exclusions,
) -> tuple[dict[str, Numbers], int]:
    """Positions of the vignettes of ``train`` and ``val``, and how many share a note with another.

    Where validation input was given (``val_from``), training cases that share a note with it are left out.
    """
    others: dict[int, list[int]] = {}
    for position in np.flatnonzero(facts.joined != np.arange(len(facts))):
        others.setdefault(int(facts.joined[position]), []).append(int(position))
    if val_from is None:
        in_val = _by_fraction(facts, others, val_fraction, seed)
        kept = np.ones(len(facts), dtype=bool)
    else:
        in_val = facts.numbers >= val_from
        kept = _without_leaks(vignettes, facts, others, in_val, exclusions)
    splits = {"train": np.flatnonzero(~in_val & kept), "val": np.flatnonzero(in_val)}
    return splits, sum(len(members) + 1 for members in others.values())


def _by_fraction(facts: Survey, others: dict[int, list[int]], fraction: float, seed: int) -> Numbers:
    firsts = array("q", np.flatnonzero(facts.joined == np.arange(len(facts))).tobytes())
    random.Random(seed).shuffle(firsts)
    wanted = int(len(facts) * fraction + 0.5)
    in_val = np.zeros(len(facts), dtype=bool)
    filled = 0
    for first in firsts:
        group = [first, *others.get(first, ())]
        if filled + len(group) <= wanted:
            in_val[group] = True
            filled += len(group)
    return in_val


def _without_leaks(
    vignettes: Sequence[Vignette],
    facts: Survey,
    others: dict[int, list[int]],
    in_val: Numbers,
    exclusions: Exclusions,
) -> Numbers:
    kept = np.ones(len(facts), dtype=bool)
    for first, rest in others.items():
        group = [first, *rest]
        validation = [position for position in group if in_val[position]]
        if validation:
            match = vignettes[int(facts.numbers[validation[0]])].vignette_id
            for position in (p for p in group if not in_val[p]):
                kept[position] = False
                reason = "not for training: it shares a note with a case that was given for validation"
                exclusions.add(reason, [vignettes[int(facts.numbers[position])].vignette_id], match)
    return kept
