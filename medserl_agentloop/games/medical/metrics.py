"""Role metrics of a batch of games, from nothing but their records.

Called by the trainer in every step and by whoever reads a games file afterwards: both get the
same numbers. docs/metrics.md explains every name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from medserl_agentloop.core.metrics import finite, game_metrics, mean, share, shares_by_name, void_class
from medserl_agentloop.games.medical.diversity import diversity_metrics
from medserl_agentloop.games.medical.records import (
    BELIEVES_THE_ROW,
    AssessmentRecord,
    AttackRecord,
    GameRecord,
    Outcome,
)
from medserl_agentloop.games.medical.shortcuts import shortcut_metrics
from medserl_agentloop.games.medical.types import Label, Role

_VOID_CLASSES = {"judge failed": "judge_failed", "judge abstained": "judge_abstained"}

UNREAD_RATE = "selfplay/judge/unread_rate"

_PLAIN_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


def role_metrics(records: Iterable[GameRecord]) -> dict[str, float]:
    """Metrics by name, ``selfplay/…``. What a batch holds no game for is left out, never 0.

    An unreadable assessment counts as wrong in the accuracy and as a miss in the recall.
    """
    games = list(records)
    metrics = game_metrics(games, [role.value for role in Role], _VOID_CLASSES) | _judge_metrics(games)
    played = [g for g in games if g.outcome is not Outcome.VOID]
    metrics |= _attacker_metrics([g for g in played if g.attack is not None])
    metrics |= _assessor_metrics([g for g in played if g.assessment is not None])
    return finite(metrics | shortcut_metrics(played))


def _judge_metrics(games: list[GameRecord]) -> dict[str, float]:
    """What the judge said of rewritten notes; of untouched ones the data knows, whoever is asked."""
    prefix = "selfplay/judge/"
    answers: list[GameRecord] = []
    abstained = failed = 0
    for game in games:
        if game.attack is None or game.attack.invalid is not None:
            continue
        why_void = void_class(game, _VOID_CLASSES)
        if "judge_failed" in why_void:
            failed += 1
        elif "judge_abstained" in why_void or (game.judgement is not None and game.judgement.label is None):
            abstained += 1
        elif game.judgement is not None:
            answers.append(game)
    asked = len(answers) + abstained + failed
    if not asked:
        return {}
    injected = [g for g in answers if g.spec.target_label is Label.HARMFUL]
    realism = [g.judgement.realistic for g in answers if g.judgement and g.judgement.realistic is not None]
    return {
        prefix + "asked": float(asked),
        prefix + "answer_rate": len(answers) / asked,
        prefix + "abstention_rate": abstained / asked,
        prefix + "failure_rate": failed / asked,
        prefix + "injected": float(len(injected)) or math.nan,
        prefix + "no_error_rate": share(g.judgement is not None and g.judgement.label is Label.SAFE for g in injected),
        prefix + "realistic_rate": share(realism),
        UNREAD_RATE: share(_unread(g) for g in answers),
        **_vote_metrics(prefix, games),
    }


def _unread(game: GameRecord) -> bool:
    """Whether a rewritten note has a label that nobody read it for; the data knows its own two notes only."""
    believed = game.judgement is not None and game.judgement.judge == BELIEVES_THE_ROW
    return (
        believed
        and game.category.has_attack
        and game.presented_note not in (game.spec.error_note, game.spec.clean_note)
    )


def _vote_metrics(prefix: str, games: list[GameRecord]) -> dict[str, float]:
    """How far the votes of a judge agree that is asked several times, and what the order of the notes does to them."""
    ballots = [[v for v in g.judgement.votes if v.label is not None] for g in games if g.judgement is not None]
    edited_first = [v.label is Label.HARMFUL for votes in ballots for v in votes if v.edited_first]
    original_first = [v.label is Label.HARMFUL for votes in ballots for v in votes if not v.edited_first]
    return {
        prefix + "disagreement_rate": share(len({v.label for v in votes}) > 1 for votes in ballots if len(votes) > 1),
        prefix + "position_bias": share(edited_first) - share(original_first),
    }


def _turn_metrics(prefix: str, turns: Sequence[AttackRecord | AssessmentRecord]) -> dict[str, float]:
    metrics = {
        prefix + "turns": float(len(turns)) or math.nan,
        prefix + "format_violation_rate": share(bool(t.violations) for t in turns),
        prefix + "truncation_rate": share(t.truncated for t in turns),
        prefix + "tokens": mean([t.tokens for t in turns]),
        prefix + "tokens_max": float(max((t.tokens for t in turns), default=math.nan)),
    }
    # Parsers name their violations; a name made of anything else must not become a metric.
    kinds = [[kind if _PLAIN_NAME.fullmatch(kind) else "other" for kind in t.violations] for t in turns]
    return metrics | shares_by_name(prefix + "violation/", kinds)


def _attacker_metrics(games: list[GameRecord]) -> dict[str, float]:
    attacks = [g.attack for g in games if g.attack is not None]
    valid = [a for a in attacks if a.invalid is None]
    prefix = "selfplay/attacker/"
    # Success: the error went unnoticed, of all rewritten notes that do hold one.
    with_error = [g for g in games if g.judgement is not None and g.judgement.label is Label.HARMFUL]
    decided = [g for g in with_error if g.outcome.is_right is not None]
    metrics = _turn_metrics(prefix, attacks) | {
        prefix + "parse_rate": share(a.note is not None for a in attacks),
        prefix + "valid_rate": share(a.invalid is None for a in attacks),
        prefix + "injection_rate": share(bool(a.injections) for a in attacks),
        prefix + "changed_words": mean([a.changed_words for a in valid]),
        prefix + "changed_sentences": mean([len(a.changed_sentences) for a in valid]),
        prefix + "decided": float(len(decided)) or math.nan,
        prefix + "success_rate": share(g.outcome is Outcome.MISSED_ERROR for g in decided),
    }
    metrics |= shares_by_name(prefix + "invalid/", [[a.invalid.value] if a.invalid else [] for a in attacks])
    return metrics | diversity_metrics(games)


def _assessor_metrics(games: list[GameRecord]) -> dict[str, float]:
    assessments = [g.assessment for g in games if g.assessment is not None]
    prefix = "selfplay/assessor/"

    def right(game: GameRecord) -> bool:
        return bool(game.outcome.is_right)

    harmful = [g for g in games if g.judgement and g.judgement.label is Label.HARMFUL]
    safe = [g for g in games if g.judgement and g.judgement.label is Label.SAFE]
    said_harmful = [g for g in games if g.assessment and g.assessment.verdict is Label.HARMFUL]
    recall = share(right(g) for g in harmful)
    metrics = _turn_metrics(prefix, assessments) | {
        prefix + "parse_rate": share(a.verdict is not None for a in assessments),
        prefix + "unreadable_rate": share(a.verdict is None for a in assessments),
        prefix + "accuracy": share(right(g) for g in games),
        prefix + "balanced_accuracy": (recall + share(right(g) for g in safe)) / 2,
        prefix + "precision": share(right(g) for g in said_harmful),
        prefix + "recall": recall,
        prefix + "f1": _f1(sum(right(g) for g in harmful), len(said_harmful), len(harmful)),
        prefix + "false_positive_rate": share(g.outcome is Outcome.FALSE_POSITIVE for g in safe),
    }
    for category in sorted({g.category.value for g in games}):
        metrics[prefix + f"accuracy/{category}"] = share(right(g) for g in games if g.category == category)
    known = [g for g in games if g.category == "vanilla_harmful" and g.spec.error_type is not None]
    for error_type in sorted({g.spec.error_type.value for g in known if g.spec.error_type}):
        metrics[prefix + f"recall/{error_type}"] = share(right(g) for g in known if g.spec.error_type == error_type)
    return metrics


def _f1(found: int, said: int, present: int) -> float:
    """Harmonic mean of precision and recall; not a number where nothing is said nor present."""
    return 2 * found / (said + present) if said + present else math.nan
