"""The shortcut metrics: 0 for an assessor that knows the medicine, 1 for one that follows the cue alone."""

import pytest
from game.builders import CLEAN_NOTE, ERROR_NOTE, ERROR_SENTENCE, finished

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
    numbers = role_metrics([game(label, edited=False, said=label) for label in Label])
    assert P + "index" not in numbers and P + "compared" not in numbers
    assert numbers[P + "untouched/prior"] == 0.5


LONG = CLEAN_NOTE + " The family was told." * 5
AT_THE_END = ERROR_NOTE.replace(f" {ERROR_SENTENCE}", "") + f" {ERROR_SENTENCE}"


@pytest.mark.parametrize(
    ("name", "labels", "accused", "cleared"),
    [("length", list(Label), LONG, CLEAN_NOTE), ("last_sentence", [Label.HARMFUL], AT_THE_END, ERROR_NOTE)],
)
def test_a_verdict_by_length_or_by_the_place_of_the_error_shows(
    name: str, labels: list[Label], accused: str, cleared: str
) -> None:
    games = [
        game(label, edited=False, said=said, note=note).model_copy(update={"error_sentences": [ERROR_SENTENCE]})
        for label in labels
        for note, said in ((accused, Label.HARMFUL), (cleared, Label.SAFE))
    ]
    assert role_metrics(games)[P + name] == 1
