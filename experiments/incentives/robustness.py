"""Do the directions of the simulation hold under other guesses? ``python -m
experiments.incentives.robustness``.

Draws all guesses anew, plays every setting out, and counts in how many draws each statement of the
README holds. A minute; writes ``figures/robustness.csv``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import numpy as np
import typer

from experiments.incentives.assumptions import Assumptions, Kind
from experiments.incentives.dynamics import settled
from experiments.incentives.simulate import (
    ALL,
    EARLIER,
    FEWER,
    FIGURES,
    PENALTY,
    Table,
    as_csv,
    as_markdown,
    settings_of,
)

Played = dict[tuple[str, str], dict[str, float]]
"""The measures by judge and setting."""

JUDGES = ("pair", "perfect")
GATE, MILDER = "blind gate", "blind gate, milder failed_attack"


def knowable(row: dict[str, float]) -> float:
    """Share of attacks on clean notes that put in an error which can be found."""
    return row["blatant"] + row["subtle"]


def all_judges(statement: Callable[[Played, str], bool]) -> Callable[[Played], bool]:
    """Return whether a statement holds under both judges."""
    return lambda played: all(statement(played, judge) for judge in JUDGES)


STATEMENTS: dict[str, Callable[[Played], bool]] = {
    "earlier: an edited look decides": all_judges(
        lambda p, j: p[j, EARLIER]["edited, nothing seen"] > 0.5
    ),
    "earlier: unknowable errors are most attacks (perfect)": lambda p: (
        p["perfect", EARLIER]["unknowable"] > 0.5
    ),
    "earlier: subtle errors are less than a third (pair)": lambda p: (
        p["pair", EARLIER]["subtle"] < 1 / 3
    ),
    "earlier: most attacks on error notes are elsewhere (pair)": lambda p: (
        p["pair", EARLIER]["elsewhere"] > 0.5
    ),
    "decoys paid for suspicion, gate: odd decoys": all_judges(
        lambda p, j: p[j, "decoys paid for suspicion, gate"]["odd decoys"] > 0.5
    ),
    "gate: errors that can be found": all_judges(lambda p, j: knowable(p[j, GATE]) > 0.5),
    "gate with a milder penalty: no fewer subtle errors than without (pair)": lambda p: (
        p["pair", MILDER]["subtle"] >= p["pair", GATE]["subtle"]
    ),
    "milder penalty without gate: no fewer unknowable errors (pair)": lambda p: (
        p["pair", "milder failed_attack"]["unknowable"] >= p["pair", EARLIER]["unknowable"] - 0.01
    ),
    "touch: no edits elsewhere": all_judges(
        lambda p, j: p[j, "edit must touch the error"]["elsewhere"] < 0.1
    ),
    "learnable, no gate: unknowable errors stay (perfect)": lambda p: (
        p["perfect", "neutral decoys, learnable reward"]["unknowable"] > 0.5
    ),
    "all four: errors that can be found": all_judges(lambda p, j: knowable(p[j, ALL]) > 0.5),
    "all four: an edited look does not decide": all_judges(
        lambda p, j: p[j, ALL]["edited, nothing seen"] < 0.5
    ),
    "all four: a smaller shortcut": all_judges(
        lambda p, j: abs(p[j, ALL]["shortcut"]) < p[j, EARLIER]["shortcut"]
    ),
    "all four: a better F1 on untouched notes": all_judges(
        lambda p, j: p[j, ALL]["F1"] > p[j, EARLIER]["F1"]
    ),
    "all four, failing the gate costs: errors that can be found": all_judges(
        lambda p, j: knowable(p[j, PENALTY]) > 0.5
    ),
    "fewer decoys: no worse F1 than with all four": all_judges(
        lambda p, j: p[j, FEWER]["F1"] >= p[j, ALL]["F1"]
    ),
}


def other(assumed: Assumptions, rng: np.random.Generator) -> Assumptions:
    """Other guesses: chances move by 0.5 in log-odds and evidence by 20 % (standard deviations)."""

    def chance(p: float) -> float:
        return (
            float(1 / (1 + np.exp(-(np.log(p / (1 - p)) + rng.normal(0, 0.5))))) if 0 < p < 1 else p
        )

    def kind(old: Kind) -> dict[str, float]:
        return {
            **old.model_dump(),
            "evidence": old.evidence * float(np.exp(rng.normal(0, 0.2))),
            "pair": chance(old.pair),
            "blind": chance(old.blind),
        }

    kinds = {name: kind(value) for name, value in assumed if isinstance(value, Kind)}
    chances = ("edit_seen", "error_looks_edited", "clean_looks_edited", "names_sentence")
    others = {name: chance(getattr(assumed, name)) for name in chances}
    failed = {"failed_attack": float(rng.uniform(-1.9, -1.1))}
    human = {"human_evidence": assumed.human_evidence * float(np.exp(rng.normal(0, 0.2)))}
    return Assumptions.model_validate(
        {**assumed.model_dump(), **kinds, **others, **failed, **human}
    )


def robustness_table(assumed: Assumptions, draws: int) -> Table:
    """In how many draws of the guesses each statement holds."""
    rng = np.random.default_rng(assumed.seed)
    holds = dict.fromkeys(STATEMENTS, 0)
    for _ in range(draws):
        guess = other(assumed, rng)
        settings = [setting for judge in JUDGES for setting in settings_of(guess, judge)]
        outcomes = settled(settings, [guess] * len(settings))
        played = {
            (setting.judge, setting.name): row
            for setting, row in zip(settings, outcomes, strict=True)
        }
        for name, statement in STATEMENTS.items():
            holds[name] += statement(played)
    return [{"statement": name, f"holds in, of {draws}": count} for name, count in holds.items()]


def main(draws: Annotated[int, typer.Option(min=1, help="Draws of the guesses.")] = 50) -> None:
    """Count in how many draws of the guesses the directions hold."""
    table = robustness_table(Assumptions(steps=500, rate=0.6), draws)
    (FIGURES / "robustness.csv").write_text(as_csv(table), encoding="utf-8")
    print(as_markdown(table))


if __name__ == "__main__":
    typer.run(main)
