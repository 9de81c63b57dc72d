"""The learning curves' committed counts: read, pool over seeds, put into the tables of
``README.md``.

Called by ``experiments.learning.pictures`` and by the test that page, pictures and files agree.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, variance

import numpy as np

from medserl_agentloop.core.metrics import effective_number
from medserl_agentloop.scoring.metrics import student_quantile, wilson_interval

PAGE = Path(__file__).with_name("README.md")
ROOT = Path(__file__).parents[2]
PAGES = {"quickstart": ROOT / "README.md", "summary": ROOT / "docs" / "results.md"}
"""The pages of the tables that are not on ``PAGE``."""
FIGURES = Path(__file__).parent / "figures"
ABLATIONS = ("headline", "shared", "rules_alone")
NORMALIZATIONS = {"batch": "headline", "kind": "assessor_kind", "mean": "assessor_mean"}
"""Runs by how the assessor's advantages are normalised."""
LONG = ("long", "long_assessments", "long_learnable", "long_entropy", "long_coverage")
"""Runs of a hundred steps."""
CREDIT = (
    "headline",
    "credit_by_role",
    "credit_summed",
    "credit_by_role_no_bonus",
    "credit_summed_no_bonus",
)
KINDS = ("diagnosis", "causalOrganism", "drug", "management", "treatment", "dose")


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean of two or more values with Student's 95 % interval."""
    mean, deviation = float(np.mean(values)), float(np.std(values, ddof=1))
    half = student_quantile(len(values) - 1) * deviation / len(values) ** 0.5
    return mean, mean - half, mean + half


@dataclass(frozen=True)
class Share:
    """A share of the items of all seeds, from the hits and items of each."""

    counts: tuple[tuple[int, int], ...]

    @property
    def hits(self) -> int:
        return sum(hits for hits, _ in self.counts)

    @property
    def items(self) -> int:
        return sum(items for _, items in self.counts)

    @property
    def value(self) -> float:
        return self.hits / self.items if self.items else float("nan")

    @property
    def of_seeds(self) -> list[float]:
        return [hits / items for hits, items in self.counts if items]

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval over cases and seeds: Wilson's, with the cases of one seed, as all
        seeds share them.

        The variance between seeds over their number is added to that of the cases. As few seeds say
        little of their variance, the quantile is Student's, with the degrees of freedom of the sum
        (Welch and Satterthwaite).
        """
        of_seeds, uncertain = self.of_seeds, self.value * (1 - self.value)
        trials = self.items / len(of_seeds) if of_seeds else 0.0
        between = variance(of_seeds) / len(of_seeds) if len(of_seeds) > 1 else 0.0
        if not between:
            return wilson_interval(self.value * trials, trials)
        of_both = uncertain / trials + between
        trials = uncertain / of_both
        quantile = student_quantile((len(of_seeds) - 1) * (of_both / between) ** 2)
        return wilson_interval(self.value * trials, trials, quantile)

    @property
    def complement(self) -> Share:
        return Share(tuple((items - hits, items) for hits, items in self.counts))

    def among(self, other: Share) -> Share:
        """The same hits, as a share of the items of another."""
        pairs = zip(self.counts, other.counts, strict=True)
        return Share(tuple((hits, items) for (hits, _), (_, items) in pairs))

    def __str__(self) -> str:
        if not self.items:
            return "none"
        low, high = (f"{100 * end:.1f}" for end in self.interval)
        return f"{100 * self.value:.1f} ({low} to {high})"


def gain(first: Share, second: Share) -> list[str]:
    """The second less the first in points: paired by seed, the mean with Student's 95 % interval,
    and each seed's.
    """
    each = [
        100 * (after - before)
        for before, after in zip(first.of_seeds, second.of_seeds, strict=True)
    ]
    average, low, high = mean_interval(each)
    return [
        f"{average:+.1f} ({low:+.1f} to {high:+.1f})",
        ", ".join(f"{value:+.1f}" for value in each),
    ]


Counts = dict[tuple[int, int, float, str], tuple[int, int]]


@dataclass(frozen=True)
class Rates:
    """The counts of one experiment, by seed, step, temperature and measure."""

    counts: Counts

    @classmethod
    def of(cls, experiment: str, folder: Path = FIGURES) -> Rates:
        """Read ``EXPERIMENT_rates.csv``."""
        with (folder / f"{experiment}_rates.csv").open(encoding="utf-8", newline="") as file:
            return cls(
                {
                    (
                        int(row["seed"]),
                        int(row["step"]),
                        float(row["temperature"]),
                        row["measure"],
                    ): (
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

    def share(
        self,
        measures: str | Sequence[str],
        step: int,
        temperature: float,
        seeds: Iterable[int] = (),
    ) -> Share:
        """Some measures counted together, of some seeds (all of them by default).

        Greedy, all seeds start as one player with one answer to each note, which counts once.
        """
        names = [measures] if isinstance(measures, str) else measures
        chosen = list(seeds or self.seeds)[: 1 if step == temperature == 0 else None]
        counts = [
            [self.counts.get((seed, step, temperature, name), (0, 0)) for name in names]
            for seed in chosen
        ]
        return Share(
            tuple(
                (sum(hits for hits, _ in each), sum(items for _, items in each)) for each in counts
            )
        )

    def won(self, step: int, temperature: float, seeds: Iterable[int] = ()) -> Share:
        """Attacks that put in an error which the frozen assessor misses, of all that were to put
        one in.
        """
        undetected = self.share("attacker/undetected", step, temperature, seeds)
        return undetected.among(self.share("attacker/valid", step, temperature, seeds))

    def balanced(self, step: int, temperature: float, seeds: Iterable[int] = ()) -> Share:
        """Assessor's accuracy on as many correct as wrong held-out notes."""
        return self.share(("assessor/clean", "assessor/error"), step, temperature, seeds)


