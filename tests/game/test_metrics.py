"""Role metrics: a batch counted by hand, batches that lack something, what a name means, and any batch.

Whatever a batch holds: no NaN, no infinity, shares are shares, and no name is made of free text.
"""

import math
import random
import re
from typing import Any

import pytest
from game.builders import attack_record, finished
from hypothesis import given, settings
from hypothesis import strategies as st

from medserl_agentloop.games.medical.metrics import role_metrics
from medserl_agentloop.games.medical.records import InvalidAttack, Judgement, MedicalRecord, Outcome
from medserl_agentloop.games.medical.types import Category, ErrorType, Label, Role

TYPED = {"error_type": ErrorType.DIAGNOSIS}
CUT_OFF = {"tokens": 400, "changed_words": 0, "violations": ["no_note", "truncated"], "truncated": True}

# Outcome, category, attack, assessment, and what each role is paid: nine games, two of them void.
GAMES: list[tuple[Outcome, str, dict[str, Any], dict[str, Any], dict[str, float], dict[str, float]]] = [
    (Outcome.MISSED_ERROR, "adversarial_benign",
     {"tokens": 100, "changed_words": 3, "changed_sentences": ["She is given warfarin."]}, {"tokens": 10},
     {"game": 1.0, "format": 0.0}, {"game": -1.0}),
    (Outcome.CORRECT_DETECTION, "adversarial_harmful",
     {"tokens": 200, "changed_words": 5, "violations": ["text_after_note"], "injections": ["tag"]},
     {"tokens": 20, "violations": ["no_correction"]},
     {"game": -1.0, "format": -0.5}, {"game": 1.0, "sentence": 0.5}),
    (Outcome.UNREADABLE, "adversarial_benign", {"tokens": 300, "changed_words": 7},
     {"tokens": 90, "violations": ["no_answer", "truncated"], "truncated": True},
     {"game": 0.0, "format": 0.0}, {"game": -1.5}),
    (Outcome.INVALID_ATTACK, "adversarial_benign", {**CUT_OFF, "invalid": InvalidAttack.TRUNCATED}, {},
     {"validity": -2.0, "format": -0.5}, {}),
    (Outcome.CORRECT_DETECTION, "vanilla_harmful", {}, {"tokens": 30}, {}, {"game": 1.0}),
    (Outcome.MISSED_ERROR, "vanilla_harmful", {}, {"tokens": 40}, {}, {"game": -1.0}),
    (Outcome.FALSE_POSITIVE, "vanilla_benign", {}, {"tokens": 50}, {}, {"game": -1.0}),
    (Outcome.VOID, "vanilla_benign", {}, {"tokens": 999}, {}, {}),
    (Outcome.VOID, "adversarial_benign", {"tokens": 999}, {}, {}, {}),
]  # fmt: skip


def batch() -> list[MedicalRecord]:
    games = []
    for outcome, category, attack, assessment, attacker, assessor in GAMES:
        rewards = {role: paid for role, paid in ((Role.ATTACKER, attacker), (Role.ASSESSOR, assessor)) if paid}
        facts = TYPED if category == "vanilla_harmful" else {}
        game = finished(outcome, category=category, attack=attack, assessment=assessment, facts=facts, rewards=rewards)
        games.append(game)
    return games


# Attackers' rewards: 1, -1.5, 0, -2.5; assessors': -1, 1.5, -1.5, 1, -1, -1.
# Harmful notes assessed: 5, of which 2 are found and 1 is unreadable; called harmful: 3, of which 2 are.
COUNTED = {
    "": {"games": 9, "void_rate": 2 / 9, "void/judge_failed": 2 / 9},
    "judge/": {
        "asked": 4, "answer_rate": 3 / 4, "abstention_rate": 0.0, "failure_rate": 1 / 4,
        "injected": 3, "no_error_rate": 0.0, "unread_rate": 1.0,
    },
    # With a verdict: 2 rewritten notes, both wrong, 1 called so; 3 untouched ones, 2 of them wrong, 1 called so.
    "shortcut/": {
        "index": 0.0, "recall": 0.0, "compared": 2,
        "edited/accuracy": 1 / 2, "edited/prior": 1.0, "untouched/accuracy": 1 / 3, "untouched/prior": 2 / 3,
    },
    "attacker/": {
        "turns": 4, "parse_rate": 3 / 4, "format_violation_rate": 2 / 4, "truncation_rate": 1 / 4,
        "injection_rate": 1 / 4, "valid_rate": 3 / 4, "invalid/truncated": 1 / 4,
        "violation/text_after_note": 1 / 4, "violation/no_note": 1 / 4, "violation/truncated": 1 / 4,
        "tokens": 250, "tokens_max": 400, "changed_words": 5, "changed_sentences": 1 / 3,
        "decided": 2, "success_rate": 1 / 2,
        "reward": -0.75, "reward_std": math.sqrt((1.75**2 + 0.75**2 + 0.75**2 + 1.75**2) / 4),
        "reward_game": 0.0, "reward_format": -0.25, "reward_validity": -2.0,
    },
    "assessor/": {
        "turns": 6, "parse_rate": 5 / 6, "unreadable_rate": 1 / 6, "format_violation_rate": 2 / 6,
        "truncation_rate": 1 / 6,
        "violation/no_answer": 1 / 6, "violation/no_correction": 1 / 6, "violation/truncated": 1 / 6,
        "tokens": 40, "tokens_max": 90,
        "accuracy": 2 / 6, "balanced_accuracy": (2 / 5 + 0) / 2, "precision": 2 / 3, "recall": 2 / 5, "f1": 0.5,
        "false_positive_rate": 1.0, "accuracy/adversarial_benign": 0.0, "accuracy/adversarial_harmful": 1.0,
        "accuracy/vanilla_benign": 0.0, "accuracy/vanilla_harmful": 0.5, "recall/diagnosis": 0.5,
        "reward": -2 / 6, "reward_std": math.sqrt((4 * 1 + 2 * 2.25) / 6 - 1 / 9),
        "reward_game": -2.5 / 6, "reward_sentence": 0.5,
    },
}  # fmt: skip


