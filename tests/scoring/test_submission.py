"""Submission files and their scores: everyone reads the same in them, and every measure has a
second formulation.
"""

import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from scoring.builders import gold, guesses, note, scored
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.metrics import accuracy_score, f1_score, precision_score, recall_score

from medserl_agentloop.scoring.metrics import compare, score, summarise, wilson_interval
from medserl_agentloop.scoring.notes import (
    Prediction,
    ReferenceNote,
    majority,
    read_submission,
    write_submission,
)
from medserl_agentloop.scoring.official import NEURAL_SCORERS, SCORERS, Grades, grade

IDS = [f"ms-test-{n}" for n in range(4)]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.text(
    ' "\\.nr\n\r', max_size=8
)


@given(corrections=st.lists(TEXT, min_size=4, max_size=4))
def test_submission_is_read_again_as_written(
    tmp_path_factory: pytest.TempPathFactory, corrections: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.txt"
    written = [
        Prediction(i, True, n, text)
        for n, (i, text) in enumerate(zip(IDS, corrections, strict=True))
    ]
    write_submission(path, written)
    again, problems = read_submission(path, IDS)
    assert problems == [] and path.read_bytes().count(b"\n") == len(IDS)
    for before, after in zip(written, again.values(), strict=True):
        assert (after.flag, after.sentence_id) == (True, before.sentence_id)
        assert after.scored_correction == before.scored_correction


def test_submission_has_official_lines_and_none_for_unreadable_answers(tmp_path: Path) -> None:
    notes = [note(n, n % 2 == 0, "A correction.") for n in range(4)]
    predictions = [
        Prediction("ms-test-0", True, 4, 'He said "no".'),
        Prediction("ms-test-1", False, -1, "ignored"),
        Prediction("ms-test-2", parsed=False),
        Prediction("ms-test-3", True, 0, "C:\\1\nnext"),
    ]
    path = tmp_path / "s.txt"
    write_submission(path, predictions)
    assert path.read_text().splitlines() == [
        'ms-test-0 1 4 "He said "no"."',
        "ms-test-1 0 -1 NA",
        'ms-test-3 1 0 "C:\\\\1\\nnext"',
    ]
    again, problems = read_submission(path, IDS)
    assert problems == ["ms-test-2 has no line; counts as wrong"]
    before, after = score(notes, predictions), score(notes, again.values())
    assert before.measures == after.measures
    assert (before.unreadable, before.missing, after.unreadable, after.missing) == (1, 0, 0, 1)


NOT_A_LINE = "line 2: is not 'text-id flag sentence-id correction'"
READ = Prediction("ms-test-0", True, 2, "A")


@pytest.mark.parametrize(
    ("lines", "prediction", "problem"),
    [
        ('ms-test-0 1 2 "A"', READ, None),
        ("\ufeffms-test-0 0 -1 NA", Prediction("ms-test-0", False, -1, "NA"), None),
        ('ms-test-0 1 2 "\\d \\\\d"', Prediction("ms-test-0", True, 2, "\\d \\d"), None),
        ('ms-test-0 0 3 "A', Prediction("ms-test-0", False, 3, "A"), None),
        ("ms-test-0 2 2 A", Prediction("ms-test-0", False, 2, "A", parsed=False), None),
        ("ms-test-0 0 -1 NA\nms-test-0 1 1 B", Prediction("ms-test-0", True, 1, "B"), "line 2: ms"),
        ("ms-test-0 1 2 A\n\x1b[3 1 1 B", READ, "'\\x1b[3' is not"),
        ("ms-test-0 1 2 A\nms-test-0 1.0 2 A", READ, NOT_A_LINE),
        ("ms-test-0 1 2 A\nms-test-0  1 2 A", READ, NOT_A_LINE),
    ],
)
def test_a_line_is_read_as_published(
    tmp_path: Path, lines: str, prediction: Prediction, problem: str | None
) -> None:
    (tmp_path / "s.txt").write_bytes(lines.encode())
    predictions, problems = read_submission(tmp_path / "s.txt", IDS)
    assert predictions == {"ms-test-0": prediction}
    of_lines = [text for text in problems if not text.endswith("has no line; counts as wrong")]
    assert problem in of_lines[0] if problem else of_lines == []


WRONG, RIGHT, UNREAD = (
    Prediction("toy-1", True, 1, "Giardia."),
    Prediction("toy-1"),
    Prediction("toy-1", parsed=False),
)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([UNREAD], UNREAD),
        ([RIGHT, WRONG, WRONG], WRONG),
        ([WRONG, RIGHT], WRONG),  # a tie: the first
        ([UNREAD, UNREAD, WRONG], WRONG),  # no vote
        ([Prediction("toy-1", True), Prediction("toy-1", True), WRONG], WRONG),  # names no sentence
        ([Prediction("toy-1", True, 3, "x"), WRONG, WRONG], WRONG),
        ([Prediction("toy-1", True, 1), WRONG], WRONG),  # the first correction that is given
    ],
)
def test_the_majority_of_the_readable_answers_counts(
    answers: list[Prediction], expected: Prediction
) -> None:
    assert majority(answers) == expected