def in_training(
    experiment: str, role: str, metric: str, steps: slice, folder: Path = FIGURES
) -> Share:
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
    counts: dict[str, list[float]] = {}
    for row in rows:
        if int(row["step"]) in chosen_steps:
            of_seed, turns = (
                counts.setdefault(row["seed"], [0.0, 0.0]),
                float(row[f"selfplay/{role}/turns"]),
            )
            of_seed[0] += float(row[f"selfplay/{role}/{metric}"]) * turns
            of_seed[1] += turns
    return Share(tuple((round(hits), round(turns)) for hits, turns in counts.values()))


Table = list[list[str]]
WON = ("attacker/won",)
HEADLINE_LINES = {
    "assessor, balanced accuracy": ("assessor/clean", "assessor/error"),
    "assessor, the novice's attacks found": ("assessor/frozen_attacks",),
    "assessor, its own attacks found": ("self/attacks",),
    "attacker, undetected by the novice": ("attacker/undetected",),
    "attacker, valid and undetected, of all attacks": WON,
    "invalid, where an error was to be put in": ("attacker/valid",),
    "of these, harmless": ("attacker/harmless",),
}

SMOLLM2_LINES = {
    "assessor, balanced accuracy": ("assessor/clean", "assessor/error"),
    "assessor, errors found": ("assessor/error",),
    "assessor, correct notes believed": ("assessor/clean",),
    "attacker, undetected by the start": ("attacker/undetected",),
    "attacker, valid and undetected, of all attacks": WON,
    "invalid attacks": ("attacker/valid",),
}


def headline_table(folder: Path = FIGURES) -> Table:
    """Both roles of the headline run by step."""
    return _by_step("headline", HEADLINE_LINES, folder)


def summary_table(folder: Path = FIGURES) -> Table:
    """The headline run's first and last step at temperature 1, for docs/results.md."""
    rates = Rates.of("headline", folder)
    ends = (rates.steps[0], rates.steps[-1])
    lines: dict[str, Callable[[int, float], Share]] = {
        "assessor, balanced accuracy": rates.balanced,
        "attacks with an error that the novice misses, of all attacks": rates.won,
        "the same, of the valid attacks": partial(rates.share, "attacker/undetected"),
        "attacks without an error, where one was to be put in": partial(
            rates.share, "attacker/harmless"
        ),
    }
    heading = ["%", *(f"step {step}" for step in ends)]
    return [
        heading,
        *([name, *(str(share(step, 1.0)) for step in ends)] for name, share in lines.items()),
    ]


