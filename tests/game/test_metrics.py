"""Role metrics: a batch counted by hand, batches that lack something, what a name means, and any
batch.

Whatever a batch holds: no NaN, no infinity, shares are shares, and no name is made of free text.
"""

import math
import random
import re
from dataclasses import replace
from typing import Any

import pytest
from game.builders import any_game, finished
from hypothesis import given
from hypothesis import strategies as st

from medserl_agentloop.games.medical.case import Category, ErrorType, Label, Role
from medserl_agentloop.games.medical.metrics import MAX_COMPARED, diversity_metrics, role_metrics
from medserl_agentloop.games.medical.records import InvalidAttack, Judgement, MedicalRecord, Outcome

TYPED = {"error_type": ErrorType.DIAGNOSIS}
CUT_OFF = {
    "tokens": 400,
    "changed_words": 0,
    "violations": ["no_note", "truncated"],
    "truncated": True,
}

# Outcome, category, attack, assessment, and what each role is paid: nine games, two of them void.
GAMES: list[tuple[Outcome, str, *tuple[dict[str, Any], ...]]] = [
    (Outcome.MISSED_ERROR, "adversarial_benign",
     {"tokens": 100, "changed_words": 3, "changed_sentences": ["She is given warfarin."]},
     {"tokens": 10}, {"game": 1.0, "format": 0.0}, {"game": -1.0}),
    (Outcome.CORRECT_DETECTION, "adversarial_harmful",
     {"tokens": 200, "changed_words": 5, "violations": ["text_after_note"], "injections": ["tag"]},
     {"tokens": 20, "violations": ["no_correction"]},
     {"game": -1.0, "format": -0.5}, {"game": 1.0, "sentence": 0.5}),
    (Outcome.UNREADABLE, "adversarial_benign", {"tokens": 300, "changed_words": 7},
     {"tokens": 90, "violations": ["no_answer", "truncated"], "truncated": True},
     {"game": 0.0, "format": 0.0}, {"game": -1.5}),
    (Outcome.INVALID_ATTACK, "adversarial_benign", {**CUT_OFF, "invalid": InvalidAttack.TRUNCATED},
     {}, {"validity": -2.0, "format": -0.5}, {}),
    (Outcome.CORRECT_DETECTION, "vanilla_harmful", {}, {"tokens": 30}, {}, {"game": 1.0}),
    (Outcome.MISSED_ERROR, "vanilla_harmful", {}, {"tokens": 40}, {}, {"game": -1.0}),
    (Outcome.FALSE_POSITIVE, "vanilla_benign", {}, {"tokens": 50}, {}, {"game": -1.0}),
    (Outcome.VOID, "vanilla_benign", {}, {"tokens": 999}, {}, {}),
    (Outcome.VOID, "adversarial_benign", {"tokens": 999}, {}, {}, {}),
]  # fmt: skip


def batch() -> list[MedicalRecord]:
    games = []
    for outcome, category, attack, assessment, *paid in GAMES:
        rewards = {role: parts for role, parts in zip(Role, paid, strict=True) if parts}
        facts = TYPED if category == "vanilla_harmful" else {}
        parts = {"attack": attack, "assessment": assessment, "facts": facts, "rewards": rewards}
        games.append(finished(outcome, category=category, **parts))
    return games


