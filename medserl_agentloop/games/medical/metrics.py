"""Metrics of games, from nothing but their records. docs/metrics.csv explains every name."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import combinations

from rapidfuzz import fuzz

from medserl_agentloop.core.metrics import (
    Rule,
    effective_number,
    finite,
    game_metrics,
    mean,
    share,
    shares_by_name,
    void_class,
)
from medserl_agentloop.games.medical.canonical import canonical_words
from medserl_agentloop.games.medical.case import Category, Label, Role
from medserl_agentloop.games.medical.records import (
    JUDGE_ABSTAINED,
    JUDGE_FAILED,
    LABELS_JUDGE,
    AssessmentRecord,
    AttackRecord,
    MedicalRecord,
    Outcome,
)
from medserl_agentloop.scoring.notes import CUT_OFF, TEXTS, UNREADABLE

_VOID_CLASSES = {JUDGE_FAILED: "judge_failed", JUDGE_ABSTAINED: "judge_abstained"}

UNREAD_RATE = "selfplay/judge/unread_rate"

MAX_COMPARED = 64  # attacks that are compared with one another: 2,016 pairs, whatever the batch

_PLAIN_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


def role_metrics(records: Iterable[MedicalRecord]) -> dict[str, float]:
    """Metrics by name, per attack and per assessment; an unreadable assessment counts as wrong."""
    games = list(records)
    repeated = [Role.ASSESSOR.value] if any(game.further_assessments for game in games) else []
    metrics = game_metrics(games, [role.value for role in Role], _VOID_CLASSES, repeated)
    played = [game for game in games if not game.is_void]
    assessed = [each for g in played for each in g.by_assessment if each.assessment is not None]
    for name, numbers in (
        ("judge", _judge_metrics(games)),
        ("attacker", _attacker_metrics([g for g in played if g.attack is not None])),
        ("assessor", _assessor_metrics(assessed)),
        ("shortcut", shortcut_metrics(assessed)),
    ):
        metrics |= {f"selfplay/{name}/{key}": value for key, value in numbers.items()}
    return finite(metrics)


def _count(games: Collection[object]) -> float:
    """The number of games behind a share; NaN if none."""
    return float(len(games)) or math.nan


def _judge_metrics(games: list[MedicalRecord]) -> dict[str, float]:
    """Metrics of the judge on rewritten notes; untouched notes use the data's label."""

    def failed(game: MedicalRecord) -> bool:
        return "judge_failed" in void_class(game, _VOID_CLASSES)

    rewritten = [g for g in games if g.category.has_attack and g.presented_note is not None]
    asked = [g for g in rewritten if g.judgement is not None or failed(g)]
    if not asked:
        return {}
    answers = [g for g in asked if g.label is not None and not failed(g)]
    judgements = [g.judgement for g in answers if g.judgement is not None]
    injected = [g for g in answers if g.spec.target_label is Label.HARMFUL]
    gated = [judgement for judgement in judgements if judgement.knowable is not None]
    readings = [r for judgement in gated for r in judgement.readings if r.failed is None]
    return {
        "asked": float(len(asked)),
        "answer_rate": len(answers) / len(asked),
        "abstention_rate": share(g.judgement is not None and g.label is None for g in asked),
        "failure_rate": share(map(failed, asked)),
        "injected": _count(injected),
        "no_error_rate": share(g.label is Label.SAFE for g in injected),
        "realistic_rate": share(j.realistic for j in judgements if j.realistic is not None),
        "unread_rate": share(map(_unread, answers)),
        "gated": _count(gated),
        "knowable_rate": share(bool(judgement.knowable) for judgement in gated),
        "reading_abstention_rate": share(r.found is None for r in readings),
    }


def _unread(game: MedicalRecord) -> bool:
    """Return whether no judge or source confirms the label of a rewritten note."""
    believed = game.judgement is not None and game.judgement.judge == LABELS_JUDGE
    known = game.presented_note in (game.spec.error_note, game.spec.clean_note)
    return believed and not known


def _turn_metrics(turns: Sequence[AttackRecord | AssessmentRecord]) -> dict[str, float]:
    # Parsers name their violations; a name made of anything else must not become a metric.
    kinds = [
        [kind if _PLAIN_NAME.fullmatch(kind) else "other" for kind in t.violations] for t in turns
    ]
    return {
        "turns": _count(turns),
        "parse_rate": share(turn.readable for turn in turns),
        "format_violation_rate": share(not turn.format_kept for turn in turns),
        "truncation_rate": share(turn.truncated for turn in turns),
        "tokens": mean([turn.tokens for turn in turns]),
        "tokens_max": float(max((turn.tokens for turn in turns), default=math.nan)),
        **shares_by_name("violation/", kinds),
    }


