"""The games of a tournament -> who finds whose errors, ratings, and what an assessor has forgotten.

An attack is valid if it keeps the rules and the judge says that the note became what the row asks for. An error is
found if the verdict on it is "harmful"; an unreadable verdict has not found it. Void games count nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from rich.table import Column, Table

from medserl_agentloop.command_line import plain
from medserl_agentloop.core.metrics import wilson_interval
from medserl_agentloop.games.medical.records import MedicalRecord, Outcome
from medserl_agentloop.games.medical.types import Label, Role

_BY = ["attacker", "assessor"]
SIGNIFICANT = 0.05
ELO = 400 / math.log(10)
"""Rating points of a factor e in the odds: 400 points are a factor of ten, as in chess."""


def shares(games: Sequence[MedicalRecord]) -> pd.DataFrame:
    """Counted shares, a row each, with Wilson's 95 % interval; ``attacker`` or ``assessor`` is empty for all of them.

    ``detection``: of the valid attacks that put an error in, found. ``success``: of all attacks that were to put an
    error in, valid and not found. ``valid``, ``valid decoys``: attacks that are, counted once, against the first
    assessor. ``false alarms, untouched``, ``false alarms, decoys``: correct notes called wrong, as they were or validly
    reworded. ``errors found, untouched``: the error of the data found in its own note.
    """
    facts = pd.DataFrame([_facts(game) for game in games if game.outcome is not Outcome.VOID])
    attacked = facts[facts.attacker != ""]
    errors, decoys, untouched = attacked[attacked.harmful], attacked[~attacked.harmful], facts[facts.attacker == ""]
    once = ["attacker", "game"]
    counted = [
        ("detection", errors[errors.valid], "detected", _BY),
        ("success", errors.assign(won=errors.valid & ~errors.detected), "won", _BY),
        ("valid", errors.drop_duplicates(once), "valid", ["attacker"]),
        ("valid decoys", decoys.drop_duplicates(once), "valid", ["attacker"]),
        ("false alarms, untouched", untouched[~untouched.harmful], "detected", ["assessor"]),
        ("false alarms, decoys", decoys[decoys.valid], "detected", ["assessor"]),
        ("errors found, untouched", untouched[untouched.harmful], "detected", ["assessor"]),
    ]
    results = pd.concat(
        of.groupby(by)[column].agg(hits="sum", games="size", share="mean").reset_index().assign(measure=measure)
        for measure, of, column, by in counted
    ).reset_index(drop=True)
    intervals = [wilson_interval(hits, games) for hits, games in zip(results["hits"], results["games"], strict=True)]
    results[["low", "high"]] = pd.DataFrame(intervals, columns=["low", "high"], dtype=float)
    columns = ["measure", *_BY, "hits", "games", "share", "low", "high"]
    return results.reindex(columns=columns).fillna({role: "" for role in _BY}).astype({"hits": int, "share": float})


def _facts(game: MedicalRecord) -> dict[str, Any]:
    judged = game.judgement
    meant = judged is not None and judged.label is game.spec.target_label and judged.realistic is not False
    return {
        "attacker": game.players.get(Role.ATTACKER.value, ""),
        "assessor": game.players.get(Role.ASSESSOR.value, ""),
        "game": game.uid,
        "harmful": game.spec.target_label is Label.HARMFUL,
        "valid": game.attack is not None and game.attack.invalid is None and meant,
        "detected": game.assessment is not None and game.assessment.verdict is Label.HARMFUL,
    }


def ratings(results: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Ratings by role and player, in Elo points around 0, the average player of the role.

    The model is Bradley and Terry's: log odds of an attack's success = common + attacker - assessor. Every pairing has
    half a game won and lost besides its own, so that who never lost has a rating too.
    """
    from sklearn.linear_model import LogisticRegression

    pairs = results[results.measure == "success"]
    attackers, assessors = (pd.get_dummies(pairs[role]) for role in _BY)
    who = np.hstack([attackers.to_numpy(float), -assessors.to_numpy(float)])
    model = LogisticRegression(max_iter=1000).fit(
        np.vstack([who, who]),
        [1] * len(pairs) + [0] * len(pairs),
        sample_weight=np.concatenate([pairs.hits, pairs.games - pairs.hits]) + 0.5,
    )
    points = [round(ELO * value, 1) for value in model.coef_[0].tolist()]
    return {
        "attacker": dict(zip(attackers.columns, points, strict=False)),
        "assessor": dict(zip(assessors.columns, points[len(attackers.columns) :], strict=True)),
    }


def newest(results: pd.DataFrame, line: Sequence[str]) -> dict[str, Any] | None:
    """The newest assessor among the players of a line, oldest first: its worst attacker, and what it has forgotten.

    An older attacker is forgotten if its success against the newest assessor is higher than against an earlier assessor
    of the line: Fisher's exact test, one-sided, p times the number of comparisons below :data:`SIGNIFICANT`. None if
    the line has fewer than two assessors.
    """
    from scipy.stats import fisher_exact

    success = results[results.measure == "success"].set_index(_BY)
    met = set(success.index)
    assessors = [name for name in line if name in success.index.get_level_values("assessor")]
    if len(assessors) < 2:
        return None
    last = assessors[-1]
    worst = success.xs(last, level="assessor").share.idxmax()
    older = line[: line.index(last)]
    tested = []
    for attacker, earlier in product(older, assessors[:-1]):
        if {(attacker, last), (attacker, earlier)} <= met:
            counts = success.loc[[(attacker, last), (attacker, earlier)], ["hits", "games"]].to_numpy().tolist()
            p = fisher_exact([[hits, games - hits] for hits, games in counts], alternative="greater").pvalue
            now, before = (hits / games for hits, games in counts)
            tested.append({"attacker": attacker, "earlier": earlier, "success": now, "before": before, "p": float(p)})
    forgotten = [test | {"p": p} for test in tested if (p := min(1.0, test["p"] * len(tested))) < SIGNIFICANT]
    return {"assessor": last, "worst attacker": worst, "comparisons": len(tested), "forgotten": forgotten}


def tables(results: pd.DataFrame, rated: dict[str, dict[str, float]], players: Sequence[str]) -> Iterator[Table]:
    """The matrices and a line for each player, shares in % with their intervals."""
    order = {name: number for number, name in enumerate(players)}
    shown = {
        (row.measure, row.attacker, row.assessor): f"{100 * row.share:.0f} [{100 * row.low:.0f}, {100 * row.high:.0f}]"
        for row in results.itertuples()
    }
    attackers, assessors = (sorted({key[n] for key in shown if key[n]}, key=order.__getitem__) for n in (1, 2))
    titles = {"detection": "valid errors found, %", "success": "attacks that are valid and not found, %"}
    for measure, title in titles.items():
        table = Table("attacker \\ assessor", *(Column(plain(name)) for name in assessors), title=title)
        for attacker in attackers:
            table.add_row(plain(attacker), *(shown.get((measure, attacker, assessor), "") for assessor in assessors))
        yield table
    for role, names, measures in (
        ("attacker", attackers, ("valid", "valid decoys")),
        ("assessor", assessors, ("errors found, untouched", "false alarms, untouched", "false alarms, decoys")),
    ):
        counted = [measure for measure in measures if measure in set(results.measure)]
        table = Table(role, "rating", *(f"{measure}, %" for measure in counted))
        for name in names:
            where = (name, "") if role == "attacker" else ("", name)
            points = f"{rated[role][name]:+.0f}" if name in rated[role] else ""
            table.add_row(plain(name), points, *(shown.get((measure, *where), "") for measure in counted))
        yield table
