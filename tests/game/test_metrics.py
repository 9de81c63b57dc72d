"""Role metrics: a batch counted by hand, batches that lack something, and what a name means."""

import math
from typing import Any

import pytest
from game.builders import finished

from medserl_agentloop.games.medical.metrics import role_metrics
from medserl_agentloop.games.medical.records import InvalidAttack, MedicalRecord, Outcome
from medserl_agentloop.games.medical.types import ErrorType, Role

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
