"""The learning curves' committed counts: read, pool over seeds, put into the tables of ``README.md``.

Called by ``experiments.learning.pictures`` and by the test that page, pictures and files agree.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from medserl_agentloop.scoring.metrics import wilson_interval

PAGE = Path(__file__).with_name("README.md")
ROOT = Path(__file__).parents[2]
PAGES = (PAGE, ROOT / "README.md")
FIGURES = Path(__file__).parent / "figures"
ABLATIONS = ("headline", "reinforce_plus_plus", "shared", "rules_alone", "unchecked")
ESTIMATORS = ("role_reinforce_pp", "role_grpo", "role_rloo", "role_rae", "role_gae")
LONGER_LINES = (
    "assessor, balanced accuracy",
    "assessor, its own attacks found",
    "attacker, undetected by the novice",
    "invalid, where an error was to be put in",
)
DECODING = {1.0: "temperature 1", 0.0: "greedy"}
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

    @property
    def complement(self) -> Share:
        return Share(self.items - self.hits, self.items)

    def __str__(self) -> str:
        if not self.items:
            return "none"
        low, high = self.interval
        return f"{100 * self.value:.1f} ({100 * low:.1f} to {100 * high:.1f})"


@dataclass(frozen=True)
class Rates:
    """The counts of one experiment, by seed, step, temperature and measure."""

    counts: dict[tuple[int, int, float, str], tuple[int, int]]

    @classmethod
    def of(cls, experiment: str, folder: Path = FIGURES) -> Rates:
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
        counts = [self.counts.get(key, (0, 0)) for key in keys]
        return Share(sum(hits for hits, _ in counts), sum(items for _, items in counts))

    def balanced(self, step: int, temperature: float, seeds: Iterable[int] = ()) -> Share:
        """Assessor's accuracy on as many correct as wrong held-out notes."""
        return self.share(("assessor/clean", "assessor/error"), step, temperature, seeds)


