"""``selfplay.mix``: an epoch of training in which each kind has its share.

verl 0.9.1 builds its own sampler and asks nobody, so the shares are made where its dataset is: the rows
of an epoch are chosen from those of the file. They are chosen once, by ``data.seed``; verl shuffles and
resumes them as it does any other rows.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from medserl_agentloop.core.config import ConfigError


def mixed_rows(kinds: Sequence[str], mix: Mapping[str, float], seed: int) -> list[int]:
    """Rows of an epoch that is as long as the file and has the shares of ``mix``.

    Where a kind has fewer rows than its share, they are used in turn; where it has more, the seed
    chooses. The kinds are interleaved, so that not only the epoch but any stretch of it has these
    shares, to within a row for each kind: so does a batch of a run with ``data.shuffle=False``.

    Args:
        kinds: The kind of each row of the file.
        mix: Share of each kind, 0 or more, in any unit.
        seed: Chooses and orders the rows of a kind.

    Returns:
        Row numbers, as many as there are rows; some more than once, some not at all.

    Raises:
        ConfigError: Every share is 0, or a kind has a share and no rows.
    """
    if not any(mix.values()):
        raise ConfigError("selfplay.mix: every share is 0; give the kinds to play a share, or leave it null")
    shares = {kind: Fraction(share) for kind, share in mix.items() if share}
    rows = {kind: [n for n, k in enumerate(kinds) if k == kind] for kind in shares}
    missing = [kind for kind, members in rows.items() if not members]
    if missing:
        there = ", ".join(f"{count} {name}" for name, count in sorted(Counter(k for k in kinds if k).items()))
        raise ConfigError(
            f"selfplay.mix has a share for {', '.join(missing)}, of which data.train_files has no row (it has "
            f"{there}). Write the file with these kinds in --mix, or take them out of selfplay.mix."
        )
    for kind, members in rows.items():
        random.Random(f"{seed}/{kind}").shuffle(members)
    total = sum(shares.values())
    taken = dict.fromkeys(shares, 0)
    chosen = []
    for place in range(1, len(kinds) + 1):
        # The kind that is furthest behind its share up to here.
        behind = max(shares, key=lambda kind: place * shares[kind] / total - taken[kind])
        chosen.append(rows[behind][taken[behind] % len(rows[behind])])
        taken[behind] += 1
    return chosen


def apply_mix(
    dataset: Any, mix: Mapping[str, float], kind_of: Callable[[Mapping[str, Any]], str], *, seed: int
) -> None:
    """Give verl's ``RLHFDataset`` the rows of an epoch with the shares of ``mix``, and say so.

    The number of rows stays, so that what verl has planned by it (steps, learning rate) stays true.

    Raises:
        ConfigError: The mix cannot be had from these rows.
    """
    names = [kind_of(facts) for facts in dataset.dataframe["extra_info"]]
    chosen = mixed_rows(names, mix, seed)
    dataset.dataframe = dataset.dataframe.select(chosen)
    counts = Counter(names[row] for row in chosen)
    held = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    left_out = len(names) - len(set(chosen))
    print(
        f"[medserl] selfplay.mix: an epoch of {len(chosen)} rows holds {held}; {left_out} rows of the file are "
        "left out of it",
        flush=True,
    )
