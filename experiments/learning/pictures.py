"""Draw the pictures of the README and fill in its tables, from the committed CSV files.

Run by hand after ``experiments.learning.run``: ``python -m experiments.learning.pictures``. Each
picture names the hash of the files it was drawn from, so that a test can tell an old one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer

matplotlib.use("svg")
import matplotlib.pyplot as plt

from experiments import pages
from experiments.learning.results import (
    ABLATIONS,
    FIGURES,
    KINDS,
    LONG,
    Rates,
    Share,
    chosen,
    headline_sentence,
    headline_table,
    in_training,
    markdown,
    source_hash,
)

BLUE, ORANGE, GREEN, GREY, PURPLE = "#2f6fb0", "#d9722e", "#3a9150", "#8a8a8a", "#7d55a8"
KIND_COLOURS = ("#b8cfe5", "#8fb4d6", "#5b8fc0", "#f0c09a", "#e0904f", "#a8480f")
STYLE: Any = {  # matplotlib's names of settings are literal types
    "svg.hashsalt": "medserl",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}
plt.rcParams.update(STYLE)


def curve(
    axes: Any,
    rates: Rates,
    measures: Sequence[str],
    temperature: float,
    label: str,
    colour: str,
    style: str = "-",
) -> None:
    """A share by step: pooled over seeds with its interval, and every seed as a thin line."""
    steps = rates.steps
    pooled = [rates.share(measures, step, temperature) for step in steps]
    low, high = zip(*(share.interval for share in pooled), strict=True)
    axes.fill_between(
        steps, [100 * x for x in low], [100 * x for x in high], color=colour, alpha=0.15, lw=0
    )
    axes.plot(
        steps, [100 * share.value for share in pooled], style, color=colour, lw=2, label=label
    )
    for seed in rates.seeds:
        values = [100 * rates.share(measures, step, temperature, (seed,)).value for step in steps]
        axes.plot(steps, values, style, color=colour, lw=0.6, alpha=0.6)


def headline(folder: Path) -> None:
    """Both roles by step, and which errors make the difference."""
    rates = Rates.of("headline", folder)
    figure, ((left, right), (kinds, attacks)) = plt.subplots(2, 2, figsize=(8.4, 6.0), sharex=True)
    for temperature, label, style in ((1.0, "temperature 1", "-"), (0.0, "greedy", "--")):
        curve(left, rates, ("assessor/clean", "assessor/error"), temperature, label, BLUE, style)
        curve(right, rates, ("attacker/undetected",), temperature, label, ORANGE, style)
    curve(right, rates, ("attacker/valid",), 1.0, "valid attacks, temperature 1", GREY)
    left.set_title("Assessor: balanced accuracy")
    right.set_title("Attacker: undetected by the novice")
    for kind, colour in zip(KINDS, KIND_COLOURS, strict=True):
        shares = [
            100 * rates.share(f"assessor/error/{kind}", step, 1.0).value for step in rates.steps
        ]
        kinds.plot(rates.steps, shares, color=colour, lw=2, label=kind)
    kinds.set_title("Assessor: errors found, by kind")
    layers = [[100 * chosen(rates, kind, step).value for step in rates.steps] for kind in KINDS]
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
    save(figure, folder / "headline.svg", "headline")


def both_roles(name: str, folder: Path) -> None:
    """Both roles of a run by step, at temperature 1."""
    rates = Rates.of(name, folder)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 2.8), sharey=True)
    curve(left, rates, ("assessor/clean", "assessor/error"), 1.0, "", BLUE)
    curve(right, rates, ("attacker/undetected",), 1.0, "", ORANGE)
    left.set_title("Assessor: verdicts that are right")
    right.set_title("Attacker: errors that the starting player misses")
    left.set_ylabel("%")
    for axes in (left, right):
        axes.set_ylim(40, 101)
        axes.margins(x=0)
        axes.set_xlabel("self-play step of 64 games")
    save(figure, folder / f"{name}.svg", name)


def dots(axes: Any, names: Sequence[str], shares: Sequence[Share], title: str, colour: str) -> None:
    """One share per line with its interval; the first one, the starting point, as a dashed line
    too.
    """
    for line, share in enumerate(shares):
        if not share.items:
            continue
        low, high = share.interval
        axes.plot([100 * low, 100 * high], [line, line], color=colour, lw=2)
        axes.plot(100 * share.value, line, "o", color=colour)
    axes.axvline(100 * shares[0].value, color=GREY, ls="--", lw=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 101)
    axes.set_xlabel("%")
    axes.set_title(title)


def long(folder: Path) -> None:
    """The run's own attacks that are found, over a hundred steps: the mean of every five, and each
    seed's.
    """
    figure, axes = plt.subplots(figsize=(8.4, 2.8))
    for name, colour in zip(LONG, (ORANGE, GREY, BLUE, PURPLE, GREEN), strict=True):
        rates = Rates.of(name, folder)
        steps = range(5, rates.steps[-1] + 1, 5)
        fives = [
            in_training(name, "assessor", "accuracy/adversarial_benign", slice(s - 5, s), folder)
            for s in steps
        ]
        axes.plot(steps, [100 * share.value for share in fives], color=colour, lw=2, label=name)
        for seed in range(len(rates.seeds)):
            axes.plot(
                steps,
                [100 * share.of_seeds[seed] for share in fives],
                color=colour,
                lw=0.6,
                alpha=0.6,
            )
    axes.set_title("Own attacks found in training, %")
    axes.set_ylim(0, 101)
    axes.set_xlabel("self-play step")
    axes.margins(x=0)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, folder / "long.svg", *LONG)


def ablations(folder: Path) -> None:
    """The headline run and the same without one of its parts."""
    runs = {name: Rates.of(name, folder) for name in ABLATIONS}
    names = ["novice", *(name.replace("_", " ") for name in ABLATIONS)]
    figure, axes = plt.subplots(1, 4, figsize=(12.4, 2.3), sharey=True)
    novice = next(iter(runs.values()))
    for place, title, measures, colour in (
        (axes[0], "Assessor: balanced accuracy", ("assessor/clean", "assessor/error"), BLUE),
        (axes[1], "Assessor: right in its own games", ("self/attacks", "self/decoys"), BLUE),
        (axes[2], "Attacker: undetected by the novice", ("attacker/undetected",), ORANGE),
        (axes[3], "Attacker: valid attacks", ("attacker/valid",), GREEN),
    ):
        ends = [rates.share(measures, rates.steps[-1], 1.0) for rates in runs.values()]
        dots(place, names, [novice.share(measures, novice.steps[0], 1.0), *ends], title, colour)
    shown = [
        in_training(name, "assessor", "accuracy", slice(-10, None), folder) for name in ABLATIONS
    ]
    values = [100 * share.value for share in shown]
    axes[1].plot(
        values, range(1, len(names)), "o", color=BLUE, mfc="white", zorder=3, label="in training"
    )
    axes[1].legend(loc="upper left")
    save(figure, folder / "ablations.svg", *ABLATIONS)


def save(figure: Any, path: Path, *experiments: str) -> None:
    """Write a picture with the hash of its sources."""
    figure.tight_layout()
    figure.savefig(
        path, metadata={"Date": None, "Source": source_hash(*experiments, folder=path.parent)}
    )
    plt.close(figure)
    print(path)


PICTURES: dict[str, Callable[[Path], None]] = {
    "quickstart": partial(both_roles, "quickstart"),
    "headline": headline,
    "long": long,
    "ablations": ablations,
    "smollm2": partial(both_roles, "smollm2"),
}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    pictures: Annotated[
        list[str] | None, typer.Argument(help=f"Any of {', '.join(PICTURES)}; all by default.")
    ] = None,
    results: Annotated[
        Path, typer.Option(help="Folder of the CSV files, and of the pictures.")
    ] = FIGURES,
) -> None:
    """Draw pictures; where they are those of the pages, bring their tables up to date."""
    for name in pictures or PICTURES:
        PICTURES[name](results)
    if results.resolve() == FIGURES.resolve():
        pages.main()
    print(markdown(headline_table(results)), headline_sentence(results), sep="\n\n")


if __name__ == "__main__":
    app()