# Attackers' rewards: 1, -1.5, 0, -2.5; assessors': -1, 1.5, -1.5, 1, -1, -1.
# Harmful notes assessed: 5, of which 2 are found and 1 is unreadable; called harmful: 3, of which 2
# are.
COUNTED = {
    "": {"games": 9, "void_rate": 2 / 9, "void/judge_failed": 2 / 9},
    "judge/": {"asked": 4, "answer_rate": 3 / 4, "abstention_rate": 0.0, "failure_rate": 1 / 4,
     "injected": 3, "no_error_rate": 0.0, "unread_rate": 1.0},
    # With a verdict: 2 rewritten notes, both wrong, 1 called so; 3 untouched ones, 2 of them wrong,
    # 1 called so.
    "shortcut/": {"index": 0.0, "recall": 0.0, "compared": 2, "edited/accuracy": 1 / 2,
     "untouched/accuracy": 1 / 3},
    "attacker/": {"turns": 4, "parse_rate": 3 / 4, "format_violation_rate": 2 / 4,
     "truncation_rate": 1 / 4, "injection_rate": 1 / 4, "valid_rate": 3 / 4,
     "invalid/truncated": 1 / 4, "violation/text_after_note": 1 / 4, "violation/no_note": 1 / 4,
     "violation/truncated": 1 / 4, "tokens": 250, "tokens_max": 400, "changed_words": 5,
     "changed_sentences": 1 / 3, "decided": 2, "success_rate": 1 / 2, "undetected_rate": 1 / 4,
     "reward": -0.75, "reward_std": math.sqrt((1.75**2 + 0.75**2 + 0.75**2 + 1.75**2) / 4),
     "reward_game": 0.0, "reward_format": -0.25, "reward_validity": -0.5},
    "assessor/": {"turns": 6, "parse_rate": 5 / 6, "unreadable_rate": 1 / 6,
     "format_violation_rate": 2 / 6, "truncation_rate": 1 / 6, "violation/no_answer": 1 / 6,
     "violation/no_correction": 1 / 6, "violation/truncated": 1 / 6, "tokens": 40, "tokens_max": 90,
     "accuracy": 2 / 6, "balanced_accuracy": (2 / 5 + 0) / 2, "precision": 2 / 3, "recall": 2 / 5,
     "f1": 0.5, "false_positive_rate": 1.0, "accuracy/adversarial_benign": 0.0,
     "accuracy/adversarial_harmful": 1.0, "accuracy/vanilla_benign": 0.0,
     "accuracy/vanilla_harmful": 0.5, "recall/diagnosis": 0.5, "reward": -2 / 6,
     "reward_std": math.sqrt((4 * 1 + 2 * 2.25) / 6 - 1 / 9), "reward_game": -2.5 / 6,
     "reward_sentence": 0.5 / 6},
}  # fmt: skip


def test_the_batch_has_exactly_the_metrics_counted_here() -> None:
    expected = {
        f"selfplay/{of}{name}": value
        for of, values in COUNTED.items()
        for name, value in values.items()
    }
    assert role_metrics(batch()) == pytest.approx(expected)


def test_metrics_without_a_game_in_the_batch_are_left_out() -> None:
    names = role_metrics([finished(Outcome.CORRECT_REJECTION, category="decoy_benign")]).keys()
    assert not names & {"selfplay/assessor/recall", "selfplay/attacker/success_rate"}
    assert role_metrics([]).keys() == {"selfplay/games"}


@st.composite
def records(draw: st.DrawFn) -> MedicalRecord:
    """Any game with free text where free text may be, in a group and of a case of several games."""
    free_text = st.text(max_size=20)
    game = draw(any_game())
    spec = replace(game.spec, vignette_id=draw(st.sampled_from(["", "a", "b"])))
    reasons = [game.void, game.void, "judge failed: TimeoutError", "judge abstained"]
    void = draw(st.sampled_from(reasons) | free_text)
    parts = st.dictionaries(st.just("game"), st.floats(-3, 3))
    rewards = draw(st.dictionaries(st.sampled_from(Role), parts))
    for turn in (game.attack, game.assessment):
        if turn is not None:
            turn.violations += draw(st.lists(free_text, max_size=2))
    if game.attack is not None:
        changed = st.sampled_from([".", "\ud800"]) | free_text
        game.attack.changed_sentences = draw(st.lists(changed, max_size=2))
    uid = draw(st.sampled_from(["", "g", "h"]))
    return game.model_copy(update={"spec": spec, "uid": uid, "void": void, "rewards": rewards})


NO_SHARES = re.compile(
    r"selfplay/(games|shortcut/\w+|(judge/)(asked|injected)"
    r"|(attacker|assessor)/(turns|tokens|tokens_max|groups|decided|compared|changed_\w+|reward\w*))"
)


@given(st.lists(records(), max_size=8), st.randoms(use_true_random=False))
def test_metrics_are_finite_shares_within_bounds_and_ignore_the_order(
    games: list[MedicalRecord], rng: random.Random
) -> None:
    metrics = role_metrics(games)
    assert all(type(v) is float and math.isfinite(v) for v in metrics.values())
    for role in ("attacker", "assessor"):
        own = f"selfplay/{role}/reward"
        parts = [v for n, v in metrics.items() if n.startswith(f"{own}_") and n != f"{own}_std"]
        assert math.fsum(parts) == pytest.approx(metrics.get(own, 0.0))
    assert all(0 <= v <= 1 for n, v in metrics.items() if not NO_SHARES.fullmatch(n)), metrics
    shortcuts = {n: v for n, v in metrics.items() if re.search("/shortcut/(?!compared)", n)}
    assert all(-1 <= v <= 1 for v in shortcuts.values()), shortcuts
    assert all(re.fullmatch(r"selfplay(/[A-Za-z][A-Za-z0-9_]*)+", n) for n in metrics)
    rng.shuffle(games)
    assert role_metrics(games) == pytest.approx(metrics, abs=1e-9)