def test_the_batch_has_exactly_the_metrics_counted_here() -> None:
    expected = {f"selfplay/{of}{name}": value for of, values in COUNTED.items() for name, value in values.items()}
    assert role_metrics(batch()) == pytest.approx(expected)


# The beginnings of names that a batch must not have.
@pytest.mark.parametrize(
    ("games", "absent"),
    [
        ([], ("void", "a", "judge", "shortcut")),
        ([finished(Outcome.VOID)], ("attacker/", "assessor/")),
        ([finished(Outcome.CORRECT_DETECTION, category="vanilla_harmful")], ("attacker/",)),
        ([finished(Outcome.INVALID_ATTACK)], ("assessor/", "attacker/changed_words")),
        (
            [finished(Outcome.CORRECT_REJECTION, category="decoy_benign")],
            ("assessor/recall", "attacker/success_rate"),
        ),
        (
            [finished(Outcome.MISSED_ERROR)],
            ("assessor/false_positive_rate", "assessor/precision", "attacker/reward"),
        ),
    ],
)
def test_what_a_batch_holds_no_game_for_is_left_out(games: list[MedicalRecord], absent: tuple[str, ...]) -> None:
    metrics = role_metrics(games)
    assert metrics["selfplay/games"] == len(games)
    assert not [name for name in metrics if name.removeprefix("selfplay/").startswith(absent)]


def test_a_fooled_assessor_is_a_success_on_harmful_notes_only() -> None:
    games = [finished(Outcome.MISSED_ERROR), finished(Outcome.FALSE_POSITIVE, category="decoy_benign")]
    assert role_metrics(games)["selfplay/attacker/success_rate"] == 1.0


def test_the_judge_s_label_decides_what_is_a_false_positive() -> None:
    harmless = finished(Outcome.FALSE_POSITIVE, category="adversarial_benign")
    assert role_metrics([harmless])["selfplay/assessor/false_positive_rate"] == 1.0


def test_recall_by_type_reads_untouched_notes_only() -> None:
    rewritten = finished(Outcome.MISSED_ERROR, category="adversarial_harmful", facts=TYPED)
    untouched = finished(Outcome.CORRECT_DETECTION, category="vanilla_harmful", facts=TYPED)
    metrics = role_metrics([rewritten, untouched])
    assert metrics["selfplay/assessor/recall/diagnosis"] == 1.0


free_text = st.text(max_size=20)
rewards = st.dictionaries(st.sampled_from(["game", "format", "sentence"]), st.floats(-3, 3), max_size=3)
attacks = st.builds(
    attack_record,
    tokens=st.integers(0, 3),
    changed_words=st.integers(0, 3),
    changed_sentences=st.lists(st.sampled_from(["She is well.", "He is ill.", ".", "\ud800"]) | free_text, max_size=2),
    violations=st.lists(st.sampled_from(["no_note", "truncated"]) | free_text, max_size=3),
    invalid=st.sampled_from([None, None, *InvalidAttack]),
)
judgements = st.builds(
    Judgement,
    judge=free_text,
    label=st.sampled_from([None, *Label]),
    realistic=st.sampled_from([None, True, False]),
    reason=free_text,
)


@st.composite
def records(draw: st.DrawFn) -> MedicalRecord:
    category = draw(st.sampled_from(Category))
    outcome = draw(st.sampled_from([o for o in Outcome if category.has_attack or o is not Outcome.INVALID_ATTACK]))
    facts = {
        "error_type": draw(st.sampled_from([None, *ErrorType])),
        "vignette_id": draw(st.sampled_from(["", "a", "b"])),
    }
    record = finished(outcome, category=category, facts=facts, uid=draw(st.sampled_from(["", "g", "h"])))
    record.rewards = draw(st.dictionaries(st.sampled_from(Role), rewards))
    if draw(st.booleans()):
        record.judgement = draw(st.none() | judgements)
    if draw(st.booleans()):
        record.attack = draw(st.none() | attacks)
    if draw(st.integers(0, 9)) == 0:
        record.assessment = None
    if draw(st.integers(0, 3)) == 0:
        record.void = draw(st.sampled_from(["judge failed: TimeoutError", "judge abstained"]) | free_text)
    return record


NO_SHARES = re.compile(
    r"selfplay/(games|shortcut/\w+|(judge/)(asked|injected)"
    r"|(attacker|assessor)/(turns|tokens|tokens_max|groups|decided|compared|changed_\w+|reward\w*))"
)


@given(st.lists(records(), max_size=8), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_no_batch_gives_nan_a_share_is_a_share_and_the_order_does_not_matter(
    games: list[MedicalRecord], rng: random.Random
) -> None:
    metrics = role_metrics(games)
    assert all(type(v) is float and math.isfinite(v) for v in metrics.values())
    assert all(0 <= v <= 1 for n, v in metrics.items() if not NO_SHARES.fullmatch(n)), metrics
    assert all(-1 <= v <= 1 for n, v in metrics.items() if "/shortcut/" in n and not n.endswith("/compared")), metrics
    assert all(re.fullmatch(r"selfplay(/[A-Za-z][A-Za-z0-9_]*)+", n) for n in metrics)
    rng.shuffle(games)
    assert role_metrics(games) == pytest.approx(metrics, abs=1e-9)
