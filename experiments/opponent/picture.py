"""Draw the picture of the README from the committed counts.

``python -m experiments.opponent.picture``.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import typer

from experiments.learning.pictures import BLUE, GREEN, ORANGE
from experiments.opponent.results import ARMS, FIGURES, by_shown

COLOURS = dict(zip(ARMS, (ORANGE, BLUE, GREEN, "black"), strict=True))
LABELS = dict(zip(ARMS, ("self-play", "frozen", "frozen, searched", "optimism"), strict=True))


def draw(folder: Path = FIGURES, output: Path = FIGURES / "study.svg") -> None:
    """Recall of the learnable unseen kinds by step, and by the attacks of unseen kinds shown."""
    plt.rcParams["svg.hashsalt"] = "study"  # the same file for the same counts
    found = by_shown(folder)
    figure, panels = plt.subplots(1, 2, figsize=(10.4, 3.4), sharey=True)
    for axes, place in zip(panels, ("step", "shown"), strict=True):
        for arm in ARMS:
            own = found[found["arm"] == arm]
            for _, run in own.groupby("start"):
                axes.plot(run[place], run["recall"], color=COLOURS[arm], lw=0.6, alpha=0.4)
            if len(own) and place == "step":
                mean = own.groupby("step")["recall"].mean()
                axes.plot(mean.index, mean, color=COLOURS[arm], lw=2.5, label=LABELS[arm])
    panels[0].set_title("Management and treatment errors found")
    panels[0].set_xlabel("step of 64 games")
    panels[0].set_ylabel("%")
    panels[0].set_ylim(0, 101)
    panels[0].legend(loc="upper left")
    panels[1].set_title("The same by attacks shown")
    panels[1].set_xlabel("attacks of unseen kinds shown so far")
    panels[1].set_xscale("symlog", linthresh=10)
    panels[1].set_xlim(left=0)
    figure.tight_layout()
    figure.savefig(output, metadata={"Date": None})


if __name__ == "__main__":
    typer.run(draw)
