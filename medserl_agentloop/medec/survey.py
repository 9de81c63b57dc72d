"""One pass over the vignettes that keeps a few numbers of each: what it can serve, which notes it has.

Called by ``rows.py``. A million vignettes take some tens of megabytes here.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from medserl_agentloop.game.edits import one_line
from medserl_agentloop.game.types import Category
from medserl_agentloop.medec.screens import Screen
from medserl_agentloop.medec.store import Exclusions
from medserl_agentloop.medec.vignettes import Vignette

Numbers = np.ndarray[Any, Any]
CATEGORIES = tuple(Category)


class Seeds(Protocol):
    """What a vignette can serve; ``rows.py`` knows."""

    def serves(self, vignette: Vignette) -> list[Category]:
        """The categories of the mix that have a seed note in the vignette."""

    def left_out(self, vignette: Vignette) -> Iterator[tuple[str, str]]:
        """Reason and id of what cannot serve."""


@dataclass(frozen=True)
class Survey:
    """The vignettes that may be used, in an order that does not depend on the order of the input.

    Attributes:
        numbers: Number of each vignette in the input; (vignettes,).
        bits: Bit i says that it may serve ``CATEGORIES[i]``; (vignettes,).
        joined: Of each vignette, the position of the first one that shares a note with it, directly or
            through others; its own position where none does; (vignettes,).
    """

    numbers: Numbers
    bits: Numbers
    joined: Numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def may_serve(self, positions: Numbers, category: Category) -> Numbers:
        """For each position, whether the vignette there may serve ``category``; booleans."""
        return np.asarray((self.bits[positions] >> CATEGORIES.index(category)) & 1, dtype=bool)


def survey(vignettes: Iterable[Vignette], seeds: Seeds, screens: Sequence[Screen], exclusions: Exclusions) -> Survey:
    """Look at every vignette once; what a screen bars goes to ``exclusions``."""
    numbers, ids, bits = array("q"), array("Q"), array("B")
    notes, owners = array("Q"), array("q")
    for number, vignette in enumerate(vignettes):
        serves = set(seeds.serves(vignette))
        barred = [bar for screen in screens for bar in screen.bars(vignette)]
        for bar in barred:
            exclusions.add(bar.reason, [vignette.vignette_id], bar.detail)
            serves -= serves if bar.categories is None else set(bar.categories)
        if any(bar.categories is None for bar in barred):
            continue
        for reason, text_id in seeds.left_out(vignette):
            exclusions.add(reason, [text_id])
        for note in {_key(one_line(note).casefold()) for note in vignette.notes}:
            notes.append(note)
            owners.append(len(numbers))
        numbers.append(number)
        ids.append(_key(vignette.vignette_id))
        bits.append(sum(1 << CATEGORIES.index(category) for category in serves))
    # Sorted by the hash of the id, not by input order: the same cases give the same rows.
    order = np.argsort(np.array(ids, dtype=np.uint64), kind="stable")
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    return Survey(
        numbers=np.array(numbers, dtype=np.int64)[order],
        bits=np.array(bits, dtype=np.uint8)[order],
        joined=_joined(np.array(notes, dtype=np.uint64), position[np.array(owners, dtype=np.int64)], len(order)),
    )


def _joined(notes: Numbers, positions: Numbers, size: int) -> Numbers:
    """Two ids with one note would otherwise carry it from the training into the validation split."""
    parent = np.arange(size, dtype=np.int64)

    def root(position: int) -> int:
        while parent[position] != position:
            parent[position] = parent[parent[position]]
            position = int(parent[position])
        return position

    order = np.argsort(notes, kind="stable")
    repeated = np.flatnonzero(notes[order][1:] == notes[order][:-1])
    for at in repeated:
        a, b = sorted((root(int(positions[order[at]])), root(int(positions[order[at + 1]]))))
        parent[b] = a
    for position in {int(positions[order[at + side]]) for at in repeated for side in (0, 1)}:
        parent[position] = root(position)
    return parent


def _key(text: str) -> int:
    """64 bits: among a million texts two share them once in forty million runs."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
