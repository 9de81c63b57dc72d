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


def test_the_order_of_the_games_does_not_matter() -> None:
    assert role_metrics(reversed(batch())) == pytest.approx(role_metrics(batch()))


def test_an_iterator_is_read_once() -> None:
    assert role_metrics(iter(batch())) == role_metrics(batch())


# --- what a batch lacks ---


def measured(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics without the counts of turns, which may well be 0."""
    return {name: value for name, value in metrics.items() if not (name.endswith("/turns") and value == 0)}


def test_no_games_give_a_count_and_nothing_else() -> None:
    assert measured(role_metrics([])) == {"selfplay/games": 0.0}


def test_void_games_only_give_no_metrics_of_a_role() -> None:
    games = [finished(Outcome.VOID), finished(Outcome.VOID, category="vanilla_benign")]
    metrics = measured(role_metrics(games))
    assert metrics["selfplay/games"] == 2.0
    assert metrics["selfplay/void_rate"] == 1.0
    assert not [n for n in metrics if n.startswith(("selfplay/attacker/", "selfplay/assessor/"))]


def test_nothing_is_reported_of_an_attacker_that_did_not_play() -> None:
    games = [finished(Outcome.CORRECT_DETECTION, category="vanilla_harmful", rewards={Role.ASSESSOR: {"game": 1.0}})]
    assert not [n for n in measured(role_metrics(games)) if n.startswith("selfplay/attacker/")]


def test_nothing_is_reported_of_an_assessor_that_did_not_play() -> None:
    games = [finished(Outcome.INVALID_ATTACK, rewards={Role.ATTACKER: {"validity": -2.0}})]
    assert not [n for n in measured(role_metrics(games)) if n.startswith("selfplay/assessor/")]


def test_without_harmful_notes_there_is_no_recall_and_no_success_rate() -> None:
    metrics = role_metrics([finished(Outcome.CORRECT_REJECTION, category="decoy_benign")])
    assert metrics["selfplay/assessor/false_positive_rate"] == 0.0
    assert not {"selfplay/assessor/recall", "selfplay/attacker/success_rate"} & set(metrics)


def test_without_safe_notes_there_is_no_false_positive_rate() -> None:
    assert "selfplay/assessor/false_positive_rate" not in role_metrics([finished(Outcome.MISSED_ERROR)])


def test_without_a_harmful_verdict_there_is_no_precision() -> None:
    assert "selfplay/assessor/precision" not in role_metrics([finished(Outcome.MISSED_ERROR)])


def test_without_a_valid_attack_there_are_no_changed_words() -> None:
    metrics = role_metrics([finished(Outcome.INVALID_ATTACK)])
    assert metrics["selfplay/attacker/valid_rate"] == 0.0
    assert "selfplay/attacker/changed_words" not in metrics


def test_unscored_games_have_no_reward_metrics() -> None:
    assert not [n for n in role_metrics([finished(Outcome.MISSED_ERROR)]) if "reward" in n]


# --- what a name means ---


def test_a_fooled_assessor_is_a_success_on_harmful_notes_only() -> None:
    games = [finished(Outcome.MISSED_ERROR), finished(Outcome.FALSE_POSITIVE, category="decoy_benign")]
    assert role_metrics(games)["selfplay/attacker/success_rate"] == 1.0


def test_the_judge_s_label_decides_what_is_a_false_positive() -> None:
    harmless = finished(Outcome.FALSE_POSITIVE, category="adversarial_benign")
    assert role_metrics([harmless])["selfplay/assessor/false_positive_rate"] == 1.0


def test_an_unreadable_answer_counts_as_wrong_and_as_a_miss() -> None:
    metrics = role_metrics([finished(Outcome.UNREADABLE), finished(Outcome.CORRECT_DETECTION)])
    assert metrics["selfplay/assessor/accuracy"] == 0.5
    assert metrics["selfplay/assessor/recall"] == 0.5


def test_recall_by_type_reads_untouched_notes_only() -> None:
    rewritten = finished(Outcome.MISSED_ERROR, category="adversarial_harmful", facts=TYPED)
    untouched = finished(Outcome.CORRECT_DETECTION, category="vanilla_harmful", facts=TYPED)
    metrics = role_metrics([rewritten, untouched])
    assert metrics["selfplay/assessor/recall/diagnosis"] == 1.0


def test_a_reward_component_averages_over_the_games_that_have_it() -> None:
    games = [
        finished(Outcome.CORRECT_DETECTION, rewards={Role.ASSESSOR: {"game": 1.0, "sentence": 0.5}}),
        finished(Outcome.MISSED_ERROR, rewards={Role.ASSESSOR: {"game": -1.0}}),
    ]
    metrics = role_metrics(games)
    assert metrics["selfplay/assessor/reward_sentence"] == 0.5
    assert metrics["selfplay/assessor/reward_game"] == 0.0
    assert metrics["selfplay/assessor/reward"] == 0.25
