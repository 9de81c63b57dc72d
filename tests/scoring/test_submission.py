"""Submission files: written so that everyone reads the same in them, read to the end whatever they hold."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from note_files import OFFICIAL, medec_file
from scoring.builders import gold, guesses, note, validation

from medserl_agentloop.scoring.metrics import score
from medserl_agentloop.scoring.notes import Prediction, Submission, read_submission, write_submission

IDS = [f"ms-test-{n}" for n in range(4)]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.text(' "\\.nr\n\r', max_size=8)


def read(tmp_path: Path, content: str | bytes) -> Submission:
    path = tmp_path / "submission.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_submission(path, IDS)


@given(corrections=st.lists(TEXT, min_size=4, max_size=4))
def test_whatever_is_written_is_read_again(tmp_path_factory: pytest.TempPathFactory, corrections: list[str]) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.txt"
    written = [Prediction(i, True, n, text) for n, (i, text) in enumerate(zip(IDS, corrections, strict=True))]
    write_submission(path, written)
    found = read_submission(path, IDS)
    assert found.problems == ()
    assert path.read_bytes().count(b"\n") == len(IDS)
    for before, after in zip(written, found.predictions.values(), strict=True):
        if before.scored_correction is None:
            assert after == Prediction(before.text_id, True, before.sentence_id)
        else:
            assert after == before


def test_a_submission_has_the_official_lines(tmp_path: Path) -> None:
    path = tmp_path / "s.txt"
    write_submission(
        path,
        [
            Prediction("ms-test-0", True, 4, 'He said "no".'),
            Prediction("ms-test-1", False, -1, "ignored"),
            Prediction("ms-test-2", parsed=False),
            Prediction("ms-test-3", True, 0, "C:\\1\nnext"),
        ],
    )
    assert path.read_text() == ('ms-test-0 1 4 "He said "no"."\nms-test-1 0 -1 NA\nms-test-3 1 0 "C:\\\\1\\nnext"\n')


def test_an_unreadable_answer_counts_like_a_missing_line(tmp_path: Path) -> None:
    notes = [note(n, n % 2 == 0, "A correction.") for n in range(4)]
    predictions = [*gold(notes)[:3], Prediction("ms-test-3", parsed=False)]
    write_submission(tmp_path / "s.txt", predictions)
    found = read_submission(tmp_path / "s.txt", IDS)
    assert list(found.problems) == ["ms-test-3 has no line; counts as wrong"]
    before, after = score(notes, predictions), score(notes, found.predictions.values())
    assert before.measures == after.measures
    assert (before.unreadable, before.missing) == (1, 0) and (after.unreadable, after.missing) == (0, 1)


@pytest.mark.parametrize(
    ("lines", "prediction", "problem"),
    [
        ('ms-test-0 1 2 "A"', Prediction("ms-test-0", True, 2, "A"), None),
        ("ms-test-0 1 2 A  b", Prediction("ms-test-0", True, 2, "A  b"), None),
        ('  ms-test-0\t1.0  02   "A"\r', Prediction("ms-test-0", True, 2, "A"), None),
        ("ms-test-0 0 -1 NA", Prediction("ms-test-0"), None),
        ('ms-test-0 1 2 "NA"', Prediction("ms-test-0", True, 2), None),
        ('ms-test-0 1 2 ""', Prediction("ms-test-0", True, 2), None),
        ('ms-test-0 1 2 "."', Prediction("ms-test-0", True, 2, "."), None),
        ('ms-test-0 1 2 "\\d \\\\d"', Prediction("ms-test-0", True, 2, "\\d \\d"), None),
        ('ms-test-0 0 3 "A"', Prediction("ms-test-0", False, 3, "A"), "line 1: flag 0 with sentence 3"),
        ("ms-test-0 1 -1 NA", Prediction("ms-test-0", True, -1), "line 1: flag 1 with sentence -1"),
        ("ms-test-0 1 2", Prediction("ms-test-0", True, 2), "line 1: no correction and no NA"),
        ('ms-test-0 1 2 "A', Prediction("ms-test-0", True, 2, "A"), "line 1: the quote is not closed"),
        ("ms-test-0 yes 2 A", Prediction("ms-test-0", parsed=False), "followed by 'yes' '2', not by flag and"),
        ("ms-test-0 1 two A", Prediction("ms-test-0", parsed=False), "followed by '1' 'two'"),
        ("ms-test-0 1", Prediction("ms-test-0", parsed=False), "followed by '1', not"),
        ("ms-test-0", Prediction("ms-test-0", parsed=False), "followed by nothing"),
        (
            "ms-test-0 0 -1 NA\n\nms-test-0 1 1 B",
            Prediction("ms-test-0", True, 1, "B"),
            "line 3: ms-test-0 was in line 1 already; this line counts",
        ),
        (
            'ms-test-0 1 2 "A\n\nb" ',
            Prediction("ms-test-0", True, 2, "A\n\nb"),
            "line 2: goes on with the correction of line 1",
        ),
        (
            'ms-test-0 1 2 "A\nmade-up-9 1 1 "B"',
            Prediction("ms-test-0", True, 2, 'A\nmade-up-9 1 1 "B'),
            "line 2: goes on",
        ),
        ('ms-test-0 1 2 "A"\nmade-up-9 1 1 "B"', Prediction("ms-test-0", True, 2, "A"), "line 2: 'made-up-9' is not"),
        ("ms-test-0 1 2 A\n\x1b[31mred", Prediction("ms-test-0", True, 2, "A"), "line 2: '\\x1b[31mred' is not"),
    ],
)
def test_a_line_is_read_by_rule(tmp_path: Path, lines: str, prediction: Prediction, problem: str | None) -> None:
    found = read(tmp_path, lines)
    assert found.predictions == {"ms-test-0": prediction}
    own = [p for p in found.problems if not p.endswith("has no line; counts as wrong")]
    assert problem in own[0] if problem else own == []


def test_an_open_quote_ends_where_the_next_note_begins(tmp_path: Path) -> None:
    found = read(tmp_path, 'ms-test-0 1 2 "A\nb\nms-test-1 0 -1 NA\nms-test-2 1 0 "C\n')
    assert found.predictions == {
        "ms-test-0": Prediction("ms-test-0", True, 2, "A\nb"),
        "ms-test-1": Prediction("ms-test-1"),
        "ms-test-2": Prediction("ms-test-2", True, 0, "C"),
    }


@pytest.mark.parametrize(
    ("encoding", "problem"),
    [
        ("utf-8-sig", None),
        ("cp1252", "line 2: not UTF-8; read as Windows-1252"),
        ("utf-16", "line 1: the file is UTF-16"),
    ],
)
def test_other_encodings_are_read_and_reported(tmp_path: Path, encoding: str, problem: str | None) -> None:
    found = read(tmp_path, 'ms-test-0 1 0 "A"\r\nms-test-1 1 0 "5 µg"'.encode(encoding))
    assert found.predictions["ms-test-0"].correction == "A"
    assert found.predictions["ms-test-1"].correction == "5 µg"
    reported = [p for p in found.problems if p.startswith("line ")]
    assert problem in reported[0] if problem else reported == []


@given(st.binary(max_size=200), st.lists(st.sampled_from(["ms-test-1", "1", "-1", '"', "NA", "\n", " ", "\\"])))
def test_no_file_stops_the_reader(tmp_path_factory: pytest.TempPathFactory, noise: bytes, parts: list[str]) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.txt"
    path.write_bytes(b"ms-test-0 1 2 A\n" + "".join(parts).encode() + noise)
    assert read_submission(path, IDS).predictions.keys() <= set(IDS)


def test_a_file_about_other_notes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none of its lines begins with the id of a note"):
        read(tmp_path, "other-1 1 2 A\n")
    with pytest.raises(ValueError, match="cannot be read"):
        read_submission(tmp_path / "nothing.txt", IDS)


def test_order_repetition_and_noise_of_a_real_submission_change_nothing(tmp_path: Path) -> None:
    notes = validation(medec_file(OFFICIAL)).notes
    ids = [of.text_id for of in notes]
    write_submission(tmp_path / "s.txt", guesses(notes, 0))
    lines = (tmp_path / "s.txt").read_text().splitlines()
    clean = read_submission(tmp_path / "s.txt", ids)
    random.Random(0).shuffle(lines)
    lines = ["not a line", *lines[:50], *lines, ""]
    (tmp_path / "s.txt").write_text("\r\n".join(lines))
    noisy = read_submission(tmp_path / "s.txt", ids)
    assert clean.problems == () and len(noisy.problems) == 51
    assert score(notes, clean.predictions.values()) == score(notes, noisy.predictions.values())