def _by_step(experiment: str, lines: Mapping[str, tuple[str, ...]], folder: Path) -> Table:
    """Tabulate shares by step, at temperature 1."""
    rates = Rates.of(experiment, folder)
    table = [["%", *(f"step {step}" for step in rates.steps)]]
    for name, measures in lines.items():
        shares = [
            rates.won(step, 1.0) if measures == WON else rates.share(measures, step, 1.0)
            for step in rates.steps
        ]
        if "invalid" in name:
            shares = [share.complement for share in shares]
        table.append([name, *map(str, shares)])
    return table


def both_roles_table(rates: Rates) -> Table:
    """Both roles at the first and the last step, each against both of the other: errors found, and
    attacks that win.
    """
    first, last = rates.steps[0], rates.steps[-1]

    def share(measure: str, step: int) -> Share:
        return rates.share(measure, step, 1.0)

    undetected = {
        "start": [
            share("attacker/undetected", first),
            share("assessor/frozen_attacks", last).complement,
        ],
        "end": [share("attacker/undetected", last), share("self/attacks", last).complement],
    }
    table = [["%", "assessor at the start", "assessor at the end"]]
    for when, cells in undetected.items():
        table.append(
            [f"errors found, attacker at the {when}", *(str(cell.complement) for cell in cells)]
        )
    for (when, cells), step in zip(undetected.items(), (first, last), strict=True):
        won = [cell.among(share("attacker/valid", step)) for cell in cells]
        table.append(
            [
                f"share of all attacks that are valid and missed, attacker at the {when}",
                *map(str, won),
            ]
        )
    return [
        *table,
        [
            "correct notes called wrong",
            *(str(share("assessor/clean", s).complement) for s in (first, last)),
        ],
    ]


def quickstart_table(folder: Path = FIGURES) -> Table:
    """The same of the quickstart, all seeds pooled."""
    return both_roles_table(Rates.of("quickstart", folder))


def kinds_table(folder: Path = FIGURES) -> Table:
    """Tabulate errors found and put in, by kind of error, at the first and the last step."""
    rates = Rates.of("headline", folder)
    first, last = rates.steps[0], rates.steps[-1]
    table = [
        [
            "kind of error",
            *(f"{what}, step {step}" for what in ("found", "put in") for step in (first, last)),
        ]
    ]
    for kind in KINDS:
        shares = [str(rates.share(f"assessor/error/{kind}", step, 1.0)) for step in (first, last)]
        table.append([kind, *shares, *(str(chosen(rates, kind, step)) for step in (first, last))])
    return [
        *table,
        [
            "effective number of kinds",
            "",
            "",
            *(effective_kinds(rates, step) for step in (first, last)),
        ],
    ]


def chosen(rates: Rates, kind: str, step: int) -> Share:
    """Share of valid attacks that put in an error of ``kind``."""
    return rates.share(f"attacker/kind/{kind}", step, 1.0).among(
        rates.share("attacker/undetected", step, 1.0)
    )


def effective_kinds(rates: Rates, step: int) -> str:
    """The effective number of kinds of error among the valid attacks, the mean over seeds."""
    by_seed = zip(*(chosen(rates, kind, step).counts for kind in KINDS), strict=True)
    return f"{mean(effective_number([hits for hits, _ in kinds]) for kinds in by_seed):.1f}"


def long_table(folder: Path = FIGURES) -> Table:
    """Tabulate runs that go on beyond what the assessor can learn, at temperature 1, beside their
    starting player.
    """
    runs = {name: Rates.of(name, folder) for name in LONG}
    rows = [("novice", next(iter(runs.values())), 0)]
    rows += [(f"`{name}`", rates, rates.steps[-1]) for name, rates in runs.items()]

    columns: dict[str, Callable[[Rates, int], Share]] = {
        "own attacks found": lambda rates, step: rates.share("self/attacks", step, 1.0),
        "doses, of the errors put in": lambda rates, step: chosen(rates, "dose", step),
        "doses found": lambda rates, step: rates.share("assessor/error/dose", step, 1.0),
        "balanced": lambda rates, step: rates.balanced(step, 1.0),
        "undetected by the novice": lambda rates, step: rates.share(
            "attacker/undetected", step, 1.0
        ),
    }
    table = [["%", "step", *columns, "effective number of kinds"]]
    for name, rates, step in rows:
        shares = (str(share(rates, step)) for share in columns.values())
        table.append([name, str(step), *shares, effective_kinds(rates, step)])
    return table


