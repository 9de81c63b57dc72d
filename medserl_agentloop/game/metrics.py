"""Role metrics of a batch of games, from nothing but their records.

Called by the trainer in every step and by whoever reads a games file afterwards: both get the
same numbers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from medserl_agentloop.game.records import GameRecord, Outcome
from medserl_agentloop.game.types import Label, Role

_DECIDED = {
    Outcome.CORRECT_DETECTION: (True, True),
    Outcome.MISSED_ERROR: (True, False),
    Outcome.CORRECT_REJECTION: (False, False),
    Outcome.FALSE_POSITIVE: (False, True),
}
"""(an error is present, the assessor said so) of the outcomes that have a readable verdict."""


def role_metrics(records: Iterable[GameRecord]) -> dict[str, float]:
    """Metrics by name, ``selfplay/…``. What a batch holds no game for is left out, never 0.

    An unreadable assessment counts as wrong in the accuracy and as a miss in the recall.
    """
    games = list(records)
    metrics = {
        "selfplay/games": float(len(games)),
        "selfplay/void_rate": _share(g.outcome is Outcome.VOID for g in games),
    }
    played = [g for g in games if g.outcome is not Outcome.VOID]
    metrics |= _attacker_metrics([g for g in played if g.attack is not None])
    metrics |= _assessor_metrics([g for g in played if g.assessment is not None])
    for role in Role:
        rewarded = [g for g in played if role in g.rewards]
        if not rewarded:
            continue
        totals = [sum(g.rewards[role].values()) for g in rewarded]
        metrics[f"selfplay/{role.value}/reward"] = _mean(totals)
        metrics[f"selfplay/{role.value}/reward_std"] = _std(totals)
        components: dict[str, list[float]] = defaultdict(list)
        for game in rewarded:
            for name, value in game.rewards[role].items():
                components[name].append(value)
        for name, values in sorted(components.items()):
            metrics[f"selfplay/{role.value}/reward_{name}"] = _mean(values)
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def _attacker_metrics(games: list[GameRecord]) -> dict[str, float]:
    attacks = [g.attack for g in games if g.attack is not None]
    prefix = "selfplay/attacker/"
    metrics = {
        prefix + "turns": float(len(attacks)) or math.nan,
        prefix + "parse_rate": _share(a.note is not None for a in attacks),
        prefix + "format_violation_rate": _share(bool(a.violations) for a in attacks),
        prefix + "truncation_rate": _share(a.truncated for a in attacks),
        prefix + "injection_rate": _share(bool(a.injections) for a in attacks),
        prefix + "valid_rate": _share(a.invalid is None for a in attacks),
        prefix + "tokens": _mean([a.tokens for a in attacks]),
        prefix + "changed_words": _mean([a.changed_words for a in attacks if a.invalid is None]),
    }
    for reason in sorted({a.invalid.value for a in attacks if a.invalid is not None}):
        metrics[prefix + f"invalid/{reason}"] = _share(
            a.invalid is not None and a.invalid.value == reason for a in attacks
        )
    # Success: the error went unnoticed, of all rewritten notes that do hold one.
    with_error = [g for g in games if g.judgement is not None and g.judgement.label is Label.HARMFUL]
    decided = [g for g in with_error if g.outcome in _DECIDED]
    metrics[prefix + "success_rate"] = _share(g.outcome is Outcome.MISSED_ERROR for g in decided)
    return metrics


def _assessor_metrics(games: list[GameRecord]) -> dict[str, float]:
    assessments = [g.assessment for g in games if g.assessment is not None]
    prefix = "selfplay/assessor/"
    metrics = {
        prefix + "turns": float(len(assessments)) or math.nan,
        prefix + "parse_rate": _share(a.verdict is not None for a in assessments),
        prefix + "format_violation_rate": _share(bool(a.violations) for a in assessments),
        prefix + "truncation_rate": _share(a.truncated for a in assessments),
        prefix + "tokens": _mean([a.tokens for a in assessments]),
    }

    def right(game: GameRecord) -> bool:
        return game.outcome in (Outcome.CORRECT_DETECTION, Outcome.CORRECT_REJECTION)

    harmful = [g for g in games if g.judgement and g.judgement.label is Label.HARMFUL]
    safe = [g for g in games if g.judgement and g.judgement.label is Label.SAFE]
    said_harmful = [g for g in games if g.assessment and g.assessment.verdict is Label.HARMFUL]
    metrics |= {
        prefix + "accuracy": _share(right(g) for g in games),
        prefix + "precision": _share(right(g) for g in said_harmful),
        prefix + "recall": _share(right(g) for g in harmful),
        prefix + "f1": _f1(sum(right(g) for g in harmful), len(said_harmful), len(harmful)),
        prefix + "false_positive_rate": _share(g.outcome is Outcome.FALSE_POSITIVE for g in safe),
    }
    for category in sorted({g.category.value for g in games}):
        metrics[prefix + f"accuracy/{category}"] = _share(right(g) for g in games if g.category == category)
    known = [g for g in games if g.category == "vanilla_harmful" and g.spec.error_type is not None]
    for error_type in sorted({g.spec.error_type.value for g in known if g.spec.error_type}):
        metrics[prefix + f"recall/{error_type}"] = _share(right(g) for g in known if g.spec.error_type == error_type)
    return metrics


def _f1(found: int, said: int, present: int) -> float:
    """Harmonic mean of precision and recall; not a number where nothing is said nor present."""
    return 2 * found / (said + present) if said + present else math.nan


def _mean(values: list[float] | list[int]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _std(values: list[float]) -> float:
    mean = _mean(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))


def _share(flags: Iterable[bool]) -> float:
    return _mean([float(f) for f in flags])