# --- every measure, and what intervals, pools and comparisons promise ---


def by_scikit_learn(
    notes: Sequence[ReferenceNote], predictions: Sequence[Prediction]
) -> dict[str, float]:
    """The measures in scikit-learn's words; NaN where a denominator is 0."""
    given = {p.text_id: p for p in predictions if p.parsed}
    truth = [int(n.flag) for n in notes]
    answer = [int(given[n.text_id].flag) if n.text_id in given else 1 - n.flag for n in notes]
    said = [int(n.text_id in given and given[n.text_id].flag) for n in notes]
    sentences = [given[n.text_id].sentence_id if n.text_id in given else -2 for n in notes]
    right = [n.correction for n in notes]
    wrote = [
        p.correction
        if (p := given.get(n.text_id)) and p.flag and p.correction not in (None, "NA")
        else None
        for n in notes
    ]
    both = [(r, w) for r, w in zip(right, wrote, strict=True) if r is not None and w is not None]
    overlap = [_unigram_f1(r, w) for r, w in both]
    both_na = sum(
        r is None and w is None and n.text_id in given
        for r, w, n in zip(right, wrote, notes, strict=True)
    )
    nan = math.nan
    specificity = recall_score(truth, said, pos_label=0, zero_division=nan)
    return {
        "readable": len(given) / len(notes),
        "flag_accuracy": accuracy_score(truth, answer),
        "precision": precision_score(truth, said, zero_division=nan),
        "recall": recall_score(truth, said, zero_division=nan),
        "f1": f1_score(truth, said, zero_division=nan),
        "false_positive_rate": 1 - specificity,
        "sentence_accuracy": accuracy_score([n.sentence_id for n in notes], sentences),
        "rouge_1": float(np.mean(overlap)) if overlap else nan,
        "rouge_1_composite": (sum(overlap) + both_na) / len(notes),
    }


def _unigram_f1(reference: str, prediction: str) -> float:
    words = CountVectorizer(binary=True, token_pattern=r"\S+", lowercase=False)
    there, here = words.fit_transform([reference, prediction]).toarray()
    return float(f1_score(there, here))


@examples(100)
@given(scored())
def test_every_measure_is_what_scikit_learn_says(
    case: tuple[list[ReferenceNote], list[Prediction]],
) -> None:
    notes, predictions = case
    found = score(notes, predictions, resamples=0).measures
    expected = by_scikit_learn(notes, predictions)
    assert {name for name, measure in found.items() if measure.value is not None} <= expected.keys()
    for name, value in expected.items():
        if math.isnan(value):
            assert found[name].value is None and found[name].why, name
        else:
            assert found[name].value == pytest.approx(value, abs=1e-7), name


@examples(100)
@given(scored())
def test_order_changes_nothing_and_a_group_scores_its_notes(
    case: tuple[list[ReferenceNote], list[Prediction]],
) -> None:
    notes, predictions = case
    found = score(notes, predictions, resamples=20)
    shuffled = random.Random(0)
    shuffled.shuffle(notes)
    shuffled.shuffle(predictions)
    assert score(notes, predictions, resamples=20) == found
    groups = found.groups
    assert sum(group["notes"] for group in groups["notes"].values()) == len(notes)
    for name, group in groups.get("error type", {}).items():
        alone = [n for n in notes if n.error_type == name]
        assert group["notes"] == len(alone)
        expected = by_scikit_learn(alone, predictions)
        for measure in ("flag_accuracy", "sentence_accuracy"):
            assert group["measures"][measure].value == pytest.approx(expected[measure])


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        (".", "A correction.", 0.0),
        (".", ".", 1.0),
        ('C:\\1 \\g<0> "quoted"', 'C:\\1 \\g<0> "quoted"', 1.0),
        ("用万古霉素", "用青霉素", 2 / 3),  # by characters
    ],
)
def test_no_correction_breaks_the_score(text: str, reference: str, expected: float) -> None:
    notes = [note(0, True, reference)]
    found = score(notes, [Prediction("ms-test-0", True, 0, text)], resamples=0).measures
    assert found["rouge_1"].value == pytest.approx(expected, abs=1e-6)


def test_a_score_that_cannot_be_computed_says_why_and_is_never_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes = [note(0, True, "A correction."), note(1, False)]
    measures = score(notes, gold(notes), resamples=0).measures
    for name in ("bertscore", "bleurt", "bertscore_composite", "bleurt_composite"):
        assert measures[name].value is None and measures[name].why == "ask for it with --neural"
    assert measures["aggregate"].why == "needs bertscore and bleurt"
    broken = ModuleType("bleurt_pytorch")  # with transformers 5 it lacks a name
    for name, module in (("bert_score", None), ("bleurt_pytorch", broken), ("rouge", None)):
        monkeypatch.setitem(sys.modules, name, module)
    measures = score(notes, gold(notes), scorers=NEURAL_SCORERS, resamples=0).measures
    for name, extra in {
        "bertscore": "eval-neural",
        "bleurt": "eval-neural",
        "rouge_1": "eval",
    }.items():
        assert (measures[name].why or "").endswith(f"pip install 'medserl-agentloop[{extra}]'")


