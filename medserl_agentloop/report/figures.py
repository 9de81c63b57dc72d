"""The main curves of a run as SVG and PNG, for papers and slides. ``medserl report --figures``; needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from medserl_agentloop.games.medical.metrics import role_metrics
from medserl_agentloop.games.medical.records import Games, Outcome
from medserl_agentloop.report.frames import all_games

BLUE, ORANGE, GREEN, GREY = "#2f6fb0", "#d9722e", "#3a9150", "#8a8a8a"
STYLE: Any = {  # matplotlib's names of settings are literal types
    "svg.hashsalt": "medserl",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}
"""matplotlib's settings for every picture of the project."""

_CURVES = (
    ("Reward", (("attacker", "selfplay/attacker/reward", ORANGE), ("assessor", "selfplay/assessor/reward", BLUE))),
    ("Assessor: accuracy", (("accuracy", "selfplay/assessor/accuracy", BLUE),)),
    ("Attacker: valid attacks", (("valid", "selfplay/attacker/valid_rate", ORANGE),)),
)
_COLOURS = {
    Outcome.VOID: "#d0d0d0",
    Outcome.INVALID_ATTACK: GREY,
    Outcome.UNREADABLE: GREEN,
    Outcome.CORRECT_DETECTION: BLUE,
    Outcome.MISSED_ERROR: ORANGE,
    Outcome.CORRECT_REJECTION: "#8fb4d6",
    Outcome.FALSE_POSITIVE: "#f0c09a",
}


def write_figures(games: Games, folder: Path, name: str) -> list[Path]:
    """Draw rewards, accuracy, valid attacks and outcome shares by step, all from the games; return the two files."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--figures needs matplotlib: pip install matplotlib") from None
    played = all_games(games)
    by_step = played.groupby("step").groups.items()
    numbers = pd.DataFrame({step: role_metrics(games[place] for place in places) for step, places in by_step}).T
    shares_of = pd.crosstab(played["step"], played["outcome"], normalize="index")
    shares_of = shares_of.reindex(columns=[outcome.value for outcome in _COLOURS], fill_value=0)
    folder.mkdir(parents=True, exist_ok=True)
    with rc_context(STYLE):
        figure = Figure(figsize=(8.4, 5.4), layout="constrained")
        *curves, shares = figure.subplots(2, 2, sharex=True).flat
        for axes, (title, lines) in zip(curves, _CURVES, strict=True):
            axes.set_title(title)
            for label, metric, colour in lines:
                if metric in numbers:
                    known = numbers[metric].dropna()
                    axes.plot(known.index, known, ".-", color=colour, label=label)
            if len(lines) > 1:
                axes.legend()
            else:
                axes.set_ylim(0, 1.03)
        labels = [outcome.value.replace("_", " ") for outcome in _COLOURS]
        shares.stackplot(shares_of.index, shares_of.to_numpy().T, labels=labels, colors=list(_COLOURS.values()))
        shares.set_title("Outcomes")
        shares.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)
        for axes in (curves[-1], shares):
            axes.set_xlabel("step")
        files = [folder / f"{name}.{kind}" for kind in ("svg", "png")]
        figure.savefig(files[0], metadata={"Date": None})
        figure.savefig(files[1], dpi=200)
    return files
