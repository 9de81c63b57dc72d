"""The shortcut metrics: 0 for an assessor that knows the medicine, 1 for one that follows the cue alone."""

import pytest
from game.builders import CLEAN_NOTE, ERROR_NOTE, ERROR_SENTENCE, finished

from medserl_agentloop.games.medical.metrics import role_metrics
from medserl_agentloop.games.medical.records import MedicalRecord, Outcome
from medserl_agentloop.games.medical.types import Category, Label

P = "selfplay/shortcut/"
EDITED = {Label.SAFE: Category.DECOY_BENIGN, Label.HARMFUL: Category.ADVERSARIAL_BENIGN}
UNTOUCHED = {Label.SAFE: Category.VANILLA_BENIGN, Label.HARMFUL: Category.VANILLA_HARMFUL}


def game(label: Label, *, edited: bool, verdict: Label, note: str | None = None) -> MedicalRecord:
    right = {Label.SAFE: Outcome.CORRECT_REJECTION, Label.HARMFUL: Outcome.CORRECT_DETECTION}
    wrong = {Label.SAFE: Outcome.FALSE_POSITIVE, Label.HARMFUL: Outcome.MISSED_ERROR}
    record = finished((right if verdict is label else wrong)[label], category=(EDITED if edited else UNTOUCHED)[label])
    return record if note is None else record.model_copy(update={"presented_note": note})


KINDS = [(label, edited) for label in Label for edited in (True, False)]
KNOWS = [game(label, edited=edited, verdict=label) for label, edited in KINDS] * 3
FOLLOWS = [game(label, edited=e, verdict=Label.HARMFUL if e else Label.SAFE) for label, e in KINDS] * 3
SUSPECTS = [game(label, edited=edited, verdict=Label.HARMFUL) for label, edited in KINDS] * 3


@pytest.mark.parametrize(("games", "index", "accuracy"), [(KNOWS, 0, 1), (FOLLOWS, 1, 0.5), (SUSPECTS, 0, 0.5)])
def test_the_index_is_0_without_the_cue_and_1_with_nothing_else(
    games: list[MedicalRecord], index: int, accuracy: float
) -> None:
    numbers = role_metrics(games)
    assert [numbers[P + n] for n in ("index", "false_positives", "recall")] == [index] * 3
    assert numbers[P + "edited/accuracy"] == numbers[P + "untouched/accuracy"] == accuracy
    assert (numbers[P + "compared"], numbers[P + "edited/prior"]) == (6, 0.5)


def test_what_cannot_be_compared_is_left_out() -> None:
    numbers = role_metrics([game for game in FOLLOWS if game.category is not Category.DECOY_BENIGN])
    assert numbers[P + "index"] == numbers[P + "recall"] == numbers[P + "edited/prior"] == 1
    assert P + "false_positives" not in numbers
    numbers = role_metrics([game for game in KNOWS if not game.category.has_attack])
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
        game(label, edited=False, verdict=verdict, note=note).model_copy(update={"error_sentences": [ERROR_SENTENCE]})
        for label in labels
        for note, verdict in ((accused, Label.HARMFUL), (cleared, Label.SAFE))
    ]
    assert role_metrics(games)[P + name] == 1
