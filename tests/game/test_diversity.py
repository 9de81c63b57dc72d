"""Self-similarity of attacks: between cases only, deterministic, bounded work."""

import random

import pytest
from game.builders import finished
from hypothesis import given
from hypothesis import strategies as st

from medserl_agentloop.games.medical.metrics import MAX_COMPARED, diversity_metrics
from medserl_agentloop.games.medical.records import InvalidAttack, MedicalRecord, Outcome

DRUGS = ("warfarin", "heparin", "insulin", "digoxin", "lithium", "morphine")
SENTENCES = [
    "She receives warfarin 5 mg daily.",
    "Cultures grew Klebsiella after two days.",
    "The x-ray shows no fracture at all.",
]


def attack(case: str, *inserted: str, invalid: InvalidAttack | None = None) -> MedicalRecord:
    return finished(
        Outcome.INVALID_ATTACK if invalid else Outcome.MISSED_ERROR,
        attack={"changed_sentences": list(inserted), "invalid": invalid},
        facts={"vignette_id": case},
    )


SAME_CASE = [attack("a", SENTENCES[0]), attack("a", SENTENCES[0])]
BY_NOTE = [
    finished(
        Outcome.MISSED_ERROR, attack={"changed_sentences": SENTENCES[:1]}, facts={"vignette_id": "", "seed_note": n}
    )
    for n in ("One note.", "Another note.")
]
DRESSED = [attack("a", "She receives warfarin."), attack("b", "she RECEIVES warfarin"), attack("c", SENTENCES[1])]


@pytest.mark.parametrize(
    ("games", "least", "most", "duplicates"),
    [
        ([attack(str(n), SENTENCES[0]) for n in range(4)], 1.0, 1.0, 1.0),
        ([attack(drug, f"She receives {drug} 5 mg daily.") for drug in DRUGS], 0.7, 1.0, 0.0),  # one trick
        ([*SAME_CASE, attack("b", SENTENCES[1])], 0.0, 0.5, 0.0),
        (BY_NOTE, 1.0, 1.0, 1.0),
        (DRESSED, 0.0, 1.0, 2 / 3),
    ],
)
def test_attacks_on_different_cases_are_as_similar_as_their_sentences(
    games: list[MedicalRecord], least: float, most: float, duplicates: float
) -> None:
    metrics = diversity_metrics(games)
    assert least <= metrics["self_similarity"] <= most
    assert metrics["duplicate_rate"] == pytest.approx(duplicates)


@pytest.mark.parametrize(
    "games",
    [
        SAME_CASE,
        [attack("a", SENTENCES[0]), attack("b", SENTENCES[0], invalid=InvalidAttack.TOO_MANY_WORDS)],
        [attack("a", SENTENCES[0]), attack("b")],  # a deletion
        [attack("a", SENTENCES[0])],
    ],
)
def test_what_cannot_be_compared_gives_no_number(games: list[MedicalRecord]) -> None:
    assert diversity_metrics(games) == {}


@given(st.integers(0, 2**31))
def test_a_sample_of_many_is_the_same_in_any_order(seed: int) -> None:
    games = [attack(str(n), f"{SENTENCES[n % 3]} {n * n}") for n in range(2 * MAX_COMPARED + 5)]
    expected = diversity_metrics(games)
    random.Random(seed).shuffle(games)
    assert diversity_metrics(games) == expected
    assert expected["compared"] == MAX_COMPARED
