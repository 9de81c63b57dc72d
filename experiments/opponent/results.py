"""The committed counts of ``experiments.opponent.run``, and the tables of the README.

``python -m experiments.pages`` fills them in, ``experiments.opponent.picture`` draws.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from experiments.learning.results import Table, markdown
from medserl_agentloop.core.metrics import effective_number
from medserl_agentloop.scoring.metrics import mean_interval

FIGURES = Path(__file__).parent / "figures"
PAGE = Path(__file__).with_name("README.md")
START = "start"
DRAWN = ("self_play", "static", "labels")
ARMS = (
    *DRAWN,
    "learnable",
    "pool",
)  # the last one was measured before the pool of checkpoints left the package
PANEL = (START, "self_play")
"""Attackers that all assessors of a step meet: the start, and the player of that step of the arm
with a trained one.
"""
VALID = "attacker/valid"
UNSEEN = ("management", "treatment", "dose")  # the kinds of error that the novice does not see
FEWEST = 30  # valid attacks of a member of the panel that counts
MARGIN = 2.0  # points; a difference that is surely smaller counts as none
Counts = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Player:
    """The counts of one assessor, of one seed, at one step."""

    counts: Counts

    def share(self, *measures: str) -> float:
        """Share of some measures counted together, in %."""
        found = [self.counts.get(measure, (0, 0)) for measure in measures]
        items = sum(of for _, of in found)
        return 100 * sum(hits for hits, _ in found) / items if items else float("nan")

    @property
    def worst_case(self) -> float:
        """The lowest recall over the panel's attackers, in %."""
        panel = [
            m for m, (_, items) in self.counts.items() if m.startswith("panel/") and items >= FEWEST
        ]
        return min(map(self.share, panel), default=float("nan"))

    @property
    def effective_kinds(self) -> float:
        """The effective number of kinds among its own valid attacks."""
        return effective_number(
            [hits for m, (hits, _) in self.counts.items() if m.startswith("attacker/kind/")]
        )

    @property
    def unseen_attacks(self) -> float:
        """Share of the unseen kinds among its own valid attacks, in %."""
        return (
            100
            * sum(self.counts.get(f"attacker/kind/{k}", (0, 0))[0] for k in UNSEEN)
            / self.counts[VALID][0]
        )


Players = Mapping[tuple[float, str, int, int], Player]
"""Players by share of unseen kinds, arm, seed and step."""


def read(folder: Path = FIGURES, start: str = "0") -> Players:
    """The counts of ``rates.csv`` for the runs from one start."""
    return read_starts(folder)[start]


