"""Simulate the rewards of the medical game: ``python -m experiments.incentives.simulate [KEY=VALUE
...]``.

Prints two tables in seconds. Without other assumptions it also writes them, and the picture, to
``figures/``.
"""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from itertools import product
from math import isnan
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from experiments.incentives.assumptions import Assumptions
from experiments.incentives.dynamics import BALANCED_MIX, Setting, best_f1, settled
from experiments.incentives.payoffs import Terms

FIGURES = Path(__file__).parent / "figures"
PAGE = Path(__file__).with_name("README.md")
FEWER_DECOYS = BALANCED_MIX.replace("decoy_benign=2", "decoy_benign=1")
EARLIER, ALL, FEWER = "earlier defaults", "all four changes", "all four, fewer decoys"
PENALTY = "all four, failing the gate costs"
NEUTRAL, GATE = "balanced mix, neutral decoys", "blind gate"
SHOWN = (EARLIER, NEUTRAL, GATE, ALL, PENALTY)
"""Settings of the page; the others are parts of what ``robustness`` counts."""
MEASURES = (
    *("harmful of untouched", "blatant", "subtle", "unknowable"),
    *("edited, nothing seen", "shortcut", "F1"),
)

Row = dict[str, str | float]
Table = list[Row]


def settings_of(assumed: Assumptions, judge: str) -> list[Setting]:
    """The earlier defaults, every change alone, and changes together."""
    neutral, milder = Terms(decoy=0.0), Terms(failed_attack=assumed.failed_attack)
    earlier = Setting(EARLIER, judge)
    decoys = replace(earlier, name=NEUTRAL, mix=BALANCED_MIX, terms=neutral)
    suspected = replace(earlier, name="balanced mix, decoys paid for suspicion", mix=BALANCED_MIX)
    every = replace(decoys, name=ALL, terms=replace(neutral, failed_attack=assumed.failed_attack))
    every = replace(every, gate=True, touch=True)
    return [
        earlier,
        suspected,
        decoys,
        replace(earlier, name=GATE, gate=True),
        replace(earlier, name="milder failed_attack", terms=milder),
        replace(earlier, name="edit must touch the error", touch=True),
        replace(earlier, name="learnable reward", learnable=True),
        replace(earlier, name="blind gate, milder failed_attack", gate=True, terms=milder),
        replace(suspected, name="decoys paid for suspicion, gate", gate=True),
        replace(decoys, name="neutral decoys, gate", gate=True),
        replace(decoys, name="neutral decoys, learnable reward", learnable=True),
        every,
        replace(every, name=FEWER, mix=FEWER_DECOYS),
        replace(every, name="all four, learnable reward", learnable=True),
        replace(every, name=PENALTY, failed_gate=assumed.failed_attack),
    ]


def dynamics_table(assumed: Assumptions) -> Table:
    """Tabulate the players' final behaviour: a row for each judge and setting."""
    settings = [Setting(EARLIER, judge) for judge in ("labels", "errs")]
    settings += [
        setting
        for judge in ("pair", "perfect")
        for setting in settings_of(assumed, judge)
        if setting.name in SHOWN
    ]
    outcomes = settled(settings, [assumed] * len(settings))
    return [
        {"judge": s.judge, "setting": s.name, **{name: measures[name] for name in MEASURES}}
        for s, measures in zip(settings, outcomes, strict=True)
    ]


def gate_table(assumed: Assumptions) -> Table:
    """Tabulate the blind reader's quality: all four changes, a judge that compares and calls 95 %
    of unknowable errors harmful, and readers from good to bad.
    """
    readers = [
        assumed.changed(
            ["unknowable.pair=0.95", f"unknowable.blind={passed}", f"subtle.blind={caught}"]
        )
        for passed, caught in product((0.05, 0.1, 0.2, 0.35), (0.3, 0.6))
    ]
    rows: Table = [
        {
            "gate passes unknowable errors": reader.gate("unknowable"),
            "gate passes subtle errors": reader.gate("subtle"),
        }
        for reader in readers
    ]
    settings = {setting.name: setting for setting in settings_of(assumed, "pair")}
    for column, name in (("void costs nothing", ALL), ("failing the gate costs", PENALTY)):
        outcomes = settled([settings[name]] * len(readers), readers)
        for row, played in zip(rows, outcomes, strict=True):
            row[f"best attack, {column}"] = max(
                ("blatant", "subtle", "unknowable", "no error"), key=played.__getitem__
            )
    return rows


def tables(assumed: Assumptions) -> dict[str, Table]:
    """All tables by the name of their file."""
    return {
        "dynamics": dynamics_table(assumed),
        "gate": gate_table(assumed),
    }


def cell(value: str | float) -> str:
    """A number with two digits; nothing where a game is not played."""
    if isinstance(value, float):
        return "" if isnan(value) else f"{round(value, 2) + 0.0:.2f}"
    return str(value)


def as_csv(table: Table) -> str:
    """A table as the text of a CSV file."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerows([list(table[0]), *([cell(value) for value in row.values()] for row in table)])
    return text.getvalue()


def as_markdown(table: Table) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(table[0])} |", "|" + "---|" * len(table[0])]
    return "\n".join(
        [*lines, *(f"| {' | '.join(cell(value) for value in row.values())} |" for row in table)]
    )


def draw(table: Table, assumed: Assumptions) -> None:
    """Draw three measures of every setting under two judges."""
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "incentives", "svg.fonttype": "none"})
    measures = {
        "edited, nothing seen": 'says "harmful" because\nthe note looks edited',
        "unknowable": "share of attacks that\nnobody can find",
        "F1": "F1 on untouched notes",
    }
    names = [str(row["setting"]) for row in table if row["judge"] == "pair"]
    figure, panels = plt.subplots(1, len(measures), figsize=(10, 4.2), sharey=True)
    for panel, (measure, title) in zip(panels, measures.items(), strict=True):
        for judge, marker in (("pair", "o"), ("perfect", "x")):
            values = [row[measure] for row in table if row["judge"] == judge]
            panel.scatter(values, range(len(names)), marker=marker, label=f"judge: {judge}")
        panel.set_title(title, fontsize=9)
        panel.set_xlim(-0.05, 1.05)
        panel.grid(axis="x", linewidth=0.3)
    panels[-1].axvline(best_f1(assumed), color="grey", linestyle=":", label="best threshold")
    panels[-1].legend(fontsize=7, loc="lower left")
    panels[0].set_yticks(range(len(names)), names, fontsize=8)
    panels[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(FIGURES / "incentives.svg", metadata={"Date": None})


def main(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Other assumptions, e.g. subtle.blind=0.3")
    ] = None,
) -> None:
    """Play the settings out and print the tables; write them where the assumptions are the
    defaults.
    """
    try:
        assumed = Assumptions().changed(overrides or [])
    except ValidationError as error:
        raise typer.BadParameter(
            f"{error}\nThe keys are those of experiments/incentives/assumptions.py."
        ) from None
    every = tables(assumed)
    for name, table in every.items():
        print(f"{name}\n\n{as_markdown(table)}\n")
    print(f"Best F1 of a threshold on untouched notes: {best_f1(assumed):.2f}")
    if overrides:
        return
    for name, table in every.items():
        (FIGURES / f"{name}.csv").write_text(as_csv(table), encoding="utf-8")
    draw(every["dynamics"], assumed)


if __name__ == "__main__":
    typer.run(main)
