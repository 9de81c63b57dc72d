"""The floors and the published results that every score stands beside."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from note_files import OFFICIAL, PAIRS, medec_file
from scoring.builders import gold, note, validation, write_reference

from medserl_agentloop.evaluation.score import PUBLISHED, read_training
from medserl_agentloop.scoring.metrics import COMPARED, floors, floors_above, score
from medserl_agentloop.scoring.notes import Prediction, ReferenceNote


def values(notes: list[ReferenceNote], training: Sequence[ReferenceNote] = ()) -> dict[str, dict[str, float | None]]:
    return {
        name: {} if isinstance(floor, str) else {measure: m.value for measure, m in floor.measures.items()}
        for name, floor in floors(notes, training).items()
    }


def test_constant_answers_are_floors() -> None:
    notes = [note(n, n < 6, f"Sentence {n % 3} of note {n}.", sentences=3) for n in range(10)]
    found = values(notes)
    assert found["always no error"]["flag_accuracy"] == found["always no error"]["sentence_accuracy"] == 0.4
    assert found["always no error"]["f1"] == 0.0
    assert found["always error (first sentence)"]["flag_accuracy"] == 0.6
    assert found["always error (first sentence)"]["sentence_accuracy"] == 0.2
    assert found["last sentence is wrong"]["recall"] == 1.0
    assert found["last sentence is wrong"]["sentence_accuracy"] == 0.2
    # The sentence is copied, and for the two notes whose last sentence was wrong the copy is the reference.
    assert found["last sentence is wrong"]["rouge_1"] == pytest.approx((2 + 4 * 0.8) / 6, abs=0.03)


def test_what_keeps_a_classifier_from_being_computed_is_said() -> None:
    notes = [note(0, True), note(1, False)]
    absent = {name: floor for name, floor in floors(notes).items() if isinstance(floor, str)}
    assert absent == dict.fromkeys(("bag of words", "white space and length"), "--train names no training set")
    assert "class" in str(floors(notes, [note(2, True), note(3, True)])["bag of words"])  # one kind of note


@pytest.mark.parametrize(
    ("texts", "training", "accuracy"),
    [
        (("warfarin", "aspirin"), ("took warfarin", "took aspirins aspirin"), {"bag of words": 1.0}),
        (
            ("same words ", "same words"),
            ("other words ", "other words"),
            {"white space and length": 1.0, "bag of words": 0.5},
        ),
    ],
)
def test_each_classifier_sees_what_it_is_meant_to_see(
    texts: tuple[str, str], training: tuple[str, str], accuracy: dict[str, float]
) -> None:
    notes = [ReferenceNote(str(n), texts[n % 2], n % 2 == 0) for n in range(8)]
    found = values(notes, [ReferenceNote("", text, n == 0) for n, text in enumerate(training)] * 20)
    assert {name: found[name]["flag_accuracy"] for name in accuracy} == accuracy


def test_training_notes_are_read_as_published_and_never_from_the_reference(tmp_path: Path) -> None:
    reference = [note(0, True), note(1, False)]
    csv_file = write_reference(tmp_path / "train.csv", [note(1, False), note(2, False)])
    pairs = tmp_path / "pairs.jsonl"
    pair = {"note_id": "ms-train-8", "incorrect_note": "He took warfarin. ", "correct_note": "He took aspirin.\n"}
    pairs.write_text(json.dumps(pair) + "\n")
    notes, left_out = read_training([csv_file, pairs], reference)
    expected = [(note(2, False).text, False), ("He took warfarin. ", True), ("He took aspirin.\n", False)]
    assert [(one.text, one.flag) for one in notes] == expected and left_out == 1
    with pytest.raises(ValueError, match="every note of the training file is in the reference too"):
        read_training([write_reference(tmp_path / "same.csv", reference)], reference)
    game = tmp_path / "game.jsonl"
    game.write_text(
        json.dumps({"prompt": "A note.", "completion": "", "data_type": "vanilla_harmful"}) + "\n", encoding="utf-8"
    )
    with pytest.raises(ValueError, match="holds no pairs"):
        read_training([game], reference)


def test_a_system_below_a_floor_is_marked() -> None:
    notes = [note(n, n < 6, "A correction." if n < 6 else None) for n in range(10)]
    computed = floors(notes)
    assert not any(floors_above(score(notes, gold(notes), resamples=0), computed).values())
    silent = score(notes, [Prediction(n.text_id) for n in notes], resamples=0)
    assert floors_above(silent, computed)["flag_accuracy"] == (
        "always error (first sentence)",
        "last sentence is wrong",
    )
    assert "always no error" not in floors_above(silent, computed)["sentence_accuracy"]


def test_published_results_name_their_source_and_what_differs() -> None:
    known = score([note(0, True, "A."), note(1, False)], [], resamples=0).measures
    for published in PUBLISHED:
        assert published["source"] and published["differs"] and published["measures"].keys() <= known.keys()
        assert all(0 < value < 1 for value in published["measures"].values())
    assert set(COMPARED) <= known.keys()


def test_floors_of_the_validation_set() -> None:
    notes = validation(medec_file(OFFICIAL)).notes
    training, _ = read_training([medec_file(PAIRS)], notes)
    assert len(training) == 2438
    found = values(list(notes), training)
    assert found["always error (first sentence)"]["flag_accuracy"] == pytest.approx(319 / 574)
    assert found["last sentence is wrong"]["sentence_accuracy"] == pytest.approx(197 / 574)
    # Words of a note say nothing about its error; its white space says a little.
    assert abs((found["bag of words"]["flag_accuracy"] or 0) - 0.5) < 0.05
    assert (found["white space and length"]["flag_accuracy"] or 0) > 0.55
