"""Submission files: written so that everyone reads the same in them, read as the published script reads them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scoring.builders import note

from medserl_agentloop.scoring.metrics import score
from medserl_agentloop.scoring.notes import Prediction, majority, read_submission, write_submission

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
def test_a_line_is_read_as_the_published_script_reads_it(
    tmp_path: Path, lines: str, prediction: Prediction, problem: str | None
) -> None:
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


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"other-1 1 2 A\n", "none of its lines begins with the id of a note"),
        (b"ms-test-0 1 2 5 \xb5g\n", "byte 16 is not UTF-8"),
    ],
)
def test_a_file_that_is_no_submission_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "s.txt").write_bytes(content)
    with pytest.raises(ValueError, match=says):
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
