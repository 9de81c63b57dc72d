"""The committed counts of ``experiments.opponent.run``, and the tables of the README.

``python -m experiments.pages`` fills them in, ``experiments.opponent.picture`` draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import t as student

from experiments.learning.results import Table, markdown

FIGURES = Path(__file__).parent / "figures"
PAGE = Path(__file__).with_name("README.md")
ARMS = ("self_play", "static", "search", "optimism")
CONTRASTS = (("self_play", "static"), ("self_play", "search"), ("optimism", "self_play"))
LEARNABLE = (
    "management",
    "treatment",
)  # unseen kinds that this player can learn; it never learns doses
RELEVANT = 10.0  # points of the primary measure; a gain below it would not be worth an opponent
LEVEL = 0.05
STARTS, LAST = 16, 60


def recall(folder: Path = FIGURES, unseen: float = 0.03) -> pd.DataFrame:
    """Errors of the learnable unseen kinds found, in %: a row for each start and step, a column for
    each arm.
    """
    rates = pd.read_csv(folder / "study_rates.csv")
    wanted = rates["measure"].isin([f"assessor/error/{kind}" for kind in LEARNABLE])
    rates = rates[wanted & np.isclose(rates["unseen"], unseen)]
    counts = rates.groupby(["start", "step", "arm"])[["hits", "items"]].sum()
    return (100 * counts["hits"] / counts["items"]).unstack("arm")


def time_average(folder: Path = FIGURES, unseen: float = 0.03, last: int = LAST) -> pd.DataFrame:
    """The primary measure: the mean of :func:`recall` over the steps to ``last``, by start, of runs
    that have come that far.
    """
    found = recall(folder, unseen)
    steps = found[found.index.get_level_values("step") <= last]
    complete = found.xs(last, level="step").notna()
    return steps.groupby("start").mean().where(complete)


def interval(differences: Sequence[float], level: float, limit: float = 100.0) -> tuple[float, ...]:
    """Mean and Student's interval of paired differences, cut at their range, and p."""
    values = np.asarray(differences, dtype=float)
    mean, error = values.mean(), values.std(ddof=1) / len(values) ** 0.5
    half = student.ppf(1 - level / 2, len(values) - 1) * error
    p = 2 * student.sf(abs(mean) / error, len(values) - 1) if error > 0 else float(mean == 0)
    return float(mean), max(-limit, float(mean - half)), min(limit, float(mean + half)), float(p)


def contrasts(folder: Path = FIGURES, unseen: float = 0.03, last: int = LAST) -> Table:
    """The planned contrasts of the primary measure, paired by start, by Holm's procedure.

    The smallest p is held against a third of the level, the next against half, and the last
    against the whole; after the first that does not pass, the others keep its level. Intervals have
    the level of their test.
    """
    averages = time_average(folder, unseen, last)
    paired = {}
    for first, second in CONTRASTS:
        if {first, second} <= set(averages.columns):
            each = (averages[first] - averages[second]).dropna()
            if len(each) > 1:
                paired[first, second] = each
    by_p = sorted(paired, key=lambda names: interval(paired[names], LEVEL)[3])
    levels, level = {}, LEVEL / len(CONTRASTS)
    for passed, names in enumerate(by_p):
        levels[names] = level
        if interval(paired[names], LEVEL)[3] <= level:
            level = LEVEL / max(1, len(CONTRASTS) - passed - 1)
    table = [["difference", "starts", "points", "interval", "level", "p", "answer"]]
    for names, each in paired.items():
        mean, low, high, p = interval(each, levels[names])
        answer = verdict(low, high) if len(each) == STARTS else "not all runs are there"
        cells = [f"{mean:+.1f}", f"{low:+.1f} to {high:+.1f}", f"{100 * (1 - levels[names]):.1f} %"]
        table.append(
            [f"`{names[0]}` less `{names[1]}`", str(len(each)), *cells, f"{p:.3f}", answer]
        )
    return table


def verdict(low: float, high: float) -> str:
    """The plan's answer to an interval."""
    return "yes" if low > 0 else "no" if high < RELEVANT else "open"


def arms_table(folder: Path = FIGURES, unseen: float = 0.03, last: int = LAST) -> Table:
    """Primary and secondary measures of each arm, means over its starts."""
    rates = pd.read_csv(folder / "study_rates.csv")
    steps = pd.read_csv(folder / "study_steps.csv")
    averages, found = time_average(folder, unseen, last), recall(folder, unseen)
    table = [
        [
            "arm",
            "starts",
            "time average",
            f"at step {last}",
            "step of 50 %",
            "starts at 90 %",
            "false alarms",
            "unseen shown",
            "attacker turns",
            "extra attacks",
        ]
    ]
    for arm in (arm for arm in ARMS if arm in averages.columns):
        own = averages[arm].dropna()
        at_last = found[arm].xs(last, level="step")[own.index]
        halfway = [first_step(found[arm][start], 50.0, last) for start in own.index]
        of_arm = rates[np.isclose(rates["unseen"], unseen) & (rates["arm"] == arm)]
        clean = of_arm[(of_arm["measure"] == "assessor/clean") & (of_arm["step"] == last)]
        run = steps[np.isclose(steps["unseen"], unseen) & (steps["arm"] == arm)]
        run = run[run["step"] <= last]
        shown = run.groupby("start")[["unseen_shown", "attacker_turns", "extra_attacks"]]
        of_start = shown.sum().mean()
        table.append(
            [
                f"`{arm}`",
                str(len(own)),
                f"{own.mean():.1f}",
                f"{at_last.mean():.1f}",
                f"{np.median(halfway):g}" if np.median(halfway) <= last else f"over {last}",
                str(int((at_last >= 90).sum())),
                f"{100 - 100 * clean['hits'].sum() / clean['items'].sum():.1f}",
                f"{of_start['unseen_shown']:.0f}",
                f"{of_start['attacker_turns']:.0f}",
                f"{of_start['extra_attacks']:.0f}",
            ]
        )
    return table


