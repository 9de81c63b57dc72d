"""Rewards corrected for a judge that errs: right on average, component by component."""

import functools
import math
import random
import statistics

import pytest
from game.builders import DECIDED, any_game, finished
from hypothesis import given
from hypothesis import strategies as st

from medserl_agentloop.games.medical.records import Judgement, MedicalRecord, Outcome, Rewards
from medserl_agentloop.games.medical.rewards import SCHEMES, ErrorRates, RewardScheme, corrected, medserl, zero_sum
from medserl_agentloop.games.medical.types import Category, Label, Role

GOOD, BAD = Label.SAFE, Label.HARMFUL
schemes = pytest.mark.parametrize("scheme", [medserl, zero_sum])
a_rate = st.floats(0.65, 1.0)


def judged(record: MedicalRecord, label: Label) -> MedicalRecord:
    assert record.judgement is not None
    return record.model_copy(update={"judgement": record.judgement.model_copy(update={"label": label})})


@given(any_game(), st.sampled_from(sorted(SCHEMES)), a_rate, a_rate)
def test_the_expected_reward_is_that_under_the_true_label(
    record: MedicalRecord, name: str, sensitivity: float, specificity: float
) -> None:
    scheme, rates = SCHEMES[name], ErrorRates(sensitivity, specificity)
    score = corrected(scheme, rates)
    if record.judgement is None or record.judgement.label is None or not record.category.has_attack:
        assert score(record) == scheme(record)
        return
    for truth, right in ((BAD, sensitivity), (GOOD, specificity)):
        lie = GOOD if truth is BAD else BAD
        told, lied, true = (f(judged(record, y)) for f, y in ((score, truth), (score, lie), (scheme, truth)))
        assert set(told) == set(lied) == set(true)
        for role, components in told.items():
            for component in components | lied[role] | true[role]:
                mean = right * components.get(component, 0.0) + (1 - right) * lied[role].get(component, 0.0)
                assert mean == pytest.approx(true[role].get(component, 0.0), abs=1e-9)


def test_the_example_of_the_docstring() -> None:
    rewards = corrected(zero_sum, ErrorRates(0.8, 0.8))(finished(Outcome.CORRECT_DETECTION))
    assert rewards[Role.ASSESSOR]["game"] == pytest.approx(0.8 / 0.6 + 0.2 / 0.6)


@pytest.mark.parametrize("outcome", DECIDED)
def test_where_both_rates_are_equal_the_assessor_s_game_gets_a_common_factor_and_no_more(outcome: Outcome) -> None:
    """Which an estimator that divides by the spread of the rewards takes out again (docs/judges.md)."""
    record = finished(outcome)
    game = corrected(zero_sum, ErrorRates(0.8, 0.8))(record)[Role.ASSESSOR]["game"]
    assert game == pytest.approx(zero_sum(record)[Role.ASSESSOR]["game"] / 0.6)


@given(any_game())
def test_a_judge_that_is_always_right_changes_nothing(record: MedicalRecord) -> None:
    assert corrected(medserl, ErrorRates(1.0, 1.0))(record) == medserl(record)


@pytest.mark.parametrize("category", [Category.VANILLA_BENIGN, Category.VANILLA_HARMFUL])
def test_untouched_notes_are_scored_by_the_label_of_the_data(category: Category) -> None:
    record = finished(Outcome.CORRECT_DETECTION, category=category)
    assert corrected(medserl, ErrorRates(0.7, 0.7))(record) == medserl(record)


@pytest.mark.parametrize(("sensitivity", "specificity"), [(1.0, 0.0), (0.5, 0.5), (0.55, 0.6), (0.1, 0.2)])
def test_a_judge_that_says_next_to_nothing_is_refused(sensitivity: float, specificity: float) -> None:
    with pytest.raises(ValueError, match="cannot be corrected for: their sum less 1 is"):
        corrected(medserl, ErrorRates(sensitivity, specificity))


def simulated_game(rng: random.Random) -> tuple[MedicalRecord, Label]:
    """A game with a random truth, verdict and edit; how often the attack is honest is part of the draw."""
    truth = rng.choices([BAD, GOOD], [7, 3])[0]
    verdict = rng.choices([truth, BAD, GOOD], [3, 1, 1])[0]
    attack = {"edit_share": rng.random(), "violations": rng.choice([[], ["no_reasoning"]])}
    category = rng.choices([Category.ADVERSARIAL_BENIGN, Category.DECOY_BENIGN], [4, 1])[0]
    outcome = Outcome.CORRECT_DETECTION if verdict is BAD else Outcome.MISSED_ERROR
    record = finished(outcome, category=category, attack=attack, assessment={"sentence": "She is well."})
    realistic = rng.choice([None, True, False])
    return record.model_copy(update={"judgement": Judgement(judge="noisy", label=truth, realistic=realistic)}), truth


@functools.lru_cache(maxsize=1)
def simulated_games(rates: ErrorRates, games: int = 5000) -> list[tuple[MedicalRecord, MedicalRecord]]:
    """Games as they are, and as a judge of these rates sees them."""
    rng = random.Random(7)
    found = []
    for _ in range(games):
        record, truth = simulated_game(rng)
        right = rng.random() < (rates.sensitivity if truth is BAD else rates.specificity)
        found.append((record, judged(record, truth if right else (GOOD if truth is BAD else BAD))))
    return found


def means(scheme: RewardScheme, rates: ErrorRates) -> dict[str, dict[Role, tuple[float, float]]]:
    """Mean difference to the true reward and half of its 99.9 % interval, plain and corrected, for both roles."""
    games = simulated_games(rates)
    score = corrected(scheme, rates)
    differences: dict[str, dict[Role, list[float]]] = {n: {r: [] for r in Role} for n in ("plain", "corrected")}

    def total(rewards: Rewards, role: Role) -> float:
        return sum(rewards[role].values())

    for record, noisy in games:
        true, plain, mended = scheme(record), scheme(noisy), score(noisy)
        for role in Role:
            differences["plain"][role].append(total(plain, role) - total(true, role))
            differences["corrected"][role].append(total(mended, role) - total(true, role))
    return {
        name: {r: (statistics.fmean(d), 3.29 * statistics.stdev(d) / math.sqrt(len(games))) for r, d in by_role.items()}
        for name, by_role in differences.items()
    }


@schemes
@pytest.mark.parametrize(("sensitivity", "specificity"), [(0.8, 0.8), (0.7, 0.95), (0.95, 0.6)])
def test_in_simulation_corrected_rewards_have_the_mean_of_the_true_ones(
    scheme: RewardScheme, sensitivity: float, specificity: float
) -> None:
    found = means(scheme, ErrorRates(sensitivity, specificity))
    for role in Role:
        difference, half = found["corrected"][role]
        assert abs(difference) <= half
    difference, half = found["plain"][Role.ASSESSOR]
    assert difference < -2 * half, "no test of the correction: the plain rewards are hardly biased here"