def in_training(experiment: str, role: str, metric: str, steps: slice, folder: Path = FIGURES) -> Share:
    """A share of a role's turns in a run's own games, over all seeds.

    Args:
        experiment: The run.
        role: Whose turns.
        metric: Name of the share, ``selfplay/ROLE/METRIC``.
        steps: Which of the run's steps, e.g. ``slice(-10, None)`` for the last ten.
        folder: Of the CSV files.
    """
    with (folder / f"{experiment}_steps.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    chosen_steps = sorted({int(row["step"]) for row in rows})[steps]
    rows = [row for row in rows if int(row["step"]) in chosen_steps]
    turns = [float(row[f"selfplay/{role}/turns"]) for row in rows]
    hits = [float(row[f"selfplay/{role}/{metric}"]) * count for row, count in zip(rows, turns, strict=True)]
    return Share(round(sum(hits)), round(sum(turns)))


Table = list[list[str]]
HEADLINE_LINES = {
    "assessor, balanced accuracy": ("assessor/clean", "assessor/error"),
    "assessor, the novice's attacks found": ("assessor/frozen_attacks",),
    "assessor, its own attacks found": ("self/attacks",),
    "attacker, undetected by the novice": ("attacker/undetected",),
    "attacker, invalid": ("attacker/valid", "attacker/valid_decoys"),
    "invalid, where an error was to be put in": ("attacker/valid",),
    "invalid, where a sentence was to be reworded": ("attacker/valid_decoys",),
    "harmless, where an error was to be put in": ("attacker/harmless",),
}

SMOLLM2_LINES = {
    "assessor, balanced accuracy": ("assessor/clean", "assessor/error"),
    "assessor, errors found": ("assessor/error",),
    "assessor, correct notes believed": ("assessor/clean",),
    "attacker, undetected by the start": ("attacker/undetected",),
    "invalid attacks": ("attacker/valid",),
    "harmless attacks": ("attacker/harmless",),
}


def headline_table(folder: Path = FIGURES) -> Table:
    """Both roles of the headline run by step, at both temperatures."""
    table = _by_step("headline", HEADLINE_LINES, folder)
    steps = Rates.of("headline", folder).steps
    tens = [slice(max(0, step - 10), max(10, step)) for step in steps]
    own = [in_training("headline", "attacker", "valid_rate", ten, folder).complement for ten in tens]
    return [*table, ["rules broken, all attacks in the run's own ten steps", DECODING[1.0], *map(str, own)]]


def longer_table(experiment: str = "longer", folder: Path = FIGURES) -> Table:
    """What becomes of the attacker when the headline run goes on, without an anchor or with one."""
    table = _by_step(experiment, {name: HEADLINE_LINES[name] for name in LONGER_LINES}, folder)
    rates = Rates.of(experiment, folder)
    doses = [[DECODING[t], *(str(chosen(rates, "dose", step, t)) for step in rates.steps)] for t in DECODING]
    return [*table, *(["attacker, doses among its errors", *row] for row in doses)]


def _by_step(experiment: str, lines: Mapping[str, tuple[str, ...]], folder: Path) -> Table:
    rates = Rates.of(experiment, folder)
    table = [["", "decoding", *(f"step {step}" for step in rates.steps)]]
    for name, measures in lines.items():
        for temperature, decoding in DECODING.items():
            shares = [rates.share(measures, step, temperature) for step in rates.steps]
            if "invalid" in name:
                shares = [share.complement for share in shares]
            table.append([name, decoding, *map(str, shares)])
    return table


def both_roles_table(rates: Rates) -> Table:
    """Errors that the assessor finds: both roles at the first and the last step, each against both of the other."""
    first, last = rates.steps[0], rates.steps[-1]

    def share(measure: str, step: int) -> str:
        return str(rates.share(measure, step, 1.0))

    def missed(measure: str, step: int) -> str:
        return str(rates.share(measure, step, 1.0).complement)

    return [
        ["errors found, %", "assessor at the start", "assessor at the end"],
        ["attacker at the start", missed("attacker/undetected", first), share("assessor/frozen_attacks", last)],
        ["attacker at the end", missed("attacker/undetected", last), share("self/attacks", last)],
        ["correct notes called wrong, %", missed("assessor/clean", first), missed("assessor/clean", last)],
    ]


def quickstart_table(folder: Path = FIGURES) -> Table:
    """The same of the quickstart, all seeds pooled."""
    return both_roles_table(Rates.of("quickstart", folder))


def kinds_table(folder: Path = FIGURES) -> Table:
    """What is found and what is put in, by kind of error, at the first and the last step."""
    rates = Rates.of("headline", folder)
    first, last = rates.steps[0], rates.steps[-1]
    table = [["kind of error", *(f"{what}, step {step}" for what in ("found", "put in") for step in (first, last))]]
    for kind in KINDS:
        shares = [str(rates.share(f"assessor/error/{kind}", step, 1.0)) for step in (first, last)]
        table.append([kind, *shares, *(str(chosen(rates, kind, step)) for step in (first, last))])
    return table


def chosen(rates: Rates, kind: str, step: int, temperature: float = 1.0) -> Share:
    """Share of valid attacks that put in an error of ``kind``."""
    hits = rates.share(f"attacker/kind/{kind}", step, temperature).hits
    return Share(hits, rates.share("attacker/undetected", step, temperature).items)


def runs_table(experiments: Sequence[str] = ABLATIONS, folder: Path = FIGURES) -> Table:
    """Runs side by side at temperature 1: the novice, then every run where the shortest ends and at its own end."""
    rates = {experiment: Rates.of(experiment, folder) for experiment in experiments}
    end = min(run.steps[-1] for run in rates.values())
    novice = _side_by_side(next(iter(rates.values())), 0)
    table = [["", "step", "own games, in training", *novice], ["novice", "0", "", *novice.values()]]
    for experiment, run in rates.items():
        for step in sorted({end, run.steps[-1]}):
            shown = in_training(experiment, "assessor", "accuracy", slice(step - 10, step), folder)
            table.append([f"`{experiment}`", str(step), str(shown), *_side_by_side(run, step).values()])
    return table


def _side_by_side(rates: Rates, step: int) -> dict[str, str]:
    shares = {
        "own games, isolated": rates.share(("self/attacks", "self/decoys"), step, 1.0),
        "balanced": rates.balanced(step, 1.0),
        "undetected by the novice": rates.share("attacker/undetected", step, 1.0),
        "invalid": rates.share("attacker/valid", step, 1.0).complement,
        "harmless": rates.share("attacker/harmless", step, 1.0),
    }
    return {name: str(share) for name, share in shares.items()}


def estimators_table(estimators: Sequence[str] = ESTIMATORS, folder: Path = FIGURES) -> Table:
    """What one role gains alone, and what that does to the other, with each estimator, at temperature 1."""
    table = [["", "undetected by the novice", "assessor, balanced", "assessor, readable", "assessor trained: balanced"]]
    for number, estimator in enumerate(estimators):
        attacker, assessor = (Rates.of(f"{estimator}_{role}", folder) for role in ("attacker", "assessor"))
        starts = [("novice", attacker.steps[0], assessor.steps[0])] if number == 0 else []
        for name, step, other_step in [*starts, (f"`{estimator}`", attacker.steps[-1], assessor.steps[-1])]:
            shares = [
                attacker.share("attacker/undetected", step, 1.0),
                attacker.balanced(step, 1.0),
                attacker.share("assessor/parsed", step, 1.0),
                assessor.balanced(other_step, 1.0),
            ]
            table.append([name, *map(str, shares)])
    return table


def headline_sentence(folder: Path = FIGURES) -> str:
    """The headline run in one sentence, for the README."""
    rates = Rates.of("headline", folder)
    first, last = rates.steps[0], rates.steps[-1]

    def gain(measures: Sequence[str], temperature: float = 1.0) -> str:
        return " to ".join(f"{100 * rates.share(measures, step, temperature).value:.0f} %" for step in (first, last))

    verdicts = ("assessor/clean", "assessor/error")
    return (
        f"In {last} steps of 64 games in the toy clinic, three seeds, the assessor's balanced accuracy on held-out "
        f"notes goes from {gain(verdicts)} (greedy: {gain(verdicts, 0.0)}), and the share of the attacker's errors "
        f"that the frozen starting player misses from {gain(('attacker/undetected',))}."
    )


def markdown(table: Table) -> str:
    """A table as Markdown; its first row is the heading."""
    heading, *rows = table
    lines = [heading, ["---", *["---:"] * (len(heading) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


TABLES: dict[str, Callable[..., Table]] = {
    "quickstart": quickstart_table,
    "headline": headline_table,
    "longer": longer_table,
    "longer_anchored": partial(longer_table, "longer_anchored"),
    "kinds": kinds_table,
    "runs": runs_table,
    "estimators": estimators_table,
    **{name: partial(_by_step, name, SMOLLM2_LINES) for name in ("smollm2", "smollm2_reinforce_plus_plus")},
    "adapters": partial(runs_table, ("headline", "adapter_shared", "adapter_per_role")),
}
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(page: str, folder: Path = FIGURES) -> str:
    """The page with every table made anew from the files."""
    return _TABLE.sub(lambda match: f"{match[1]}{markdown(TABLES[match[2]](folder=folder))}\n{match[3]}", page)


def source_hash(*experiments: str, folder: Path = FIGURES) -> str:
    """What a picture was drawn from: SHA-256 over its CSV files."""
    files = [folder / f"{name}_{part}.csv" for name in experiments for part in ("rates", "steps")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
