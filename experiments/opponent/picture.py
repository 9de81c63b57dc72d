"""Draw the pictures of the README from the committed counts:

``python -m experiments.opponent.picture``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
import typer

from experiments.learning.pictures import BLUE, GREEN, ORANGE
from experiments.opponent.results import (
    DRAWN,
    FIGURES,
    MEASURES,
    Players,
    found_from,
    of_arm,
    read,
    steps_of,
)

COLOURS = dict(zip(DRAWN, (ORANGE, BLUE, GREEN), strict=True))
LABELS = dict(zip(DRAWN, ("self-play", "frozen attacker", "labels alone"), strict=True))
BY_STEP = {
    "errors of unseen kinds found": "Errors of unseen kinds found",
    "all errors found": "All errors found",
}


def line(axes: Any, arm: str, points: Sequence[tuple[float, Sequence[float]]]) -> None:
    """The mean over seeds of one arm, and every seed as a dot; ``points`` are places with their
    seeds' values in %.
    """
    places = [place for place, _ in points]
    axes.plot(
        places, [mean(values) for _, values in points], color=COLOURS[arm], lw=2, label=LABELS[arm]
    )
    for place, values in points:
        axes.plot([place] * len(values), values, "o", color=COLOURS[arm], ms=3, alpha=0.6)


def values_at(players: Players, unseen: float, arm: str, step: int, measure: str) -> list[float]:
    """A measure's values of all seeds, in %, without those that were not measured."""
    values = [MEASURES[measure](player) for player in of_arm(players, unseen, arm, step).values()]
    return [value for value in values if value == value]


def draw_starts(folder: Path = FIGURES) -> None:
    """Errors of unseen kinds found from each start, the mean over its seeds, at two steps."""
    figure, panels = plt.subplots(1, 2, figsize=(10.4, 3.4), sharex=True)
    for axes, step in zip(panels, (40, 80), strict=True):
        starts = found_from(0.03, step, folder)
        for place, found in enumerate(starts.values()):
            means = {arm: mean(found[arm]) for arm in DRAWN if found[arm]}
            axes.plot(
                [means["static"], means["self_play"]],
                [place, place],
                color="lightgrey",
                lw=2,
                zorder=1,
            )
            for arm, value in means.items():
                axes.scatter(
                    value,
                    place,
                    color=COLOURS[arm],
                    label=LABELS[arm] if place == 0 else None,
                    zorder=2,
                )
        axes.set_yticks(range(len(starts)), starts)
        axes.invert_yaxis()
        axes.set_title(f"Errors of unseen kinds found after {step} steps, 3 % rare")
        axes.set_xlabel("%")
    panels[0].set_ylabel("start")
    panels[0].set_xlim(0, 101)
    panels[0].legend(loc="center left")
    figure.tight_layout()
    figure.savefig(folder / "starts.svg", metadata={"Date": None})


def draw(folder: Path = FIGURES) -> None:
    """Recall by step where the start seldom shows unseen kinds, and the worst case by how seldom
    another one does.
    """
    players, taught = read(folder), read(folder, "8")
    shares = sorted({key[0] for key in players})
    figure, panels = plt.subplots(1, 3, figsize=(10.4, 3.0), sharey=True)
    for axes, (measure, title) in zip(panels[:2], BY_STEP.items(), strict=True):
        for arm in DRAWN:
            steps = steps_of(players, shares[0])
            points = [
                (float(step), values_at(players, shares[0], arm, step, measure)) for step in steps
            ]
            line(axes, arm, [point for point in points if point[1]])
        axes.set_title(f"{title}, {100 * shares[0]:g} % rare")
        axes.set_xlabel("step of 64 games")
    for arm in DRAWN:
        rare = sorted({key[0] for key in taught})
        points = [
            (100 * share, values_at(taught, share, arm, 40, "worst case over the panel"))
            for share in rare
        ]
        line(panels[2], arm, [point for point in points if point[1]])
    panels[2].set_title("Worst case over the panel, step 40, start 8")
    panels[2].set_xlabel("unseen kinds that were asked for, %")
    panels[2].set_xticks([100 * share for share in rare], [f"{100 * share:g}" for share in rare])
    panels[0].set_ylim(0, 101)
    panels[0].set_ylabel("%")
    panels[0].legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(folder / "opponent.svg", metadata={"Date": None})
    draw_starts(folder)


if __name__ == "__main__":
    typer.run(draw)
