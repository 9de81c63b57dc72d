"""Role metrics: a batch counted by hand, batches that lack something, and what a name means."""

import math

import pytest
from game.builders import finished

from medserl_agentloop.games.medical.metrics import role_metrics
from medserl_agentloop.games.medical.records import InvalidAttack, MedicalRecord, Outcome
from medserl_agentloop.games.medical.types import ErrorType, Role

TYPED = {"error_type": ErrorType.DIAGNOSIS}


def both(attacker: dict[str, float], assessor: dict[str, float]) -> dict[Role, dict[str, float]]:
    return {Role.ATTACKER: attacker, Role.ASSESSOR: assessor}


def batch() -> list[MedicalRecord]:
    """Nine games, two of them void."""
    return [
        finished(
            Outcome.MISSED_ERROR,
            category="adversarial_benign",
            attack={"tokens": 100, "changed_words": 3, "changed_sentences": ["She is given warfarin."]},
            assessment={"tokens": 10},
            rewards=both({"game": 1.0, "format": 0.0}, {"game": -1.0}),
        ),
        finished(
            Outcome.CORRECT_DETECTION,
            category="adversarial_harmful",
            attack={"tokens": 200, "changed_words": 5, "violations": ["text_after_note"], "injections": ["tag"]},
            assessment={"tokens": 20, "violations": ["no_correction"]},
            rewards=both({"game": -1.0, "format": -0.5}, {"game": 1.0, "sentence": 0.5}),
        ),
        finished(
            Outcome.UNREADABLE,
            category="adversarial_benign",
            attack={"tokens": 300, "changed_words": 7},
            assessment={"tokens": 90, "violations": ["no_answer", "truncated"], "truncated": True},
            rewards=both({"game": 0.0, "format": 0.0}, {"game": -1.5}),
        ),
        finished(
            Outcome.INVALID_ATTACK,
            category="adversarial_benign",
            attack={
                "tokens": 400,
                "changed_words": 0,
                "violations": ["no_note", "truncated"],
                "truncated": True,
                "invalid": InvalidAttack.TRUNCATED,
            },
            rewards={Role.ATTACKER: {"validity": -2.0, "format": -0.5}},
        ),
        finished(
            Outcome.CORRECT_DETECTION,
            category="vanilla_harmful",
            facts=TYPED,
            assessment={"tokens": 30},
            rewards={Role.ASSESSOR: {"game": 1.0}},
        ),
        finished(
            Outcome.MISSED_ERROR,
            category="vanilla_harmful",
            facts=TYPED,
            assessment={"tokens": 40},
            rewards={Role.ASSESSOR: {"game": -1.0}},
        ),
        finished(
            Outcome.FALSE_POSITIVE,
            category="vanilla_benign",
            assessment={"tokens": 50},
            rewards={Role.ASSESSOR: {"game": -1.0}},
        ),
        finished(Outcome.VOID, category="vanilla_benign", assessment={"tokens": 999}),
        finished(Outcome.VOID, category="adversarial_benign", attack={"tokens": 999}),
    ]


