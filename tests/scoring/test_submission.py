"""Submission files: everyone reads the same in them; ``--official-bugs`` prints what the published script does."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from note_files import OFFICIAL, medec_file
from scoring.builders import gold, guesses, note, validation, write_reference

from medserl_agentloop.evaluation.score import read_reference
from medserl_agentloop.scoring.metrics import score
from medserl_agentloop.scoring.notes import Prediction, majority, read_submission, write_submission
from medserl_agentloop.scoring.official import official_scores

IDS = [f"ms-test-{n}" for n in range(4)]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.text(' "\\.nr\n\r', max_size=8)


@given(corrections=st.lists(TEXT, min_size=4, max_size=4))
def test_whatever_is_written_is_read_again(tmp_path_factory: pytest.TempPathFactory, corrections: list[str]) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.txt"
    written = [Prediction(i, True, n, text) for n, (i, text) in enumerate(zip(IDS, corrections, strict=True))]
    write_submission(path, written)
    again, problems = read_submission(path, IDS)
    assert problems == [] and path.read_bytes().count(b"\n") == len(IDS)
    for before, after in zip(written, again.values(), strict=True):
        assert (after.flag, after.sentence_id) == (True, before.sentence_id)
        assert after.scored_correction == before.scored_correction


def test_a_submission_has_the_official_lines_and_none_for_an_unreadable_answer(tmp_path: Path) -> None:
    notes = [note(n, n % 2 == 0, "A correction.") for n in range(4)]
    predictions = [
        Prediction("ms-test-0", True, 4, 'He said "no".'),
        Prediction("ms-test-1", False, -1, "ignored"),
        Prediction("ms-test-2", parsed=False),
        Prediction("ms-test-3", True, 0, "C:\\1\nnext"),
    ]
    path = tmp_path / "s.txt"
    write_submission(path, predictions)
    assert path.read_text() == 'ms-test-0 1 4 "He said "no"."\nms-test-1 0 -1 NA\nms-test-3 1 0 "C:\\\\1\\nnext"\n'
    again, problems = read_submission(path, IDS)
    assert problems == ["ms-test-2 has no line; counts as wrong"]
    before, after = score(notes, predictions), score(notes, again.values())
    assert before.measures == after.measures
    assert (before.unreadable, before.missing) == (1, 0) and (after.unreadable, after.missing) == (0, 1)


LAST = "ms-test-0 1 9 Z\n"  # a line behind which nothing is wrong


@pytest.mark.parametrize(
    ("lines", "prediction", "problem"),
    [
        ('ms-test-0 1 2 "A"', Prediction("ms-test-0", True, 2, "A"), None),
        ('  ms-test-0\t1 02 A  b\r\n"', Prediction("ms-test-0", True, 2, "A  b"), "line 2: is not 'text-id"),
        ("\ufeffms-test-0 0 -1 NA", Prediction("ms-test-0", False, -1, "NA"), None),
        ('ms-test-0 1 2 "\\d \\\\d"', Prediction("ms-test-0", True, 2, "\\d \\d"), None),
        ('ms-test-0 0 3 "A', Prediction("ms-test-0", False, 3, "A"), None),
        ("ms-test-0 2 2 A", Prediction("ms-test-0", False, 2, "A", parsed=False), None),
        ("ms-test-0 0 -1 NA\n\nms-test-0 1 1 B", Prediction("ms-test-0", True, 1, "B"), "line 3: ms-test-0 was"),
        ("ms-test-0 1 2 A\nmade-up-9 1 1 B", Prediction("ms-test-0", True, 2, "A"), "line 2: 'made-up-9' is not"),
        ("ms-test-0 1 2 A\n\x1b[3 1 1 B", Prediction("ms-test-0", True, 2, "A"), "line 2: '\\x1b[3' is not the id"),
        *((LAST + line, Prediction("ms-test-0", True, 9, "Z"), "line 2: is not 'text-id flag sentence-id correction'")
          for line in ("ms-test-0", "ms-test-0 1 2", "ms-test-0 1.0 2 A", "ms-test-0 yes 2 A", "ms-test-0  1 2 A")),
    ],
)  # fmt: skip
def test_a_line_is_read_as_published(tmp_path: Path, lines: str, prediction: Prediction, problem: str | None) -> None:
    (tmp_path / "s.txt").write_bytes(lines.encode())
    predictions, problems = read_submission(tmp_path / "s.txt", IDS)
    assert predictions == {"ms-test-0": prediction}
    of_lines = [text for text in problems if not text.endswith("has no line; counts as wrong")]
    assert problem in of_lines[0] if problem else of_lines == []


@given(st.text(st.sampled_from('ms-test-01 "NA\n\\\r\t\x00é'), max_size=60))
def test_no_text_stops_the_reader(tmp_path_factory: pytest.TempPathFactory, noise: str) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.txt"
    path.write_text("ms-test-0 1 2 A\n" + noise)
    assert read_submission(path, IDS)[0].keys() <= set(IDS)


def test_a_byte_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "s.txt").write_bytes(b"ms-test-0 1 2 5 \xb5g\n")
    with pytest.raises(ValueError, match="byte 16 is not UTF-8"):
        read_submission(tmp_path / "s.txt", IDS)


WRONG, RIGHT, UNREAD = Prediction("toy-1", True, 1, "Giardia."), Prediction("toy-1"), Prediction("toy-1", parsed=False)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([WRONG], WRONG),
        ([RIGHT], RIGHT),
        ([UNREAD], UNREAD),
        ([RIGHT, WRONG, WRONG], WRONG),
        ([WRONG, RIGHT], WRONG),  # a tie: the first
        ([RIGHT, WRONG], RIGHT),
        ([UNREAD, UNREAD, WRONG], WRONG),  # no vote
        ([Prediction("toy-1", True), Prediction("toy-1", True), WRONG], WRONG),  # names no sentence
        ([Prediction("toy-1", True, 3, "x"), WRONG, WRONG], WRONG),
        ([Prediction("toy-1", True, 1), WRONG], WRONG),  # the first correction that is given
        ([Prediction("toy-1", True)], Prediction("toy-1", True, -1)),
    ],
)
def test_the_majority_of_the_readable_answers_counts(answers: list[Prediction], expected: Prediction) -> None:
    assert majority(answers) == expected


# --- --official-bugs: what the published script prints, digit for digit, and how it stops ---


def scores(*arguments: Any) -> dict[str, float | None]:
    found = official_scores(*arguments)
    assert not isinstance(found, str), found
    return found


@pytest.mark.parametrize(
    ("blank", "flags", "sentences", "composites"),
    [
        (0, 0.575, 0.275, {"R1FC": 0.2169755230946072, "R2FC": 0.15227272692561983, "RLFC": 0.21312936924845335}),
        (7, 0.0, 0.0, {"R1FC": 0.21168343716547044, "R2FC": 0.14855875797621448, "RLFC": 0.2079310919497106}),
    ],
)
def test_the_numbers_are_the_published_scripts(
    tmp_path: Path, blank: int, flags: float, sentences: float, composites: dict[str, float]
) -> None:
    """The numbers are those of a second writing of the script, which agreed on eight such submissions."""
    notes = [note(n, n % 3 > 0, f"Sentence {n % 3} of a right note, {n % 5} mg." if n % 3 else None) for n in range(40)]
    path = tmp_path / "s.txt"
    write_submission(path, guesses(notes, 0))
    with path.open("a") as file:
        file.write('\nms-test-0 0 -1\nms-test-1 1 0 ""quoted""\nmade-up-1 1 1 A\nms-test-2  1 1 "two blanks"\n')
        file.write('ms-test-4 1 1 "A\\\\B\\nC \\t"\nMS-test-5 1 1 A\nms-test-7 1 2 tail" "\n')
    of_pairs = {"R1F": 0.20439005132134935, "R2F": 0.06060605983471074, "RLF": 0.19584304277434078}
    assert official_scores(write_reference(tmp_path / "notes.csv", notes, blank), path) == {
        "Error Flags Accuracy": flags,
        "Error Sentence Detection Accuracy": sentences,
        **{f"{name}_subset_check": value for name, value in of_pairs.items()},
        **composites,
    }


@pytest.mark.parametrize("blank", [0, 328])
def test_a_perfect_submission_gets_0_where_records_are_blank(tmp_path: Path, blank: int) -> None:
    real = medec_file(OFFICIAL)
    notes = validation(real).notes
    assert len(notes) == 574 and sum(n.flag for n in notes) == 319
    reference = tmp_path / "notes.csv"
    reference.write_bytes(real.read_bytes().rstrip() + b"\r\n" + b",,,,,,,,\r\n" * blank)
    write_submission(tmp_path / "s.txt", gold(notes))
    found = scores(reference, tmp_path / "s.txt")
    assert found["Error Flags Accuracy"] == found["Error Sentence Detection Accuracy"] == (0.0 if blank else 1.0)
    ours = read_reference([reference])
    assert ours.dropped_empty == blank and ours.notes == notes
    predictions, _ = read_submission(tmp_path / "s.txt", [n.text_id for n in ours.notes])
    measures = score(ours.notes, predictions.values()).measures
    for name in ("flag_accuracy", "sentence_accuracy", "precision", "recall", "f1", "readable"):
        assert measures[name].value == measures[name].high == 1.0
    assert measures["false_positive_rate"].value == 0.0
    assert (measures["rouge_1"].value or 0) >= 0.996 and (measures["rouge_1_composite"].value or 0) >= 0.997


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('ms-test-1 1 1 "see \\1"', "invalid group reference"),
        ('ms-test-1 1 1 "a \\d"', "bad escape"),
        ('ms-test-1 1 1 "."', "Hypothesis is empty"),
        ('ms-test-1 1 1 "5 \xb5g"', "UnicodeDecodeError"),
    ],
)
def test_where_the_published_script_stops_it_is_said_how(tmp_path: Path, line: str, reason: str) -> None:
    reference = write_reference(tmp_path / "notes.csv", [note(1, True, "A correction.")])
    path = tmp_path / "s.txt"
    path.write_bytes(line.encode("cp1252"))
    found = official_scores(reference, path)
    assert isinstance(found, str) and re.match(f"the published script stops on s.txt with .*{reason}", found)


def test_what_is_written_is_read_by_the_published_script_as_it_was_meant(tmp_path: Path) -> None:
    """It stops on a raw backslash; its mistake decodes the backslashes that ``write_submission`` doubles."""
    texts = ["give \\1 and \\d", "two\nlines", "C:\\new\\table", 'he said "no" to it']
    notes = [note(n, True, text) for n, text in enumerate(texts)]
    write_submission(tmp_path / "s.txt", gold(notes))
    reference = write_reference(tmp_path / "notes.csv", notes)
    assert scores(reference, tmp_path / "s.txt")["R1F_subset_check"] == pytest.approx(1.0)


def test_bertscore_and_bleurt_join_the_aggregate(tmp_path: Path) -> None:
    notes = [note(n, n < 3, "A correction." if n < 3 else None) for n in range(4)]
    write_submission(tmp_path / "s.txt", gold(notes))
    scorers = {"bertscore": lambda p, _: [0.5] * len(p), "bleurt": lambda p, _: [0.25] * len(p)}
    found = scores(write_reference(tmp_path / "notes.csv", notes), tmp_path / "s.txt", scorers)
    assert found["BERTC"] == (0.5 * 3 + 1) / 4 and found["BLEURT_subset_check"] == 0.25
    assert found["aggregate_subset_check"] == pytest.approx(1.75 / 3, abs=1e-6)
    assert found["AggregateC"] == pytest.approx((1.75 + 1) / 4, abs=1e-6)
