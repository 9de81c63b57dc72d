"""The games of a parquet file of ours, drawn for playing outside of training."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow.parquet as pq  # type: ignore[import-untyped, unused-ignore]
from pyarrow import ArrowException  # type: ignore[import-untyped, unused-ignore]

from medserl_agentloop.games.medical.edits import one_line
from medserl_agentloop.games.medical.types import GameSpec


def draw_rows(file: Path, count: int, seed: int, *, attacked: bool = False) -> list[GameSpec]:
    """Draw ``count`` different rows; the same seed draws the same ones in the same order.

    Args:
        file: The parquet file.
        count: How many.
        seed: Shuffles the rows.
        attacked: Draw among the rows that have an attacker's turn.

    Raises:
        ValueError: The file is none of ours, a row is wrong, or there are fewer rows than that.
    """
    try:
        if "extra_info" not in pq.read_schema(file).names:
            raise ValueError(f"{file} has no column extra_info; write it with data_prep/medec_to_parquet.py")
        rows = pq.read_table(file, columns=["extra_info"])["extra_info"]
    except (OSError, ArrowException) as error:
        raise ValueError(f"{file} cannot be read as a parquet file of games: {one_line(str(error))}") from None
    specs: list[GameSpec] = []
    for number in random.Random(seed).sample(range(len(rows)), len(rows)):
        if len(specs) == count:
            break
        try:
            spec = GameSpec.from_extra_info(rows[number].as_py() or {})
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        if spec.category.has_attack or not attacked:
            specs.append(spec)
    if len(specs) < count:
        kind = "rows with an attacker's turn" if attacked else "rows"
        raise ValueError(f"{file} holds {len(specs)} {kind}; --games can be at most that")
    return specs