# The judge, void games, prompt groups and violations: who is counted, and as what.


def void(reason: str, **changes: Any) -> MedicalRecord:
    return finished(Outcome.VOID, **changes).model_copy(update={"void": reason, "judgement": None})


def judged(
    label: Label | None, realistic: bool | None = None, category: str = "adversarial_benign"
) -> MedicalRecord:
    record = finished(Outcome.MISSED_ERROR, category=category)
    record.judgement = Judgement(judge="llm", label=label, realistic=realistic)
    return record


def rewarded(uid: str, assessor: float, attacker: float | None = None) -> MedicalRecord:
    totals = {Role.ASSESSOR: assessor, Role.ATTACKER: attacker}
    rewards = {role: {"game": total} for role, total in totals.items() if total is not None}
    return finished(Outcome.MISSED_ERROR, uid=uid, rewards=rewards)


@pytest.mark.parametrize(
    ("games", "no_signal"),
    [
        ([(1.0, -1.0), (-1.0, 1.0)], 0.0),
        ([(1.0, 1.0), (-1.0, -1.0)], 1.0),
        ([(1.0, 1.0), (1.0, -1.0)], 0.5),
    ],
)
def test_assessments_of_one_note_are_a_group_as_they_are_to_the_estimators(
    games: list[tuple[float, float]], no_signal: float
) -> None:
    played = []
    for rewards in games:
        game = rewarded("same", sum(rewards) / 2)
        game.further_assessments = game.assessments
        game.turn_rewards = {n: {"game": reward} for n, reward in enumerate(rewards, start=1)}
        # A record comes back from the reward manager without its turns.
        played.append(MedicalRecord.model_validate(game.model_dump()))
    metrics = role_metrics(played)
    assert metrics["selfplay/assessor/groups"] == 2
    assert metrics["selfplay/assessor/no_signal_rate"] == no_signal


VOID = {
    "judge failed: ConnectError": "judge_failed", "judge abstained": "judge_abstained",
    "no room for the assessor's turn": "no_room", "attacker: generation aborted": "aborted",
    "something new: device 17": "other", "": "other",
    # Words of a model or a server come after the game's own.
    "judge failed: BadAnswer: not the JSON that was asked for: 'This is no "
    "number.'": "judge_failed",
    "attacker: generation failed: RuntimeError: no room in the cache": "failed",
}  # fmt: skip


@pytest.mark.parametrize("reason", VOID)
def test_a_void_game_is_counted_by_the_class_of_its_reason(reason: str) -> None:
    metrics = role_metrics([void(reason), finished(Outcome.MISSED_ERROR)])
    assert {n: v for n, v in metrics.items() if "/void/" in n} == {
        f"selfplay/void/{VOID[reason]}": 0.5
    }


def test_attacks_are_judged_by_realism_and_a_failed_judge_counts_as_asked() -> None:
    games = [
        judged(Label.SAFE),
        judged(Label.HARMFUL, True),
        judged(Label.HARMFUL, False, category="adversarial_harmful"),
        judged(Label.SAFE, category="decoy_benign"),  # as it was asked to be
        finished(Outcome.VOID, void="judge failed: Timeout"),
    ]
    found = role_metrics(games)
    expected = {"injected": 3, "no_error_rate": 1 / 3, "realistic_rate": 1 / 2}
    expected |= {"failure_rate": 1 / 5}
    assert {n: found[f"selfplay/judge/{n}"] for n in expected} == pytest.approx(expected)


def test_a_group_of_equal_rewards_gives_no_signal_to_that_role() -> None:
    games = [
        *(rewarded("same", 1.0, attacker) for attacker in (-1.0, 0.5)),
        *(rewarded("mixed", assessor, -1.0) for assessor in (1.0, -1.0)),
        *(rewarded("mixed too", assessor) for assessor in (1.0, 1.0, -1.0)),
        *(rewarded("equal but for rounding", reward) for reward in (0.1 + 0.2, 0.3)),
        rewarded("alone", 1.0),
    ]
    metrics = role_metrics(games)
    assert metrics["selfplay/assessor/groups"] == 4
    assert metrics["selfplay/assessor/no_signal_rate"] == pytest.approx(2 / 4)
    assert metrics["selfplay/assessor/small_group_rate"] == pytest.approx(1 / 5)
    assert metrics["selfplay/attacker/groups"] == 2
    assert metrics["selfplay/attacker/no_signal_rate"] == pytest.approx(1 / 2)
    assert metrics["selfplay/attacker/small_group_rate"] == 0.0
    alone = role_metrics([rewarded("a", 1.0), rewarded("b", 1.0)])
    assert alone["selfplay/assessor/small_group_rate"] == 1.0
    assert not {"selfplay/assessor/groups", "selfplay/assessor/no_signal_rate"} & set(alone)