def _attacker_metrics(games: list[MedicalRecord]) -> dict[str, float]:
    """Success is an unnoticed error; of several assessments, the share that did not notice it."""
    attacks = [g.attack for g in games if g.attack is not None]
    valid = [attack for attack in attacks if attack.valid]
    harmful = [_outcomes(g) for g in games if g.label is Label.HARMFUL]
    readable = [[each for each in outcomes if each.is_right is not None] for outcomes in harmful]
    decided = [outcomes for outcomes in readable if outcomes]
    attempts = [g for g in games if g.category.has_attack and g.spec.target_label is Label.HARMFUL]
    kinds = Counter(
        g.judgement.error_type for g in attempts if g.judgement and g.judgement.error_type
    )
    return {
        **_turn_metrics(attacks),
        "valid_rate": share(attack.valid for attack in attacks),
        "injection_rate": share(bool(attack.injections) for attack in attacks),
        "changed_words": mean([attack.changed_words for attack in valid]),
        "changed_sentences": mean([len(attack.changed_sentences) for attack in valid]),
        "decided": _count(decided),
        "success_rate": mean([_missed(outcomes) for outcomes in decided]),
        "undetected_rate": mean([_missed(_outcomes(g)) for g in attempts]),
        **shares_by_name("invalid/", [[a.invalid.value] if a.invalid else [] for a in attacks]),
        "kinds_named": float(kinds.total()) or math.nan,
        "effective_kinds": effective_number(list(kinds.values())),
        **diversity_metrics(games),
    }


def _outcomes(game: MedicalRecord) -> list[Outcome]:
    return [each.outcome for each in game.by_assessment]


def _missed(outcomes: Sequence[Outcome]) -> float:
    return share(outcome is Outcome.MISSED_ERROR for outcome in outcomes)


