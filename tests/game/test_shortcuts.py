"""The shortcut metrics: 0 for an assessor that knows the medicine, 1 for one that follows the cue alone."""

import random

import pytest
from game.builders import CLEAN_NOTE, ERROR_NOTE, ERROR_SENTENCE, finished
from hypothesis import given
from hypothesis import strategies as st

from medserl_agentloop.games.medical.metrics import role_metrics
from medserl_agentloop.games.medical.records import MedicalRecord, Outcome
from medserl_agentloop.games.medical.types import Category, Label

P = "selfplay/shortcut/"
EDITED = {Label.SAFE: Category.DECOY_BENIGN, Label.HARMFUL: Category.ADVERSARIAL_BENIGN}
UNTOUCHED = {Label.SAFE: Category.VANILLA_BENIGN, Label.HARMFUL: Category.VANILLA_HARMFUL}


def game(label: Label, *, edited: bool, said: Label, note: str | None = None) -> MedicalRecord:
    right = {Label.SAFE: Outcome.CORRECT_REJECTION, Label.HARMFUL: Outcome.CORRECT_DETECTION}
    wrong = {Label.SAFE: Outcome.FALSE_POSITIVE, Label.HARMFUL: Outcome.MISSED_ERROR}
    outcome = right[label] if said is label else wrong[label]
    record = finished(outcome, category=(EDITED if edited else UNTOUCHED)[label])
    assert record.outcome is outcome
    return record if note is None else record.model_copy(update={"presented_note": note})


def all_kinds(verdict: object) -> list[MedicalRecord]:
    return [game(label, edited=e, said=verdict(label, e)) for label in Label for e in (True, False)] * 3  # type: ignore[operator]


@pytest.mark.parametrize(
    ("verdict", "index", "accuracy"),
    [
        (lambda label, edited: label, 0, 1),
        (lambda label, edited: Label.HARMFUL if edited else Label.SAFE, 1, 0.5),
        (lambda label, edited: Label.HARMFUL, 0, 0.5),  # suspicious, without a cue
    ],
)
def test_the_index_is_0_without_the_cue_and_1_with_nothing_else(verdict: object, index: int, accuracy: float) -> None:
    numbers = role_metrics(all_kinds(verdict))
    assert [numbers[P + n] for n in ("index", "false_positives", "recall")] == [index] * 3
    assert numbers[P + "edited/accuracy"] == numbers[P + "untouched/accuracy"] == accuracy
    assert (numbers[P + "compared"], numbers[P + "edited/prior"]) == (6, 0.5)


def test_without_decoys_the_index_is_the_recall_alone() -> None:
    games = [g for g in all_kinds(lambda label, edited: Label.HARMFUL if edited else Label.SAFE)]
    numbers = role_metrics([g for g in games if g.category is not Category.DECOY_BENIGN])
    assert numbers[P + "index"] == numbers[P + "recall"] == 1
    assert P + "false_positives" not in numbers
    assert numbers[P + "edited/prior"] == 1


def test_nothing_to_compare_is_left_out() -> None:
    untouched = [game(label, edited=False, said=label) for label in Label]
    numbers = role_metrics(untouched)
    assert P + "index" not in numbers and P + "compared" not in numbers
    assert numbers[P + "untouched/prior"] == 0.5


def test_a_verdict_by_length_shows_in_the_length_effect() -> None:
    long = CLEAN_NOTE + " The family was told." * 5
    games = [
        game(label, edited=False, said=Label.HARMFUL if note is long else Label.SAFE, note=note)
        for label in Label
        for note in (long, CLEAN_NOTE)
    ]
    assert role_metrics(games)[P + "length"] == 1


def test_an_error_that_is_only_found_at_the_end_shows() -> None:
    last = ERROR_NOTE.replace(f" {ERROR_SENTENCE}", "") + f" {ERROR_SENTENCE}"
    games = [
        game(Label.HARMFUL, edited=False, said=said, note=note).model_copy(update={"error_sentences": [ERROR_SENTENCE]})
        for note, said in ((last, Label.HARMFUL), (ERROR_NOTE, Label.SAFE))
    ]
    assert role_metrics(games)[P + "last_sentence"] == 1


@given(
    st.lists(st.tuples(st.sampled_from(Label), st.booleans(), st.sampled_from(Label)), max_size=20),
    st.randoms(use_true_random=False),
)
def test_the_order_of_the_games_changes_nothing_and_no_number_leaves_its_range(
    kinds: list[tuple[Label, bool, Label]], rng: random.Random
) -> None:
    games = [game(label, edited=edited, said=said) for label, edited, said in kinds]
    numbers = {n: v for n, v in role_metrics(games).items() if n.startswith(P)}
    rng.shuffle(games)
    assert {n: v for n, v in role_metrics(games).items() if n.startswith(P)} == pytest.approx(numbers)
    assert all(-1 <= v <= 1 for n, v in numbers.items() if n != P + "compared")
