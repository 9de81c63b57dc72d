"""How many rows of each category a split gets: exactly the mix, or a clear error.

Called by ``rows.py``; ``parse_mix`` reads the command line's ``--mix``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from math import gcd, lcm

from medserl_agentloop.games.medical.types import Category

Mix = Mapping[Category, Fraction]

# Three of the four categories present a harmful note, so the safe one has three shares.
DEFAULT_MIX = "vanilla_harmful=1,adversarial_harmful=1,vanilla_benign=3,adversarial_benign=1"


class AllocationError(ValueError):
    """The rows asked for cannot be made; the message is a sentence for the user. All functions here raise it."""


def parse_mix(text: str) -> dict[Category, Fraction]:
    """Read ``category=share,...``; categories left out, or with share 0, get no rows."""
    mix: dict[Category, Fraction] = {}
    for part in text.split(","):
        name, _, share = (piece.strip() for piece in part.partition("="))
        try:
            category = Category(name)
        except ValueError:
            known = ", ".join(c.value for c in Category)
            raise AllocationError(
                f"mix: {name!r} is not a category; write shares such as {DEFAULT_MIX} (categories: {known})."
            ) from None
        if category in mix:
            raise AllocationError(f"mix: {name} is given twice; write each category once.")
        if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", share):
            raise AllocationError(
                f"mix: the share of {name} is {share!r}; write a number such as {name}=1 or {name}=0.5."
            )
        mix[category] = Fraction(share)
    mix = {category: mix[category] for category in Category if mix.get(category)}
    if not mix:
        raise AllocationError(f"mix: every share is 0; write shares such as {DEFAULT_MIX}.")
    return mix


def parse_split(text: str) -> float:
    """Read ``train=0.9,val=0.1``: the share of cases for validation."""
    shares = re.fullmatch(r"\s*train\s*=\s*([0-9.]{1,12})\s*,\s*val\s*=\s*([0-9.]{1,12})\s*", text)
    try:
        train, val = (Fraction(share) for share in shares.groups()) if shares else (Fraction(0), Fraction(0))
    except ValueError:
        train = val = Fraction(0)
    if train + val != 1:
        raise AllocationError(f"split: {text!r} is not two shares that add up to 1; write train=0.9,val=0.1.")
    return float(val)


def whole_shares(mix: Mix) -> dict[Category, int]:
    """The mix in the smallest whole numbers: one unit of rows."""
    scale = lcm(*(share.denominator for share in mix.values()))
    numbers = {category: int(share * scale) for category, share in mix.items()}
    common = gcd(*numbers.values())
    return {category: number // common for category, number in numbers.items()}


def largest_exact(split: str, mix: Mix, capacity: Mapping[Category, int]) -> dict[Category, int]:
    """The most rows that ``capacity`` (vignettes that can serve a category) allows at this very mix."""
    shares = whole_shares(mix)
    scarcest = min(shares, key=lambda category: Fraction(capacity[category], shares[category]))
    units = capacity[scarcest] // shares[scarcest]
    if units == 0:
        raise AllocationError(
            f"split {split}: the mix {format_mix(mix)} needs at least {shares[scarcest]} vignettes for "
            f"{scarcest.value} and there are {capacity[scarcest]}; give more input, change --val-fraction, "
            "or write a mix with smaller whole numbers."
        )
    return {category: units * share for category, share in shares.items()}


def exactly(split: str, mix: Mix, capacity: Mapping[Category, int], rows: int) -> dict[Category, int]:
    """Exactly ``rows`` rows, each category within one row of its share (largest remainders)."""
    total = sum(mix.values(), Fraction(0))
    quotas = {category: rows * share / total for category, share in mix.items()}
    counts = {category: int(quota) for category, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda category: counts[category] - quotas[category])
    for category in by_remainder[: rows - sum(counts.values())]:
        counts[category] += 1
    empty = [category.value for category, count in counts.items() if count == 0]
    if empty:
        raise AllocationError(
            f"split {split}: {rows} rows are too few for the mix {format_mix(mix)}, {empty[0]} would get "
            "none; ask for more --rows or leave that category out of --mix."
        )
    scarcest = max(counts, key=lambda category: counts[category] - capacity[category])
    if counts[scarcest] > capacity[scarcest]:
        possible = min(int(capacity[category] * total / share) for category, share in mix.items())
        raise AllocationError(
            f"split {split}: {rows} rows at the mix {format_mix(mix)} need {counts[scarcest]} vignettes for "
            f"{scarcest.value} and there are {capacity[scarcest]}; this split can have at most about "
            f"{possible} rows: ask for fewer --rows, give more input or change --mix."
        )
    return counts


def format_mix(mix: Mix) -> str:
    """The mix as ``--mix`` would read it, in whole numbers."""
    return ",".join(f"{category.value}={share}" for category, share in whole_shares(mix).items())