def normalization_table(folder: Path = FIGURES) -> Table:
    """Compare the last step of the runs of ``NORMALIZATIONS`` at temperature 1, and pair them by
    seed.
    """
    runs = {name: Rates.of(run, folder) for name, run in NORMALIZATIONS.items()}
    step = runs["batch"].steps[-1]

    def missed(measure: str) -> dict[str, Share]:
        return {name: rates.share(measure, step, 1.0).complement for name, rates in runs.items()}

    lines = {
        "correct notes called wrong": missed("assessor/clean"),
        "wrong notes believed": missed("assessor/error"),
    }
    lines["attacks valid and undetected, of all"] = {
        name: rates.won(step, 1.0) for name, rates in runs.items()
    }
    table = [
        [
            f"step {step}, %",
            *(f"`{name}`" for name in runs),
            "`kind` less `batch`",
            "`mean` less `batch`",
        ]
    ]
    for line, shares in lines.items():
        gains = [gain(shares["batch"], shares[other])[0] for other in ("kind", "mean")]
        table.append([line, *map(str, shares.values()), *gains])
    return table


def credit_table(folder: Path = FIGURES) -> Table:
    """Compare the runs of ``CREDIT`` at step 20 and temperature 1; differences are paired by
    seed."""
    runs, step = {name: Rates.of(name, folder) for name in CREDIT}, 20
    recipe = runs["headline"]
    heading = [
        "",
        "assessor, balanced",
        "undetected by the novice",
        "valid and undetected, of all",
        "less `headline`",
    ]
    table = [heading, ["novice", *_of_both(recipe, 0, recipe.seeds), ""]]
    for name, rates in runs.items():
        less = (
            gain(recipe.won(step, 1.0, rates.seeds), rates.won(step, 1.0))[0]
            if rates is not recipe
            else ""
        )
        table.append([f"`{name}`", *_of_both(rates, step, rates.seeds), less])
    return table


def _of_both(rates: Rates, step: int, seeds: Sequence[int]) -> list[str]:
    shares = (rates.balanced, partial(rates.share, "attacker/undetected"), rates.won)
    return [str(share(step, 1.0, seeds)) for share in shares]