# Self-similarity of attacks: between cases only, deterministic, bounded work.

DRUGS = ("warfarin", "heparin", "insulin", "digoxin", "lithium", "morphine")
SENTENCES = [
    "She receives warfarin 5 mg daily.",
    "Cultures grew Klebsiella after two days.",
    "The x-ray is clear.",
]


def attack(case: str, *inserted: str) -> MedicalRecord:
    changed = {"changed_sentences": list(inserted)}
    return finished(Outcome.MISSED_ERROR, attack=changed, facts={"vignette_id": case})


def test_attacks_on_different_cases_are_as_similar_as_their_sentences() -> None:
    same = [attack(str(n), SENTENCES[0]) for n in range(4)]
    one_trick = [attack(drug, f"She receives {drug} 5 mg daily.") for drug in DRUGS]
    on_one_case = [attack(case, SENTENCES[case == "b"]) for case in "aab"]
    for games, least, most, duplicates in (
        (same, 1.0, 1.0, 1.0), (one_trick, 0.7, 1.0, 0.0), (on_one_case, 0.0, 0.5, 0.0)
    ):  # fmt: skip
        metrics = diversity_metrics(games)
        assert least <= metrics["self_similarity"] <= most
        assert metrics["duplicate_rate"] == duplicates


def test_effective_kinds_falls_with_a_collapse_that_similarity_misses() -> None:
    def kinds(*names: str | None) -> float | None:
        said = [Judgement(judge="oracle", label=Label.HARMFUL, error_type=name) for name in names]
        games = [finished(Outcome.MISSED_ERROR, judgement=judgement) for judgement in said]
        return role_metrics(games).get("selfplay/attacker/effective_kinds")

    assert kinds("dose", "drug", "diagnosis", "treatment") == pytest.approx(4.0)
    assert kinds("dose", "dose", "drug", "treatment", None) == pytest.approx(2 * 2**0.5)
    assert (kinds("dose", "dose"), kinds(None)) == (1.0, None)


@given(st.integers(0, 2**31))
def test_a_sample_of_many_is_the_same_in_any_order(seed: int) -> None:
    games = [attack(str(n), f"{SENTENCES[n % 3]} {n * n}") for n in range(2 * MAX_COMPARED + 5)]
    expected = diversity_metrics(games)
    random.Random(seed).shuffle(games)
    assert diversity_metrics(games) == expected
    assert expected["compared"] == MAX_COMPARED


# The shortcut metrics: 0 for an assessor that knows the medicine, 1 for one that follows the cue
# alone.

P = "selfplay/shortcut/"
EDITED = {Label.SAFE: Category.DECOY_BENIGN, Label.HARMFUL: Category.ADVERSARIAL_BENIGN}
UNTOUCHED = {Label.SAFE: Category.VANILLA_BENIGN, Label.HARMFUL: Category.VANILLA_HARMFUL}


def game(label: Label, *, edited: bool, verdict: Label) -> MedicalRecord:
    right = {Label.SAFE: Outcome.CORRECT_REJECTION, Label.HARMFUL: Outcome.CORRECT_DETECTION}
    wrong = {Label.SAFE: Outcome.FALSE_POSITIVE, Label.HARMFUL: Outcome.MISSED_ERROR}
    outcome = (right if verdict is label else wrong)[label]
    return finished(outcome, category=(EDITED if edited else UNTOUCHED)[label])


KINDS = [(label, edited) for label in Label for edited in (True, False)] * 3
KNOWS = [game(label, edited=edited, verdict=label) for label, edited in KINDS]
FOLLOWS = [game(label, edited=e, verdict=Label.HARMFUL if e else Label.SAFE) for label, e in KINDS]
SUSPECTS = [game(label, edited=edited, verdict=Label.HARMFUL) for label, edited in KINDS]


@pytest.mark.parametrize(
    ("games", "index", "accuracy"), [(KNOWS, 0, 1), (FOLLOWS, 1, 0.5), (SUSPECTS, 0, 0.5)]
)
def test_the_index_is_0_without_the_cue_and_1_with_nothing_else(
    games: list[MedicalRecord], index: int, accuracy: float
) -> None:
    numbers = role_metrics(games)
    assert [numbers[P + n] for n in ("index", "false_positives", "recall")] == [index] * 3
    assert numbers[P + "edited/accuracy"] == numbers[P + "untouched/accuracy"] == accuracy
    assert numbers[P + "compared"] == 6