def first_step(found: pd.Series, share: float, last: int) -> float:
    """The first measured step with so many found, in %; infinity where none has."""
    reached = found[(found >= share) & (found.index <= last)]
    return float(reached.index[0]) if len(reached) else float("inf")


def by_shown(folder: Path = FIGURES, unseen: float = 0.03) -> pd.DataFrame:
    """Recall at each measured step with the attacks of unseen kinds shown before it.

    Columns: start, step, arm, recall (%), shown.
    """
    found = recall(folder, unseen).stack().rename("recall").reset_index()
    steps = pd.read_csv(folder / "study_steps.csv")
    steps = steps[np.isclose(steps["unseen"], unseen)].sort_values("step")
    steps["shown"] = steps.groupby(["start", "arm"])["unseen_shown"].cumsum()
    joined = found.merge(steps[["start", "arm", "step", "shown"]], how="left")
    joined.loc[joined["step"] == 0, "shown"] = 0
    return joined


def dead_table(folder: Path = FIGURES) -> Table:
    """Of the runs from the novice itself: doses, which it never learns, of the valid attacks, and
    found attacks of unseen kinds, in %. Means over seeds, with the least and the most.
    """
    steps = pd.read_csv(folder / "study_steps.csv")
    steps = steps[steps["unseen"] == 0]
    table = [["arm", "seeds", "doses, steps 61 to 70", "doses, 91 to 100", "found, 91 to 100"]]
    for arm, of_arm in steps.groupby("arm"):
        cells = []
        for first, part, whole in (
            (61, "doses_shown", "valid_attacks"),
            (91, "doses_shown", "valid_attacks"),
            (91, "unseen_found", "unseen_shown"),
        ):
            window = of_arm[of_arm["step"].between(first, first + 9)]
            counts = window.groupby("start")[[part, whole]].sum()
            share = 100 * counts[part] / counts[whole]
            cells.append(f"{share.mean():.0f} ({share.min():.0f} to {share.max():.0f})")
        table.append([f"`{arm}`", str(of_arm["start"].nunique()), *cells])
    return table


EARLIER = ("self_play", "static", "labels")


def earlier_table(folder: Path = FIGURES) -> Table:
    """Of the first study: errors of all unseen kinds found from each start, in %, mean over seeds.

    The last rows have the difference over starts with Student's 95 % interval, and that of the time
    average of the measured steps.
    """
    rates = pd.read_csv(folder / "rates.csv")
    kinds = [f"assessor/error/{kind}" for kind in (*LEARNABLE, "dose")]
    rates = rates[rates["measure"].isin(kinds) & np.isclose(rates["unseen"], 0.03)]
    counts = rates.groupby(["start", "arm", "seed", "step"])[["hits", "items"]].sum()
    found = (100 * counts["hits"] / counts["items"]).groupby(["start", "arm", "step"]).mean()
    columns = [(arm, step) for step in (40, 80) for arm in EARLIER]
    table = [["start", *(f"`{arm}`, step {step}" for arm, step in columns)]]
    starts = sorted({start for start, arm, _ in found.index if arm == "static"})
    for start in starts:
        cells = (found.get((start, arm, step)) for arm, step in columns)
        table.append([str(start), *("" if value is None else f"{value:.1f}" for value in cells)])
    for step in (40, 80):
        pairs = [
            (found.get((s, "self_play", step)), found.get((s, "static", step))) for s in starts
        ]
        each = [one - other for one, other in pairs if one is not None and other is not None]
        mean, low, high, _ = interval(each, LEVEL)
        said = f"{mean:+.1f} ({low:+.1f} to {high:+.1f}; {len(each)} starts)"
        placed = [said if (arm, at) == ("self_play", step) else "" for arm, at in columns]
        table.append([f"`self_play` less `static`, step {step}", *placed])
    return table


def tables(folder: Path = FIGURES) -> dict[str, str]:
    """Every table of the README by name."""
    made = {"earlier": markdown(earlier_table(folder))}
    if (folder / "study_rates.csv").exists():
        if len(recall(folder, 0.0)):
            made["dead"] = markdown(dead_table(folder))
        for unseen, last in ((0.03, LAST), (0.01, 80)):
            known = recall(folder, unseen)
            if len(known) and last in known.index.get_level_values("step"):
                made[f"contrasts_{100 * unseen:g}"] = markdown(contrasts(folder, unseen, last))
                made[f"arms_{100 * unseen:g}"] = markdown(arms_table(folder, unseen, last))
    return made
