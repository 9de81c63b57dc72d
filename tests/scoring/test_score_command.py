"""``medserl score`` from its files to its tables and its JSON, and what every score stands
beside."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from invoking import invoke
from note_files import OFFICIAL, PAIRS, SAMPLE, medec_file
from scoring.builders import gold, guesses, note, validation, write_reference

from medserl_agentloop.evaluation.score import read_training
from medserl_agentloop.scoring.floors import floors, floors_above
from medserl_agentloop.scoring.metrics import score
from medserl_agentloop.scoring.notes import Prediction, ReferenceNote, write_submission

NOTES = [note(n, n % 2 == 0, f"A right sentence {n}." if n % 2 == 0 else None) for n in range(30)]


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    return write_reference(tmp_path / "notes.csv", NOTES, blank=5)


@pytest.fixture
def submissions(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"guess{seed}.txt" for seed in range(3)]
    for seed, path in enumerate(paths):
        write_submission(path, guesses(NOTES, seed))
    return paths


def results(path: Path) -> Any:
    return json.loads(
        path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON")
    )


def test_a_submission_is_scored_beside_floors(
    reference: Path, submissions: list[Path], tmp_path: Path
) -> None:
    output = tmp_path / "results.json"
    found = invoke(
        "score", submissions[0], "--reference", reference, "--train", SAMPLE, "--output", output
    )
    assert found.exit_code == 0, found.output
    for part in (
        "30 notes, 15 with an error; 5 blank",
        "not computed: ask for it with",
        "floor: bag of words",
    ):
        assert part in " ".join(found.output.split())
    assert (
        "quoted: GPT-4.1, zero-shot [3]" in found.output and "[3] arXiv 2511.19858" in found.output
    )
    (system,) = results(output)["systems"].values()
    measure = system["measures"]["flag_accuracy"]
    assert f"{measure['value']:.3f} [{measure['low']:.3f}, {measure['high']:.3f}]" in found.output
    assert system["measures"]["bleurt"]["value"] is None
    floors = {floor["name"]: floor["scores"] for floor in results(output)["floors"]}
    assert len(floors) == 5 and all(floors.values())
    below = system["below_floors"]["sentence_accuracy"]
    assert below and ", sentence accuracy: below always no error;" in " ".join(found.output.split())


def test_alarms_are_counted_as_a_reader_would_meet_them(tmp_path: Path) -> None:
    """10 of 15 errors are found, and 3 of 15 correct notes are called wrong."""
    predictions = [
        Prediction(n.text_id, flag=number < 20 if n.flag else number < 6)
        for number, n in enumerate(NOTES)
    ]
    found = score(NOTES, predictions).screening
    assert found["false_alarms_per_100_correct_notes"].value == pytest.approx(20.0)
    for percent, expected in ((1, 1 / 30.7), (5, 1 / 6.7), (10, 1 / 3.7)):  # r : (1 - r) * 0.3
        estimate = found[f"precision_at_a_prevalence_of_{percent}_percent"]
        assert estimate.value == pytest.approx(expected)
        assert estimate.low is not None and estimate.high is not None
        assert estimate.low < expected < estimate.high
    silent = score(NOTES, [Prediction(n.text_id) for n in NOTES]).screening
    precision = silent["precision_at_a_prevalence_of_1_percent"]
    assert (precision.value, precision.why) == (None, "no note is said to have an error")
    write_reference(tmp_path / "notes.csv", NOTES)
    write_submission(tmp_path / "s.txt", predictions)
    output = invoke("score", tmp_path / "s.txt", "--reference", tmp_path / "notes.csv").output
    assert "false alarms per 100 correct notes" in output and " 20.0 [" in output
    assert "precision at a prevalence of 10 %" in output


def test_files_in_a_folder_are_seeds_of_one_system(
    reference: Path, submissions: list[Path], tmp_path: Path
) -> None:
    ours, theirs, output = tmp_path / "ours", tmp_path / "theirs", tmp_path / "results.json"
    for folder in (ours, theirs):
        folder.mkdir()
    for path in submissions:
        path.rename(ours / path.name)
    write_submission(theirs / "submission.txt", gold(NOTES))
    found = invoke("score", ours, theirs, "--reference", reference, "--output", output)
    assert found.exit_code == 0 and " sd 0." in found.output, found.output
    pooled = results(output)["systems"][str(ours)]
    assert pooled["seeds"] == 3 and pooled["measures"]["f1"]["spread"] > 0
    (comparison,) = results(output)["comparisons"]
    assert comparison["differences"]["flag_accuracy"]["high"] < 0
    one = invoke(
        "score",
        theirs / "submission.txt",
        ours / "guess0.txt",
        "--reference",
        reference,
        "--output",
        output,
    )
    assert one.exit_code == 0 and "bootstrap p" in one.output
    (comparison,) = results(output)["comparisons"]
    assert (comparison["first"], comparison["second"]) == (
        f"{theirs}/submission.txt",
        f"{ours}/guess0.txt",
    )
    assert comparison["differences"]["flag_accuracy"]["low"] > 0


def test_problems_are_reported_line_by_line(reference: Path, tmp_path: Path) -> None:
    path, output = tmp_path / "s[b].txt", tmp_path / "results.json"
    write_submission(path, gold(NOTES[:5]))
    with path.open("a") as file:
        file.write("nonsense\n")
    found = invoke("score", path, "--reference", reference, "--output", output)
    assert found.exit_code == 0, found.output
    assert f"{path}: line 6: is not 'text-id flag sentence-id correction'" in found.stderr
    assert "6 more problems; --output holds all of them" in found.stderr
    assert len(results(output)["files"][str(path)]["problems"]) == 26
    assert results(output)["systems"][str(path)]["missing"] == 25


def test_published_results_stand_beside_notes_of_medec_alone(
    submissions: list[Path], tmp_path: Path
) -> None:
    """By the ids of the notes, whatever the file is called."""
    toy = [replace(note, text_id=note.text_id.replace("ms-", "toy-")) for note in NOTES]
    path, output = tmp_path / "MEDEC-MS-TestSet.csv", tmp_path / "results.json"
    submissions[0].write_text(submissions[0].read_text().replace("ms-", "toy-"))
    found = invoke(
        "score", submissions[0], "--reference", write_reference(path, toy), "--output", output
    )
    assert found.exit_code == 0 and "floor: always no error" in found.output, found.output
    assert "quoted" not in found.output and results(output)["published"] == []


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["missing.txt"], "missing.txt: No such file"),
        (["{folder}"], "the folder holds no .txt files"),
        (["{submission}", "{submission}"], "is given twice"),
        (["{reference}"], "no line is read as one on a note of the reference"),
        (
            ["{submission}", "--reference", "{submission}"],
            "files that end in '.txt' are not known",
        ),
        (
            ["{submission}", "--train", "{reference}"],
            "every note of the training file is in the reference too",
        ),
        (["{submission}", "--output", "{folder}"], "Is a directory"),
    ],
)
def test_score_names_each_problem_in_one_sentence(
    reference: Path, submissions: list[Path], tmp_path: Path, arguments: list[str], part: str
) -> None:
    (tmp_path / "empty").mkdir()
    names = {"folder": tmp_path / "empty", "submission": submissions[0], "reference": reference}
    found = invoke("score", *(a.format(**names) for a in arguments), "--reference", reference)
    assert found.exit_code == 2, found.output
    assert (
        found.stderr.startswith("medserl: ")
        and found.stderr.count("\n") == 1
        and part in found.stderr
    )


# --- the floors and the published results ---


def values(
    notes: list[ReferenceNote], training: Sequence[ReferenceNote] = ()
) -> dict[str, dict[str, float | None]]:
    computed, _ = floors(notes, training)
    return {
        name: {measure: m.value for measure, m in floor.measures.items()}
        for name, floor in computed.items()
    }


def test_constant_answers_are_floors() -> None:
    notes = [note(n, n < 6, f"Sentence {n % 3} of note {n}.", sentences=3) for n in range(10)]
    found = values(notes)
    assert (
        found["always no error"]["flag_accuracy"]
        == found["always no error"]["sentence_accuracy"]
        == 0.4
    )
    assert found["always no error"]["f1"] == 0.0
    assert found["always error (first sentence)"]["flag_accuracy"] == 0.6
    assert found["always error (first sentence)"]["sentence_accuracy"] == 0.2
    assert found["last sentence is wrong"]["recall"] == 1.0
    assert found["last sentence is wrong"]["sentence_accuracy"] == 0.2
    # The sentence is copied, and for the two notes whose last sentence was wrong the copy is the
    # reference.
    assert found["last sentence is wrong"]["rouge_1"] == pytest.approx((2 + 4 * 0.8) / 6, abs=0.03)


def test_floors_say_why_a_classifier_is_not_computed() -> None:
    notes = [note(0, True), note(1, False)]
    _, absent = floors(notes)
    assert absent == dict.fromkeys(
        ("bag of words", "white space and length"), "--train names no training set"
    )
    _, absent = floors(notes, [note(2, True), note(3, True)])  # one kind of note
    assert "class" in absent["bag of words"]


@pytest.mark.parametrize(
    ("texts", "training", "accuracy"),
    [
        (
            ("warfarin", "aspirin"),
            ("took warfarin", "took aspirins aspirin"),
            {"bag of words": 1.0},
        ),
        (
            ("same words ", "same words"),
            ("other words ", "other words"),
            {"white space and length": 1.0},
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
    pair = {
        "note_id": "ms-train-8",
        "incorrect_note": "He took warfarin. ",
        "correct_note": "He took aspirin.\n",
    }
    pairs.write_text(json.dumps(pair) + "\n")
    notes, left_out = read_training([csv_file, pairs], reference)
    expected = [
        (note(2, False).text, False),
        ("He took warfarin. ", True),
        ("He took aspirin.\n", False),
    ]
    assert [(one.text, one.flag) for one in notes] == expected and left_out == 1
    game = tmp_path / "game.jsonl"
    game.write_text(
        json.dumps({"prompt": "A note.", "completion": "", "data_type": "vanilla_harmful"}) + "\n"
    )
    with pytest.raises(ValueError, match="holds no pairs"):
        read_training([game], reference)


def test_a_system_below_a_floor_is_marked() -> None:
    notes = [note(n, n < 6, "A correction." if n < 6 else None) for n in range(10)]
    computed, _ = floors(notes)
    assert not any(floors_above(score(notes, gold(notes), resamples=0), computed).values())
    silent = score(notes, [Prediction(n.text_id) for n in notes], resamples=0)
    above = floors_above(silent, computed)
    assert above["flag_accuracy"] == ("always error (first sentence)", "last sentence is wrong")
    assert "always no error" not in above["sentence_accuracy"]


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
