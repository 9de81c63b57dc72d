"""``medserl score``: files, tables and JSON, with floors and published results."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from invoking import invoke
from note_files import OFFICIAL, PAIRS, medec_file
from scoring.builders import gold, guesses, note, validation, write_reference

from experiments.shortcuts.medec import classified, training_notes
from medserl_agentloop.scoring.metrics import floors, score
from medserl_agentloop.scoring.notes import Prediction, write_submission

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
    found = invoke("score", submissions[0], "--reference", reference, "--output", output)
    assert found.exit_code == 0, found.output
    printed = " ".join(found.output.split())
    assert "30 notes, 15 with an error; 5 blank" in printed
    assert "false alarms per 100 correct notes" in printed and "floor: always" in printed
    assert "quoted: GPT-4.1, zero-shot [3]" in printed and "[3] arXiv 2511.19858" in printed
    (system,) = results(output)["systems"].values()
    measure = system["measures"]["flag_accuracy"]
    assert f"{measure['value']:.3f} [{measure['low']:.3f}, {measure['high']:.3f}]" in found.output
    assert system["measures"]["bleurt"]["value"] is None and len(results(output)["floors"]) == 3
    below = system["below_floors"]["sentence_accuracy"]
    assert below and ", sentence accuracy: below always no error;" in printed


def test_alarms_are_counted_as_a_reader_would_meet_them() -> None:
    """10 of 15 errors are found, and 3 of 15 correct notes are called wrong."""
    flags = [at < 20 if n.flag else at < 6 for at, n in enumerate(NOTES)]
    said = [Prediction(n.text_id, flag) for n, flag in zip(NOTES, flags, strict=True)]
    found = score(NOTES, said).screening
    assert found["false_alarms_per_100_correct_notes"].value == pytest.approx(20.0)
    for percent, expected in ((1, 1 / 30.7), (5, 1 / 6.7), (10, 1 / 3.7)):  # r : (1 - r) * 0.3
        estimate = found[f"precision_at_a_prevalence_of_{percent}_percent"]
        assert estimate.value == pytest.approx(expected)
        assert estimate.low is not None and estimate.high is not None
        assert estimate.low < expected < estimate.high
    silent = score(NOTES, [Prediction(n.text_id) for n in NOTES]).screening
    precision = silent["precision_at_a_prevalence_of_1_percent"]
    assert (precision.value, precision.why) == (None, "no note is said to have an error")


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
    files = (theirs / "submission.txt", ours / "guess0.txt")
    one = invoke("score", *files, "--reference", reference, "--output", output)
    assert one.exit_code == 0 and "bootstrap p" in one.output
    (comparison,) = results(output)["comparisons"]
    assert (comparison["first"], comparison["second"]) == tuple(map(str, files))
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
    notes = write_reference(path, toy)
    found = invoke("score", submissions[0], "--reference", notes, "--output", output)
    assert found.exit_code == 0 and "floor: always no error" in found.output, found.output
    assert "quoted" not in found.output and results(output)["published"] == []


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["missing.txt"], "missing.txt: No such file"),
        (["{folder}"], "the folder holds no .txt files"),
        (["{reference}"], "no line is an answer about a note of the reference"),
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
    assert found.stderr.startswith("medserl: ") and part in found.stderr
    assert found.stderr.count("\n") == 1


# --- floors ---


def test_constant_answers_are_floors() -> None:
    notes = [note(n, n < 6, f"Sentence {n % 3} of note {n}.", sentences=3) for n in range(10)]
    found = {
        name: {measure: m.value for measure, m in floor.measures.items()}
        for name, floor in floors(notes).items()
    }
    silent, first, last = found.values()
    assert silent["flag_accuracy"] == silent["sentence_accuracy"] == 0.4 and silent["f1"] == 0.0
    assert (first["flag_accuracy"], first["sentence_accuracy"]) == (0.6, 0.2)
    assert (last["recall"], last["sentence_accuracy"]) == (1.0, 0.2)
    # The sentence is copied, and for two notes whose last sentence was wrong that is the reference.
    assert last["rouge_1"] == pytest.approx((2 + 4 * 0.8) / 6, abs=0.03)


def test_floors_of_the_validation_set() -> None:
    notes = validation(medec_file(OFFICIAL)).notes
    _, first, last = floors(notes).values()
    assert first.measures["flag_accuracy"].value == pytest.approx(319 / 574)
    assert last.measures["sentence_accuracy"].value == pytest.approx(197 / 574)
    training = training_notes(medec_file(PAIRS), notes)
    assert len(training) == 2438
    words, layout = (
        score(notes, answers, resamples=0).measures["flag_accuracy"].value or 0.0
        for answers in classified(notes, training).values()
    )
    # Words of a note say nothing about its error; its white space says a little.
    assert abs(words - 0.5) < 0.05 and layout > 0.55
