"""Draw the pictures of ``docs/learning.md`` and print its tables, from the CSV files beside them.

Run by hand after `benchmarks/learning.py`: ``python benchmarks/learning_pictures.py``. Each picture names the
hash of the files it was drawn from, so that a test can tell an old one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from learning_results import KINDS, RESULTS, Rates, source_hash

BLUE, ORANGE, GREEN, GREY = "#2f6fb0", "#d9722e", "#3a9150", "#8a8a8a"
KIND_COLOURS = ("#b8cfe5", "#8fb4d6", "#5b8fc0", "#f0c09a", "#e0904f", "#a8480f")
plt.rcParams.update(
    {
        "svg.hashsalt": "medserl",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 9.5,
        "axes.titlelocation": "left",
        "legend.frameon": False,
    }
)


def curve(
    axes: Any, rates: Rates, measures: Sequence[str], temperature: float, label: str, colour: str, style: str = "-"
) -> None:
    """A share by step: pooled over seeds with its interval, and every seed as a thin line."""
    steps = rates.steps
    pooled = [rates.share(measures, step, temperature) for step in steps]
    low, high = zip(*(share.interval for share in pooled), strict=True)
    axes.fill_between(steps, [100 * x for x in low], [100 * x for x in high], color=colour, alpha=0.15, lw=0)
    axes.plot(steps, [100 * share.value for share in pooled], style, color=colour, lw=2, label=label)
    for seed in rates.seeds:
        values = [100 * rates.share(measures, step, temperature, (seed,)).value for step in steps]
        axes.plot(steps, values, style, color=colour, lw=0.6, alpha=0.6)


def headline() -> None:
    """Both roles by step, and which errors make the difference."""
    rates = Rates.of("headline")
    figure, ((left, right), (kinds, attacks)) = plt.subplots(2, 2, figsize=(8.4, 6.0), sharex=True)
    for temperature, label, style in ((1.0, "temperature 1", "-"), (0.0, "greedy", "--")):
        curve(left, rates, ("assessor/clean", "assessor/error"), temperature, label, BLUE, style)
        curve(right, rates, ("attacker/undetected",), temperature, label, ORANGE, style)
    curve(right, rates, ("attacker/valid",), 1.0, "valid attacks, temperature 1", GREY)
    left.set_title("Assessor: balanced accuracy on held-out notes")
    right.set_title("Attacker: not detected by the frozen novice")
    for kind, colour in zip(KINDS, KIND_COLOURS, strict=True):
        found = [100 * rates.share(f"assessor/error/{kind}", step, 1.0).value for step in rates.steps]
        kinds.plot(rates.steps, found, color=colour, lw=2, label=kind)
    kinds.set_title("Assessor: errors found, by kind")
    layers = [[100 * chosen(rates, kind, step) for step in rates.steps] for kind in KINDS]
    attacks.stackplot(rates.steps, layers, colors=KIND_COLOURS, labels=KINDS)
    attacks.set_title("Attacker: errors put in, by kind")
    for axes in (left, right, kinds, attacks):
        axes.set_ylim(0, 101)
        axes.set_ylabel("%")
        axes.margins(x=0)
    for axes in (kinds, attacks):
        axes.set_xlabel("self-play step of 64 games")
    for axes in (left, right):
        axes.legend(loc="lower right")
    attacks.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)
    save(figure, "headline", "headline")


def chosen(rates: Rates, kind: str, step: int) -> float:
    """Share of valid attacks at temperature 1 that put in an error of ``kind``."""
    hits = rates.share(f"attacker/kind/{kind}", step, 1.0).hits
    return hits / max(1, rates.share("attacker/undetected", step, 1.0).items)


def save(figure: Any, name: str, *experiments: str) -> None:
    """Write ``NAME.svg`` with the hash of its sources."""
    figure.tight_layout()
    path = RESULTS / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None, "Source": source_hash(*experiments)})
    plt.close(figure)
    print(path)


if __name__ == "__main__":
    headline()
