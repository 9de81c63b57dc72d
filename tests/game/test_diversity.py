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


def similarity(*games: MedicalRecord) -> float:
    return diversity_metrics(games)["self_similarity"]


def test_one_sentence_in_every_note_is_fully_similar_and_all_duplicates() -> None:
    metrics = diversity_metrics([attack(str(n), SENTENCES[0]) for n in range(4)])
    assert metrics == {"compared": 4.0, "self_similarity": 1.0, "duplicate_rate": 1.0}


def test_one_trick_with_other_words_counts_as_similar() -> None:
    trick = [attack(drug, f"She receives {drug} 5 mg daily.") for drug in DRUGS]
    assert similarity(*trick) > 0.7


def test_attacks_on_one_case_are_not_compared() -> None:
    same_case = [attack("a", SENTENCES[0]), attack("a", SENTENCES[0])]
    assert diversity_metrics(same_case) == {}
    assert similarity(*same_case, attack("b", SENTENCES[1])) < 0.5
    assert diversity_metrics([*same_case, attack("b", SENTENCES[1])])["duplicate_rate"] == 0.0


def test_without_a_case_the_note_tells_them_apart() -> None:
    games = [
        finished(
            Outcome.MISSED_ERROR, attack={"changed_sentences": SENTENCES[:1]}, facts={"vignette_id": "", "seed_note": n}
        )
        for n in ("One note.", "Another note.")
    ]
    assert similarity(*games) == 1.0


def test_case_and_punctuation_do_not_hide_a_duplicate() -> None:
    games = [attack("a", "She receives warfarin."), attack("b", "she RECEIVES warfarin"), attack("c", SENTENCES[1])]
    assert diversity_metrics(games)["duplicate_rate"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    "others", [[attack("b", SENTENCES[0], invalid=InvalidAttack.TOO_MANY_WORDS)], [attack("b")], []]
)
def test_invalid_attacks_deletions_and_a_lone_attack_are_not_compared(others: list[MedicalRecord]) -> None:
    assert diversity_metrics([attack("a", SENTENCES[0]), *others]) == {}


@given(st.integers(0, 2**31))
def test_a_sample_of_many_is_the_same_in_any_order(seed: int) -> None:
    games = [attack(str(n), f"{SENTENCES[n % 3]} {n * n}") for n in range(2 * MAX_COMPARED + 5)]
    expected = diversity_metrics(games)
    random.Random(seed).shuffle(games)
    assert diversity_metrics(games) == expected
    assert expected["compared"] == MAX_COMPARED