def test_the_aggregate_is_the_mean_of_all_three_scores() -> None:
    notes = [note(0, True, "A correction."), note(1, True, "Another one."), note(2, False)]
    halves = {"bertscore": lambda p, _: [0.5] * len(p), "bleurt": lambda p, _: [0.25] * len(p)}
    found = score(notes, gold(notes), scorers={**SCORERS, **halves}, resamples=0).measures
    mean = (1 + 0.5 + 0.25) / 3
    assert found["aggregate"].value == pytest.approx(mean, abs=1e-6)
    assert found["aggregate_composite"].value == pytest.approx((mean * 2 + 1) / 3, abs=1e-6)
    assert found["bertscore_composite"].value == pytest.approx((0.5 * 2 + 1) / 3)


@pytest.mark.parametrize(("right", "moved"), [(0.75, 0.2), (0.98, 0.0), (0.99, 0.0)])
def test_the_intervals_cover_the_truth(right: float, moved: float) -> None:
    """The system is right on a note with this probability; a hard case moves both of its notes."""
    draw = np.random.default_rng(0)
    notes = [note(n, n % 2 == 0, case=f"case-{n // 2}") for n in range(160)]
    truth = {"flag_accuracy": right, "recall": right, "f1": right}
    covered = dict.fromkeys(truth, 0)
    for _ in range(150):
        hardness = np.repeat(draw.choice([-moved, moved], size=80), 2)
        answers = [
            n.flag == hit for n, hit in zip(notes, draw.random(160) < right + hardness, strict=True)
        ]
        predictions = [
            Prediction(n.text_id, bool(flag)) for n, flag in zip(notes, answers, strict=True)
        ]
        found = score(notes, predictions, scorers={}, resamples=200).measures
        for name, value in truth.items():
            low, high = found[name].low, found[name].high
            covered[name] += low <= value <= high
    # 95 % of 150, give or take three standard deviations of 2.7.
    assert all(134 <= count <= 150 for count in covered.values()), covered


def test_score_interval_counts_cases_and_not_the_notes_of_a_pair() -> None:
    notes = [note(n, n % 2 == 0, case=f"case-{n // 2}") for n in range(20)]
    found = score(notes, gold(notes)).measures["flag_accuracy"]
    low, high = wilson_interval(10, 10)
    assert (found.value, found.high) == (1.0, high) and found.low == pytest.approx(low)
    # Whatever it says of both twins, it is right about one; drawing notes in place of cases would
    # see chance here.
    same = score(notes, [Prediction(n.text_id, True, 0) for n in notes]).measures["flag_accuracy"]
    assert same.value == same.low == same.high == 0.5


def test_two_systems_are_compared_note_by_note() -> None:
    notes = [note(n, n % 2 == 0, "A correction." if n % 2 == 0 else None) for n in range(60)]
    better, worse = grade(notes, gold(notes)), grade(notes, guesses(notes, 0))
    differences = compare([better], [worse])
    wrong = sum(p.flag != n.flag for p, n in zip(guesses(notes, 0), notes, strict=True))
    flags = differences["flag_accuracy"]
    assert flags["value"] == pytest.approx(wrong / 60) and 0 < flags["low"] < flags["value"]
    assert 0 < flags["p_value"] < 0.01
    assert compare([worse], [better])["flag_accuracy"]["value"] == pytest.approx(-wrong / 60)
    assert differences["aggregate"]["value"] is None
    same = compare([worse], [worse])
    assert (same["f1"]["value"], same["f1"]["p_value"]) == (0, 1.0)


@pytest.mark.parametrize(("cases", "least"), [(1, 1.0), (5, 1 / 16), (20, 0.0)])
def test_few_cases_make_no_certainty(cases: int, least: float) -> None:
    """Two systems that correct so many notes, on all of which the first is better; the second knows
    more notes.
    """
    notes = [note(n, True, "A right correction.") for n in range(40)]

    def corrects(text: str, count: int) -> list[Grades]:
        answers = [Prediction(of.text_id, True, of.sentence_id, text) for of in notes[:count]]
        return [grade(notes, answers)]

    better, worse = corrects("A right correction.", cases), corrects("A correction.", cases + 9)
    for found in (summarise(better), summarise(corrects("A correction.", cases))):
        one = found.measures["rouge_1"]
        assert cases > 1 or ((one.low or 0) < 0.3 and (one.high or 0) > 0.9)
    moved = compare(better, worse)["rouge_1"]
    assert moved["value"] == pytest.approx(0.2)
    assert (moved["low"] is None) == (moved["high"] is None) == (cases == 1)
    assert moved["p_value"] == max(least, 2 / 2001) == compare(worse, better)["rouge_1"]["p_value"]