def read_starts(folder: Path = FIGURES) -> dict[str, Players]:
    """The counts of ``rates.csv`` by start."""
    counts: defaultdict[str, defaultdict[tuple[float, str, int, int], Counts]]
    counts = defaultdict(lambda: defaultdict(dict))
    with (folder / "rates.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            key = (float(row["unseen"]), row["arm"], int(row["seed"]), int(row["step"]))
            counts[row["start"]][key][row["measure"]] = (int(row["hits"]), int(row["items"]))
    return {
        start: {key: Player(of) for key, of in players.items()} for start, players in counts.items()
    }


MEASURES: dict[str, Callable[[Player], float]] = {
    "worst case over the panel": lambda player: player.worst_case,
    "errors of unseen kinds found": lambda player: player.share(
        *(f"assessor/error/{kind}" for kind in UNSEEN)
    ),
    "all errors found": lambda player: player.share("assessor/error"),
    "correct notes called wrong": lambda player: 100 - player.share("assessor/clean"),
}


def of_arm(players: Players, unseen: float, arm: str, step: int) -> dict[int, Player]:
    """The players of one arm at one step, by seed; the start is at step 0 in every arm."""
    wanted = (unseen, START, 0) if step == 0 else (unseen, arm, step)
    return {
        seed: player
        for (share, name, seed, at), player in players.items()
        if (share, name, at) == wanted
    }


def steps_of(players: Players, unseen: float) -> list[int]:
    return sorted({step for share, _, _, step in players if share == unseen})


def arms_table(unseen: float, folder: Path = FIGURES) -> Table:
    """The start and every arm by step, in %: the mean over seeds with Student's 95 % interval, and
    each seed.
    """
    players = read(folder)
    table = [["", "step", "seeds", *MEASURES]]
    for step in steps_of(players, unseen):
        for arm in (START,) if step == 0 else ARMS:
            if seeds := of_arm(players, unseen, arm, step):
                cells = [
                    _over_seeds([of(player) for _, player in sorted(seeds.items())])
                    for of in MEASURES.values()
                ]
                table.append([f"`{arm}`" if step else "start", str(step), str(len(seeds)), *cells])
    return table


def _over_seeds(values: Sequence[float]) -> str:
    if any(value != value for value in values):
        return ""
    if len(values) == 1:
        return f"{values[0]:.1f}"
    average, low, high = mean_interval(values)
    return (
        f"{average:.1f} ({low:.1f} to {high:.1f}; {', '.join(f'{value:.1f}' for value in values)})"
    )


def gains_table(unseen: float, folder: Path = FIGURES) -> Table:
    """Self-play less every other arm in points, paired by seed, with what the interval says of the
    margin.
    """
    players = read(folder)
    table = [["self-play less", "step", "measure", "mean (95 % over seeds)", "each seed", "says"]]
    for arm in ARMS[1:]:
        for step in steps_of(players, unseen)[1:]:
            ours, theirs = (of_arm(players, unseen, name, step) for name in (ARMS[0], arm))
            both = sorted(ours.keys() & theirs.keys())
            for name, of in MEASURES.items():
                each = [of(ours[seed]) - of(theirs[seed]) for seed in both]
                if len(each) > 1 and all(value == value for value in each):
                    average, low, high = mean_interval(each)
                    said = ", ".join(f"{value:+.1f}" for value in each)
                    cells = [
                        f"{average:+.1f} ({low:+.1f} to {high:+.1f})",
                        said,
                        verdict(low, high),
                    ]
                    table.append([f"`{arm}`", str(step), name, *cells])
    return table


def verdict(low: float, high: float) -> str:
    """An interval of a difference in words, with ``MARGIN`` points as the least that counts."""
    if low > -MARGIN and high < MARGIN:
        return "equal"
    return "more" if low > 0 else "less" if high < 0 else "open"


def attackers_table(unseen: float, folder: Path = FIGURES) -> Table:
    """The panel's attackers: valid attacks, kinds of error, and what each assessor finds of them,
    in %, over seeds.

    Assessors are those of the attacker's step, or of the last step where the start attacks.
    """
    players = read(folder)
    last = steps_of(players, unseen)[-1]
    table = [
        [
            "attacker",
            "step",
            "valid",
            "effective kinds",
            "unseen kinds",
            *(f"found by `{a}`" for a in (START, *DRAWN)),
        ]
    ]
    for arm, trained in panel_of(players, unseen):
        own = of_arm(players, unseen, arm, trained).values()
        row = [
            _mean([player.share(VALID) for player in own]),
            _mean([p.effective_kinds for p in own]),
            _mean([p.unseen_attacks for p in own]),
        ]
        for assessor in (START, *DRAWN):
            met = of_arm(
                players, unseen, assessor, 0 if assessor == START else trained or last
            ).values()
            row.append(_mean([player.share(f"panel/{arm}/{trained}") for player in met]))
        table.append([f"`{arm}`", str(trained), *row])
    return table


def starts_table(unseen: float, step: int, folder: Path = FIGURES) -> Table:
    """Errors of unseen kinds found after so many steps from each start, in %: the mean over its
    seeds, and each seed.

    The last row has the mean of the differences over starts, with Student's 95 % interval. A start
    needs both arms.
    """
    starts, by_start = read_starts(folder), found_from(unseen, step, folder)
    arms = [arm for arm in ARMS if any(found[arm] for found in by_start.values())]
    others = [arm for arm in arms[1:] if sum(bool(found[arm]) for found in by_start.values()) > 1]
    less = [f"`{arms[0]}` less `{arm}`" for arm in others]
    table = [["start", "unseen kinds in its attacks", *(f"`{arm}`" for arm in arms), *less]]
    gains: dict[str, list[float]] = {arm: [] for arm in others}
    for start, found in by_start.items():
        shown = _mean(
            [player.unseen_attacks for player in of_arm(starts[start], unseen, START, 0).values()]
        )
        table.append([start, shown, *(_with_seeds(found[arm]) for arm in arms)])
        for arm, of_arms in gains.items():
            if found[arm]:
                of_arms.append(mean(found[arms[0]]) - mean(found[arm]))
            table[-1].append(f"{of_arms[-1]:+.1f}" if found[arm] else "")
    intervals = [mean_interval(of_arms) for of_arms in gains.values()]
    over_starts = (
        f"{average:+.1f} ({low:+.1f} to {high:+.1f})" for average, low, high in intervals
    )
    return [*table, ["all", "", *("" for _ in arms), *over_starts]]


def rarity_table(start: str, folder: Path = FIGURES) -> Table:
    """Every arm from one start by share of unseen kinds and step, in %: the mean over seeds, and
    each seed.
    """
    players = read(folder, start)
    table = [
        ["asked for", "unseen kinds in its attacks", "", "step", *(f"`{arm}`" for arm in DRAWN)]
    ]
    for unseen in sorted({share for share, *_ in players}):
        shown = _mean(
            [player.unseen_attacks for player in of_arm(players, unseen, START, 0).values()]
        )
        for name in ("errors of unseen kinds found", "worst case over the panel"):
            for step in steps_of(players, unseen)[1:]:
                by_arm = [
                    [*map(MEASURES[name], of_arm(players, unseen, arm, step).values())]
                    for arm in DRAWN
                ]
                if all(by_arm) and all(value == value for values in by_arm for value in values):
                    table.append(
                        [f"{100 * unseen:g}", shown, name, str(step), *map(_with_seeds, by_arm)]
                    )
    return table


def found_from(
    unseen: float, step: int, folder: Path = FIGURES
) -> dict[str, dict[str, list[float]]]:
    """Errors of unseen kinds found by start and arm, in %, each seed, from the starts with both
    arms at this step.
    """
    measure = MEASURES["errors of unseen kinds found"]
    by_start = {
        start: {
            arm: [measure(p) for _, p in sorted(of_arm(players, unseen, arm, step).items())]
            for arm in ARMS
        }
        for start, players in sorted(read_starts(folder).items())
    }
    return {
        start: found for start, found in by_start.items() if found["self_play"] and found["static"]
    }


def _with_seeds(values: Sequence[float]) -> str:
    each = ", ".join(f"{value:.1f}" for value in values)
    return f"{mean(values):.1f} ({each})" if len(values) > 1 else each


def panel_of(players: Players, unseen: float) -> list[tuple[str, int]]:
    """The attackers that were met, with their steps."""
    met = {m for (share, *_), player in players.items() if share == unseen for m in player.counts}
    names = [m.removeprefix("panel/").split("/") for m in met if m.startswith("panel/")]
    return sorted(((arm, int(step)) for arm, step in names), key=lambda member: member[1])


def _mean(values: Sequence[float]) -> str:
    known = [value for value in values if value == value]
    return f"{sum(known) / len(known):.1f}" if known else ""


def tables(folder: Path = FIGURES) -> dict[str, str]:
    """Every table of the README by name."""
    made = {}
    for unseen in sorted({key[0] for key in read(folder)}):
        for name, make in (
            ("arms", arms_table),
            ("gains", gains_table),
            ("attackers", attackers_table),
        ):
            made[f"{name}_{100 * unseen:g}"] = markdown(make(unseen, folder))
    for step in (20, 40, 80):
        made[f"starts_3_{step}"] = markdown(starts_table(0.03, step, folder))
    made["rarity"] = markdown(rarity_table("8", folder))
    return made