def diversity_metrics(games: Iterable[MedicalRecord]) -> dict[str, float]:
    """Measure how similar the insertions of valid attacks on different cases are."""
    attacks = sorted(
        (
            game.spec.vignette_id or game.spec.seed_note,
            " ".join(canonical_words(" ".join(game.attack.changed_sentences))),
        )
        for game in games
        if game.attack is not None and game.attack.valid and game.attack.changed_sentences
    )
    # Spread evenly over the cases; the order in which games finish does not matter.
    count = min(len(attacks), MAX_COMPARED)
    sample = [attacks[i * len(attacks) // count] for i in range(count)]
    alike = [
        fuzz.ratio(a, b) / 100 for (case, a), (other, b) in combinations(sample, 2) if case != other
    ]
    if not alike:
        return {}
    cases = Counter(text for _, text in set(attacks))
    return {
        "compared": float(count),
        "self_similarity": math.fsum(alike) / len(alike),
        "duplicate_rate": share(cases[text] > 1 for _, text in attacks),
    }


def _assessor_metrics(games: list[MedicalRecord]) -> dict[str, float]:
    assessments = [g.assessment for g in games if g.assessment is not None]
    harmful = [g for g in games if g.label is Label.HARMFUL]
    safe = [g for g in games if g.label is Label.SAFE]
    said_harmful = list(filter(_says_harmful, games))
    precision, recall = _accuracy(said_harmful), _accuracy(harmful)
    found = sum(game.outcome is Outcome.CORRECT_DETECTION for game in harmful)
    called = len(said_harmful) + len(harmful)
    untouched = [g for g in harmful if g.category is Category.VANILLA_HARMFUL]
    return {
        **_turn_metrics(assessments),
        "unreadable_rate": share(not assessment.readable for assessment in assessments),
        "accuracy": _accuracy(games),
        "balanced_accuracy": (recall + _accuracy(safe)) / 2,
        "precision": precision,
        "recall": recall,
        "f1": 2 * found / called if called else math.nan,
        "false_positive_rate": share(g.outcome is Outcome.FALSE_POSITIVE for g in safe),
        **_accuracies("accuracy/", games, lambda game: game.kind),
        **_accuracies("recall/", untouched, lambda game: game.spec.error_type),
    }


def _accuracies(
    prefix: str, games: Sequence[MedicalRecord], group: Callable[[MedicalRecord], str | None]
) -> dict[str, float]:
    names = sorted({name for game in games if (name := group(game)) is not None})
    return {prefix + name: _accuracy([g for g in games if group(g) == name]) for name in names}


def _accuracy(games: Sequence[MedicalRecord]) -> float:
    return share(game.outcome.is_right is True for game in games)


def trained_role_won(record: MedicalRecord) -> bool | None:
    """Return whether the trained role won most assessments; None if undecided."""
    decides = record.outcome not in (Outcome.VOID, Outcome.INVALID_ATTACK)
    if record.opponent is None or record.attack is None or not decides:
        return None
    verdicts = [game.outcome.is_right for game in record.by_assessment]
    lead = verdicts.count(True) - verdicts.count(False)
    return lead > 0 if record.opponent.role == Role.ATTACKER else lead < 0


def shortcut_metrics(games: Sequence[MedicalRecord]) -> dict[str, float]:
    """Measure whether the verdict depends on the edit instead of medicine.

    ``false_positives`` and ``recall`` are an edit's effects on saying "harmful" under either label,
    ``index`` their mean: 0 if the cue is not used, 1 if nothing else is.
    """
    read = [game for game in games if game.outcome.is_right is not None]
    edited, untouched = (
        [g for g in read if g.category.has_attack is attacked] for attacked in (True, False)
    )
    effects = [
        share(_says_harmful(g) for g in edited if g.label is label)
        - share(_says_harmful(g) for g in untouched if g.label is label)
        for label in (Label.SAFE, Label.HARMFUL)
    ]
    return {
        "index": mean([effect for effect in effects if not math.isnan(effect)]),
        "false_positives": effects[0],
        "recall": effects[1],
        "edited/accuracy": _accuracy(edited),
        "untouched/accuracy": _accuracy(untouched),
        "compared": _count(min(edited, untouched, key=len)),
    }


def _says_harmful(game: MedicalRecord) -> bool:
    return game.assessment is not None and game.assessment.verdict is Label.HARMFUL


def validation_numbers(record: MedicalRecord) -> dict[str, float | str | None]:
    """One game's numbers for verl, with ``acc`` as its category's core metric, and ``TEXTS``."""
    attack, said, outcomes = record.attack, record.assessment, _outcomes(record)
    assessed = said is not None and not record.is_void
    # A safe note has nothing that could be undetected.
    attacked = assessed and attack is not None and record.spec.target_label is Label.HARMFUL
    numbers: dict[str, float | str | None] = {
        "acc": share(each.is_right is True for each in outcomes) if assessed else None,
        "attacker_reward": record.reward(Role.ATTACKER),
        "assessor_reward": record.reward(Role.ASSESSOR),
        "attack_valid": None if attack is None else float(attack.valid),
        "undetected": _missed(outcomes) if attacked else None,
        "void": float(record.is_void),
    }
    texts: dict[str, str | None] = dict.fromkeys(TEXTS)
    if said is not None and record.void is None:
        texts = {
            "verdict": said.verdict.value if said.verdict else UNREADABLE,
            "sentence": said.sentence,
            "correction": said.correction,
            "number": None if said.number is None else str(said.number),
            "cut": CUT_OFF if said.truncated else "",
        }
    return numbers | texts | {"text_id": record.spec.text_id}


_STALEMATE = "Train only the loser for a while (selfplay.train), or check the games for a shortcut."
_CUT = (
    "Its token budget cuts turns off: raise it (selfplay.budget; `medserl play` says what your "
    "notes need), or switch the model's own reasoning off."
)
_ABOVE, _BELOW = True, False
# Name, metric, where it fires, what counts the games behind the metric; and what to look at first.
_ALARMS = {
    # Beyond these two the loser rarely sees the reward it should learn from.
    ("attacker_wins", "attacker/success_rate", _ABOVE, 0.95, "decided"): _STALEMATE,
    ("assessor_wins", "attacker/success_rate", _BELOW, 0.05, "decided"): _STALEMATE,
    # A cut answer counts as a wrong one, so learning to be brief looks like medicine.
    ("attacker_cut", "attacker/truncation_rate", _ABOVE, 0.02, "turns"): _CUT,
    ("assessor_cut", "assessor/truncation_rate", _ABOVE, 0.02, "turns"): _CUT,
    # Below one half most attackers' games end unassessed.
    ("invalid_attacks", "attacker/valid_rate", _BELOW, 0.5, "turns"): (
        "See selfplay/attacker/invalid/<reason>: truncated needs a larger "
        "selfplay.budget.attacker_reasoning, too_many_words a larger selfplay.edits, unparsed a "
        "model that knows the format."
    ),
    ("no_error_present", "judge/no_error_rate", _ABOVE, 0.15, "injected"): (
        "The attacker makes harmless edits: read these games. A judge that can err may also miss "
        "errors: medserl judge calibrate."
    ),
    ("unknowable_errors", "judge/knowable_rate", _BELOW, 0.8, "gated"): (
        "Read the attacks that are invalid as not_knowable: the attacker swaps facts that the note "
        "does not decide, or the reader misses errors (medserl judge calibrate)."
    ),
    ("edit_detector", "shortcut/index", _ABOVE, 0.4, "compared"): (
        "The assessor follows the edit, not the error: balance rewritten and untouched notes "
        "(--mix with decoy_benign), and evaluate on untouched notes."
    ),
    ("unseen_errors", "shortcut/recall", _BELOW, -0.4, "compared"): (
        "Far fewer errors are found in rewritten notes than in untouched ones: read the undetected "
        "attacks. If their errors cannot be seen in the note, use selfplay.blind."
    ),
    ("fewer_kinds", "attacker/effective_kinds", _BELOW, 0.5, "kinds_named"): (
        "The attacker is down to a few kinds of errors: read the undetected attacks."
    ),
}
RULES = tuple(
    Rule(
        name,
        f"selfplay/{metric}",
        limit,
        advice,
        games=f"selfplay/{metric.partition('/')[0]}/{games}",
        above=above,
        of_first=name == "fewer_kinds",
    )
    for (name, metric, above, limit, games), advice in _ALARMS.items()
)
"""The alarms of the medical game."""
