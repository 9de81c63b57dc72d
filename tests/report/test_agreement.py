"""Filled sheets: kappa as computed by hand, and every answer that cannot be counted is named."""

import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from medserl_agentloop.cli import app
from medserl_agentloop.report.sheets import agreement, cohen_kappa, fleiss_kappa, read_sheet

KEY = """item,game,original,original_label,judge_label
1,11,A,safe,harmful
2,12,B,safe,harmful
3,13,A,safe,safe
4,14,B,harmful,harmful
5,15,A,safe,
"""
ORIGINAL = {"1": "A", "2": "B", "3": "A", "4": "B", "5": "A"}
HEADER = "item,error,matters,visible,remarks\n"
LIKE_THE_JUDGE = HEADER + "1,B,yes,yes,\n2,A,yes,no,\n3,neither,,,\n4,both,unsure,yes,\n5,B,no,no,\n"
OTHER = HEADER + "1,B,yes,yes,\n2,B,no,no,\n3,neither,,,\n4,both,unsure,yes,\n5,B,no,no,\n"


def answers(text: str) -> dict[str, str]:
    return {str(number): answer for number, answer in enumerate(text)}


def sheet(folder: Path, text: str, name: str = "alice") -> Path:
    path = folder / f"{name}.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_cohens_kappa_is_that_of_a_table_worked_by_hand() -> None:
    # 20 times both yes, 15 both no, 5 and 10 apart: observed 0.7, expected 0.5 * 0.6 + 0.5 * 0.4 = 0.5.
    a = answers("y" * 25 + "n" * 25)
    b = answers("y" * 20 + "n" * 5 + "y" * 10 + "n" * 15)
    assert cohen_kappa(a, b) == pytest.approx(0.4)
    metrics = pytest.importorskip("sklearn.metrics")
    assert cohen_kappa(a, b) == pytest.approx(metrics.cohen_kappa_score([*a.values()], [*b.values()]))


def test_fleiss_kappa_is_that_of_a_table_worked_by_hand() -> None:
    # Ten subjects, fourteen raters, five answers: the worked example of the article on Fleiss' kappa in Wikipedia.
    counts = [
        (0, 0, 0, 0, 14), (0, 2, 6, 4, 2), (0, 0, 3, 5, 6), (0, 3, 9, 2, 0), (2, 2, 8, 1, 1),
        (7, 7, 0, 0, 0), (3, 2, 6, 3, 0), (2, 5, 3, 2, 2), (6, 5, 2, 1, 0), (0, 2, 2, 3, 7),
    ]  # fmt: skip
    rows = ["".join(str(answer) * n for answer, n in enumerate(row)) for row in counts]
    raters = [answers("".join(row[rater] for row in rows)) for rater in range(14)]
    assert fleiss_kappa(raters) == pytest.approx(0.210, abs=0.0005)
    # Two raters, two items, one in common: observed 1/2, expected (3/4)^2 + (1/4)^2 = 5/8.
    assert fleiss_kappa([answers("yy"), answers("yn")]) == pytest.approx((1 / 2 - 5 / 8) / (1 - 5 / 8))


def test_kappa_is_not_defined_without_items_or_with_one_answer_alone() -> None:
    assert math.isnan(cohen_kappa(answers("yy"), answers("yy"))) and math.isnan(cohen_kappa({}, answers("y")))
    assert math.isnan(fleiss_kappa([answers("y"), {}]))


def test_a_and_b_are_read_as_original_and_edited(tmp_path: Path) -> None:
    read = read_sheet(sheet(tmp_path, LIKE_THE_JUDGE), ORIGINAL, "alice")
    assert read.answers["error"] == {"1": "edited", "2": "edited", "3": "neither", "4": "both", "5": "edited"}
    assert read.problems == []  # where neither note holds an error, the other questions have no answer


def test_what_cannot_be_counted_is_named_by_item(tmp_path: Path) -> None:
    text = HEADER + "1,b ,YES,maybe,\n1,A,no,no,\n2,C,,,\n3,,,,\n"
    read = read_sheet(sheet(tmp_path, text), ORIGINAL, "alice")
    assert read.answers["error"] == {"1": "edited"} and read.answers["matters"] == {"1": "yes"}
    name = tmp_path / "alice.csv"
    assert read.problems == [
        f"{name}, item 1: visible is 'maybe'; expected yes, no or unsure",
        f"{name}, row 2: item 1 is there twice; the first one counts",
        f"{name}, item 2: error is 'C'; expected A, B, neither or both",
        f"{name}: 3 items have no answer to error: 3, 4, 5",
        f"{name}: 4 items have no answer to matters: 2, 3, 4, 5",
        f"{name}: 4 items have no answer to visible: 2, 3, 4, 5",
    ]


@pytest.mark.parametrize("separator", [";", "\t"])
def test_a_spreadsheet_may_save_with_other_separators_and_encodings(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "alice.csv"
    text = LIKE_THE_JUDGE.replace("1,B,yes,yes,", "1,B,yes,yes,50 \u00b5g\r").replace(",", separator)
    path.write_bytes(text.encode("cp1252"))
    assert len(read_sheet(path, ORIGINAL, "alice").answers["error"]) == 5


def test_raters_are_compared_with_each_other_and_with_the_judge(tmp_path: Path) -> None:
    key = sheet(tmp_path, KEY, "sheet_key")
    table, problems = agreement([sheet(tmp_path, LIKE_THE_JUDGE), sheet(tmp_path, OTHER, "bob")], key)
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    found = {(str(question), str(who)): rest for question, who, *rest in rows}
    # Answers to error: edited, edited, neither, both, edited against edited, original, neither, both, edited:
    # observed 4/5, expected (3 * 2 + 1 + 1) / 25; against the judge on four items 3/4 and (2 * 1 + 1 + 1) / 16.
    assert found["error", "alice, bob"] == [f"{(4 / 5 - 8 / 25) / (1 - 8 / 25):.3f}", "80.0%", "5"]
    assert found["error", "alice, the judge"] == ["1.000", "100.0%", "4"]
    assert found["error", "bob, the judge"] == [f"{(3 / 4 - 4 / 16) / (1 - 4 / 16):.3f}", "75.0%", "4"]
    assert found["visible", "all 2 raters (Fleiss)"][1:] == ["100.0%", "4"]
    assert ("matters", "alice, the judge") not in found
    assert problems == ["the judge has no word on 1 of 5 pairs"]


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        (HEADER + "9,A,yes,yes,\n", KEY, "row 1: the key has no item '9'"),
        ("item,error,matters\n1,A,yes\n", KEY, "the column visible is missing"),
        ("nonsense\n", KEY, "its first column must be called item"),
        (HEADER, KEY, "there are no rows"),
        (LIKE_THE_JUDGE, LIKE_THE_JUDGE, "the column game is missing"),
    ],
)
def test_files_that_are_no_sheet_or_no_key_are_named(tmp_path: Path, text: str, key: str, message: str) -> None:
    paths = [str(sheet(tmp_path, text)), "--key", str(sheet(tmp_path, key, "key"))]
    done = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["agreement", *paths])
    assert done.exit_code == 2 and message in done.output
