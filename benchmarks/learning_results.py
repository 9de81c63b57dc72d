"""The learning curves' committed counts: read, pool over seeds, put into the tables of ``docs/learning.md``.

Called by ``benchmarks/learning_pictures.py`` and by the test that page, pictures and files agree.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from medserl_agentloop.evaluation.tournament import wilson_interval

RESULTS = Path(__file__).parents[1] / "docs" / "learning"
KINDS = ("diagnosis", "causalOrganism", "drug", "management", "treatment", "dose")


@dataclass(frozen=True)
class Share:
    """A share with Wilson's 95 % interval."""

    hits: int
    items: int

    @property
    def value(self) -> float:
        return self.hits / self.items if self.items else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.hits, self.items)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.value:.1f} ({100 * low:.0f} to {100 * high:.0f})"


@dataclass(frozen=True)
class Rates:
    """The counts of one experiment, by seed, step, temperature and measure."""

    counts: dict[tuple[int, int, float, str], tuple[int, int]]

    @classmethod
    def of(cls, experiment: str, folder: Path = RESULTS) -> Rates:
        """Read ``EXPERIMENT_rates.csv``."""
        with (folder / f"{experiment}_rates.csv").open(encoding="utf-8", newline="") as file:
            return cls(
                {
                    (int(row["seed"]), int(row["step"]), float(row["temperature"]), row["measure"]): (
                        int(row["hits"]),
                        int(row["items"]),
                    )
                    for row in csv.DictReader(file)
                }
            )

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for seed, *_ in self.counts})

    @property
    def steps(self) -> list[int]:
        return sorted({step for _, step, *_ in self.counts})

    def share(self, measures: str | Sequence[str], step: int, temperature: float, seeds: Iterable[int] = ()) -> Share:
        """The counts of some measures, pooled over them and over seeds (all of them by default)."""
        names = [measures] if isinstance(measures, str) else measures
        keys = [(seed, step, temperature, name) for seed in (seeds or self.seeds) for name in names]
        found = [self.counts.get(key, (0, 0)) for key in keys]
        return Share(sum(hits for hits, _ in found), sum(items for _, items in found))

    def balanced(self, step: int, temperature: float, seeds: Iterable[int] = ()) -> Share:
        """Assessor's accuracy on as many correct as wrong held-out notes."""
        return self.share(("assessor/clean", "assessor/error"), step, temperature, seeds)


def source_hash(*experiments: str, folder: Path = RESULTS) -> str:
    """What a picture was drawn from: SHA-256 over its CSV files."""
    files = [folder / f"{name}_{part}.csv" for name in experiments for part in ("rates", "steps")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