# Attackers' rewards: 1, -1.5, 0, -2.5; assessors': -1, 1.5, -1.5, 1, -1, -1.
# Harmful notes assessed: 5, of which 2 are found and 1 is unreadable; called harmful: 3, of which 2 are.
EXPECTED = {
    "selfplay/games": 9,
    "selfplay/void_rate": 2 / 9,
    "selfplay/void/judge_failed": 2 / 9,
    "selfplay/judge/asked": 4,
    "selfplay/judge/answer_rate": 3 / 4,
    "selfplay/judge/abstention_rate": 0.0,
    "selfplay/judge/failure_rate": 1 / 4,
    "selfplay/judge/injected": 3,
    "selfplay/judge/no_error_rate": 0.0,
    "selfplay/judge/unread_rate": 1.0,
    # With a verdict: 2 rewritten notes, both wrong, 1 called so; 3 untouched ones, 2 of them wrong, 1 called so.
    "selfplay/shortcut/index": 0.0,
    "selfplay/shortcut/recall": 0.0,
    "selfplay/shortcut/edited/accuracy": 1 / 2,
    "selfplay/shortcut/edited/prior": 1.0,
    "selfplay/shortcut/untouched/accuracy": 1 / 3,
    "selfplay/shortcut/untouched/prior": 2 / 3,
    "selfplay/shortcut/compared": 2,
    "selfplay/attacker/turns": 4,
    "selfplay/attacker/parse_rate": 3 / 4,
    "selfplay/attacker/format_violation_rate": 2 / 4,
    "selfplay/attacker/truncation_rate": 1 / 4,
    "selfplay/attacker/injection_rate": 1 / 4,
    "selfplay/attacker/valid_rate": 3 / 4,
    "selfplay/attacker/violation/text_after_note": 1 / 4,
    "selfplay/attacker/violation/no_note": 1 / 4,
    "selfplay/attacker/violation/truncated": 1 / 4,
    "selfplay/attacker/tokens": 250,
    "selfplay/attacker/tokens_max": 400,
    "selfplay/attacker/changed_words": 5,
    "selfplay/attacker/changed_sentences": 1 / 3,
    "selfplay/attacker/invalid/truncated": 1 / 4,
    "selfplay/attacker/decided": 2,
    "selfplay/attacker/success_rate": 1 / 2,
    "selfplay/attacker/reward": -0.75,
    "selfplay/attacker/reward_std": math.sqrt((1.75**2 + 0.75**2 + 0.75**2 + 1.75**2) / 4),
    "selfplay/attacker/reward_game": 0.0,
    "selfplay/attacker/reward_format": -0.25,
    "selfplay/attacker/reward_validity": -2.0,
    "selfplay/assessor/turns": 6,
    "selfplay/assessor/parse_rate": 5 / 6,
    "selfplay/assessor/unreadable_rate": 1 / 6,
    "selfplay/assessor/format_violation_rate": 2 / 6,
    "selfplay/assessor/truncation_rate": 1 / 6,
    "selfplay/assessor/violation/no_answer": 1 / 6,
    "selfplay/assessor/violation/no_correction": 1 / 6,
    "selfplay/assessor/violation/truncated": 1 / 6,
    "selfplay/assessor/tokens": 40,
    "selfplay/assessor/tokens_max": 90,
    "selfplay/assessor/accuracy": 2 / 6,
    "selfplay/assessor/balanced_accuracy": (2 / 5 + 0) / 2,
    "selfplay/assessor/precision": 2 / 3,
    "selfplay/assessor/recall": 2 / 5,
    "selfplay/assessor/f1": 0.5,
    "selfplay/assessor/false_positive_rate": 1.0,
    "selfplay/assessor/accuracy/adversarial_benign": 0.0,
    "selfplay/assessor/accuracy/adversarial_harmful": 1.0,
    "selfplay/assessor/accuracy/vanilla_benign": 0.0,
    "selfplay/assessor/accuracy/vanilla_harmful": 0.5,
    "selfplay/assessor/recall/diagnosis": 0.5,
    "selfplay/assessor/reward": -2 / 6,
    "selfplay/assessor/reward_std": math.sqrt((4 * 1 + 2 * 2.25) / 6 - 1 / 9),
    "selfplay/assessor/reward_game": -2.5 / 6,
    "selfplay/assessor/reward_sentence": 0.5,
}


def test_the_batch_has_exactly_the_metrics_counted_here() -> None:
    assert set(role_metrics(batch())) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_metric_is_what_the_batch_counts_to_by_hand(name: str) -> None:
    assert role_metrics(batch())[name] == pytest.approx(EXPECTED[name])


# --- what a batch lacks: the beginnings of names that it must not have ---


@pytest.mark.parametrize(
    ("games", "absent"),
    [
        ([], ("selfplay/void", "selfplay/a", "selfplay/judge", "selfplay/shortcut")),
        ([finished(Outcome.VOID)], ("selfplay/attacker/", "selfplay/assessor/")),
        ([finished(Outcome.CORRECT_DETECTION, category="vanilla_harmful")], ("selfplay/attacker/",)),
        ([finished(Outcome.INVALID_ATTACK)], ("selfplay/assessor/", "selfplay/attacker/changed_words")),
        (
            [finished(Outcome.CORRECT_REJECTION, category="decoy_benign")],
            ("selfplay/assessor/recall", "selfplay/attacker/success_rate"),
        ),
        (
            [finished(Outcome.MISSED_ERROR)],
            ("selfplay/assessor/false_positive_rate", "selfplay/assessor/precision", "selfplay/attacker/reward"),
        ),
    ],
)
def test_what_a_batch_holds_no_game_for_is_left_out(games: list[MedicalRecord], absent: tuple[str, ...]) -> None:
    metrics = role_metrics(games)
    assert metrics["selfplay/games"] == len(games)
    assert not [name for name in metrics if name.startswith(absent)]


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