def medec_table(folder: Path = FIGURES) -> Table:
    """The players of ``smollm2`` as assessors of MEDEC-MS's validation set, from
    ``smollm2_medec.csv``.
    """
    with (folder / "smollm2_medec.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    measures = list(dict.fromkeys(row["measure"] for row in rows))
    players: dict[str, list[str]] = {}
    for row in rows:
        players.setdefault(row["player"], []).append(
            str(Share(((int(row["hits"]), int(row["items"])),)))
        )
    return [["", *measures], *([player, *cells] for player, cells in players.items())]


def runs_table(experiments: Sequence[str] = ABLATIONS, folder: Path = FIGURES) -> Table:
    """Runs side by side at temperature 1: the novice, then every run where the shortest ends and at
    its own end.
    """
    rates = {experiment: Rates.of(experiment, folder) for experiment in experiments}
    end = min(run.steps[-1] for run in rates.values())
    novice = _side_by_side(next(iter(rates.values())), 0)
    table = [["", "step", "own games, in training", *novice], ["novice", "0", "", *novice.values()]]
    for experiment, run in rates.items():
        for step in sorted({end, run.steps[-1]}):
            shown = in_training(experiment, "assessor", "accuracy", slice(step - 10, step), folder)
            table.append(
                [f"`{experiment}`", str(step), str(shown), *_side_by_side(run, step).values()]
            )
    return table


def _side_by_side(rates: Rates, step: int) -> dict[str, str]:
    shares = {
        "own games, isolated": rates.share(("self/attacks", "self/decoys"), step, 1.0),
        "balanced": rates.balanced(step, 1.0),
        "valid and undetected, of all": rates.won(step, 1.0),
        "harmless": rates.share("attacker/harmless", step, 1.0),
    }
    return {name: str(share) for name, share in shares.items()}


def headline_sentence(folder: Path = FIGURES) -> str:
    """The headline run in one sentence, for the README."""
    rates = Rates.of("headline", folder)
    first, last = rates.steps[0], rates.steps[-1]

    def change(share: Callable[[int, float], Share], temperature: float = 1.0) -> str:
        return " to ".join(
            f"{100 * share(step, temperature).value:.0f} %" for step in (first, last)
        )

    undetected = partial(rates.share, "attacker/undetected")
    return (
        f"In {last} steps of 64 games in the toy clinic, {len(rates.seeds)} seeds, the assessor's "
        "balanced accuracy on "
        f"held-out notes goes from {change(rates.balanced)} (greedy: "
        f"{change(rates.balanced, 0.0)}), and the share of "
        "all attacks that put in an error which the frozen starting player misses from "
        f"{change(rates.won)} (of the "
        f"valid ones from {change(undetected)})."
    )


def gains_table(folder: Path = FIGURES) -> Table:
    """Tabulate the text's claims about the method: differences at temperature 1, paired by seed."""
    headline, shared, rules_alone = (
        Rates.of(name, folder) for name in ("headline", "shared", "rules_alone")
    )
    end = headline.steps[-1]
    own = ("self/attacks", "self/decoys")
    lines: dict[str, tuple[Share, Share]] = {
        f"`headline`, step {end} less step 0: assessor, balanced accuracy": (
            headline.balanced(0, 1.0),
            headline.balanced(end, 1.0),
        ),
        "the same: attacker, undetected by the novice": (
            headline.share("attacker/undetected", 0, 1.0),
            headline.share("attacker/undetected", end, 1.0),
        ),
        "the same: attacker, valid and undetected, of all attacks": (
            headline.won(0, 1.0),
            headline.won(end, 1.0),
        ),
        "`headline` less `shared`, step 20: own games, isolated": (
            shared.share(own, 20, 1.0),
            headline.share(own, 20, 1.0, shared.seeds),
        ),
        f"`rules_alone` less `headline`, step {end}: harmless attacks": (
            headline.share("attacker/harmless", end, 1.0, rules_alone.seeds),
            rules_alone.share("attacker/harmless", end, 1.0),
        ),
    }
    summed, by_role = (Rates.of(f"credit_{how}", folder) for how in ("summed", "by_role"))
    lines["`credit_by_role` less `credit_summed`, step 20: undetected by the novice"] = (
        summed.share("attacker/undetected", 20, 1.0),
        by_role.share("attacker/undetected", 20, 1.0),
    )
    lines["the same two: valid and undetected, of all attacks"] = (
        summed.won(20, 1.0),
        by_role.won(20, 1.0),
    )
    long, learnable = (Rates.of(name, folder) for name in ("long", "long_learnable"))
    lines["`long_learnable` less `long`, step 100: own attacks found"] = (
        long.share("self/attacks", 100, 1.0),
        learnable.share("self/attacks", 100, 1.0, long.seeds),
    )
    return [
        ["difference, points", "mean (95 % over seeds)", "each seed"],
        *([n, *gain(*pair)] for n, pair in lines.items()),
    ]


def markdown(table: Table) -> str:
    """A table as Markdown; its first row is the heading."""
    heading, *rows = table
    lines = [heading, ["---", *["---:"] * (len(heading) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


TABLES: dict[str, Callable[..., Table]] = {
    "quickstart": quickstart_table,
    "headline": headline_table,
    "summary": summary_table,
    "kinds": kinds_table,
    "gains": gains_table,
    "long": long_table,
    "normalization": normalization_table,
    "credit": credit_table,
    "smollm2_medec": medec_table,
    "runs": runs_table,
    "smollm2": partial(_by_step, "smollm2", SMOLLM2_LINES),
    "adapters": partial(runs_table, ("headline", "adapter_shared", "adapter_per_role")),
}


def source_hash(*experiments: str, folder: Path = FIGURES) -> str:
    """Return the SHA-256 over the CSV files of a picture."""
    files = [folder / f"{name}_{part}.csv" for name in experiments for part in ("rates", "steps")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
