"""verify_parquet's leak test: what tells a label without the note is found, chance is not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from medec.builders import (
    assert_found,
    good_rows,
    verify,
    write,
)

from medserl_agentloop.data.leaks import LabelledRow, find_leaks
from medserl_agentloop.data.verify import Check
from medserl_agentloop.games.medical.types import Label


def with_trailing_blanks(rows: list[dict[str, Any]], blank: str) -> list[dict[str, Any]]:
    for row in rows:
        facts = row["extra_info"]
        facts["error_note"] += blank
        if facts["category"].endswith("harmful"):
            facts["seed_note"] += blank
            row["prompt"][0]["content"] += blank
    return rows


@pytest.mark.parametrize(("blank", "feature"), [(" ", "white space after the note"), ("\n", "a line break at the")])
def test_white_space_that_tells_the_label(tmp_path: Path, blank: str, feature: str) -> None:
    rows = with_trailing_blanks(good_rows(), blank)
    report = verify(write(tmp_path / "train.parquet", rows))
    assert_found(report, Check.LEAKS, f"train.parquet: {feature}", "tells the seed label in 100%", "strip the notes")


def test_order_that_tells_the_label(tmp_path: Path) -> None:
    rows = sorted(good_rows(), key=lambda row: row["extra_info"]["target_label"])
    report = verify(write(tmp_path / "train.parquet", rows))
    assert_found(report, Check.LEAKS, "the row's place in the file tells the target_label", "shuffle")


def test_an_id_that_tells_the_label_is_no_leak_because_no_prompt_has_it(tmp_path: Path) -> None:
    rows = good_rows()
    for row in rows:
        facts = row["extra_info"]
        facts["text_id"] = f"ms-train-{2 * facts['index'] + (facts['target_label'] == 'safe')}"
    assert verify(write(tmp_path / "train.parquet", rows)).ok


def test_leaks_of_an_official_set_are_warnings(tmp_path: Path) -> None:
    rows = with_trailing_blanks(good_rows(), " ")
    for row in rows:
        row["data_source"] = row["data_source"].replace("medec_ms", "medec_ms_eval")
    report = verify(write(tmp_path / "eval.parquet", rows))
    assert report.ok and report.warnings[Check.LEAKS] >= 1


def test_published_share_of_trailing_blanks_is_found_and_chance_is_not() -> None:
    """60 % of the error notes against 47 % of the clean ones, and labels drawn at random."""
    rng = random.Random(1)
    leaky = []
    alarms = 0
    for n in range(2000):
        label = rng.choice(list(Label))
        blank = rng.random() < (0.6 if label is Label.HARMFUL else 0.47)
        leaky.append(LabelledRow(f"a b{n}" + " " * blank, label, label))
    for _ in range(30):
        test = []
        for n in range(300):
            label = rng.choices(list(Label), [0.7, 0.3])[0]
            note = "a  " * rng.randrange(20) + f"b{n}" + " " * rng.randrange(2)
            test.append(LabelledRow(note, label, rng.choice(list(Label))))
        alarms += len(list(find_leaks(test)))
    assert [leak.feature for leak in find_leaks(leaky)] == ["white space after the note"]
    assert alarms == 0


def test_copies_of_a_row_do_not_make_a_leak() -> None:
    test = []
    notes = [
        (n, label, " " * ((n % 3 == 0) if label is Label.SAFE else (n % 2 == 0))) for n in range(30) for label in Label
    ]
    for number in range(50 * len(notes)):
        n, label, blanks = notes[number * 7 % len(notes)]
        test.append(LabelledRow(f"Note {n}.{blanks}", label, label))
    assert list(find_leaks(test)) == []
