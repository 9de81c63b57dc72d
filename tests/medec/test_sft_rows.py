"""Warm-start conversations: in the game's own format, split by case, and read by verl's SFT
dataset.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from medec.builders import assert_one_sentence, error_row, pair, run
from note_files import SAMPLE

from medserl_agentloop.data.reader import read_files
from medserl_agentloop.data.sft import build_sft_rows
from medserl_agentloop.games.medical.case import Category, Label, Role
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import SentenceEdit


def test_a_case_is_in_one_split_and_in_that_of_the_self_play_rows(tmp_path: Path) -> None:
    for name in ("sft_to_parquet", "medec_to_parquet"):
        assert (
            run(
                name, "--input", SAMPLE, "--seed", 5, "--val-fraction", 0.2, "--output", tmp_path
            ).exit_code
            == 0
        )
    taught = {
        name: pq.read_table(tmp_path / f"sft_{name}.parquet").to_pylist()
        for name in ("train", "val")
    }
    played = {
        name: pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("train", "val")
    }
    cases = {name: {row["vignette_id"] for row in rows} for name, rows in taught.items()}
    assert (
        len(cases["train"]) == 128 and len(cases["val"]) == 32 and not cases["train"] & cases["val"]
    )
    for name, rows in played.items():
        assert {row["extra_info"]["vignette_id"] for row in rows} <= cases[name]
    indices = [row["index"] for rows in taught.values() for row in rows]
    assert len(set(indices)) == len(indices)


def test_splits_can_be_taken_from_files_for_self_play(tmp_path: Path) -> None:
    arguments = (
        "--input",
        SAMPLE,
        "--output",
        tmp_path / "play",
        "--seed",
        9,
        "--val-fraction",
        0.3,
        "--rows",
        60,
    )
    assert run("medec_to_parquet", *arguments).exit_code == 0
    arguments = ("--input", SAMPLE, "--output", tmp_path, "--splits-of", tmp_path / "play")
    assert run("sft_to_parquet", *arguments).exit_code == 0
    for name in ("train", "val"):
        played = pq.read_table(tmp_path / "play" / f"{name}.parquet").to_pylist()
        taught = pq.read_table(tmp_path / f"sft_{name}.parquet").to_pylist()
        assert {row["extra_info"]["vignette_id"] for row in played} == {
            row["vignette_id"] for row in taught
        }
    result = run("sft_to_parquet", "--input", SAMPLE, "--output", tmp_path, "--splits-of", tmp_path)
    assert result.exit_code == 2 and "train.parquet: cannot be read as parquet" in result.stderr


def test_unteachable_cases_are_left_out_and_counted(write_pairs: Any, write_csv: Any) -> None:
    opening = pair(1)["correct_note"].removesuffix("Diagnosis 1 is pneumonia.")
    odd = [
        pair(1, incorrect_note=f"{opening} DIAGNOSIS 1 is pneumonia."),
        pair(
            3,
            correct_note=pair(3)["correct_note"] + " " + " ".join(f"Word {n}." for n in range(30)),
        ),
    ]
    rows = [
        error_row(0, Corrected_Text="NA"),
        error_row(2, Error_Type="dosage"),
        error_row(4, Corrected_Sentence="NA"),
    ]
    files = [write_pairs(*odd, *(pair(n) for n in range(10, 30))), write_csv(*rows)]
    made = build_sft_rows(read_files(files).cases)
    assert made.left_out == {
        "cases whose two notes differ in letter case or white space only": 1,
        "attacks that change more than the game's limits allow": 1,
        "cases without one of the error types or without the two sentences": 2,
        "cases with only one note": 1,
    }
    assert Counter(row["game_role"] for row in made.train + made.val) == {
        "attacker": 20,
        "assessor": 42,
    }


@pytest.mark.parametrize(
    ("opening", "wrong", "role"),
    [
        ("Fever.", "The </think> sign is gout.", "assessor"),
        ("Fever.", "Findings.\ncorrection: gout.", "assessor"),
        ("<note> of today:", "It is gout.", "attacker"),
        ("See </note> and <note>:", "It is gout.", "attacker"),
        ("Seen <think> and </answer> and </note> and {{ x }} in it.", "It is gout.", ""),
    ],
)
def test_text_that_the_format_cannot_hold_is_refused_with_its_case(
    write_pairs: Any, opening: str, wrong: str, role: str
) -> None:
    """Where escaping is not possible, the case is named instead of taught wrongly; other tags stay
    text.
    """
    notes = {"incorrect_note": f"{opening} {wrong}", "correct_note": f"{opening} It is flu."}
    odd = pair(3, **notes, error_sentence=wrong, corrected_sentence="It is flu.")
    cases = read_files([write_pairs(odd, *(pair(n) for n in range(10, 20)))]).cases
    if role:
        with pytest.raises(
            ValueError, match=f"case 'ms-train-3': the {role}'s answer .* take the row out"
        ):
            build_sft_rows(cases)
    else:
        made = build_sft_rows(cases)
        assert any(opening in row["messages"][0]["content"] for row in made.train + made.val)


@pytest.mark.parametrize("name", ["baseline", "classic", "medserl"])
def test_every_profile_can_be_taught_in_its_own_format(name: str, write_pairs: Any) -> None:
    cases = read_files([write_pairs(*(pair(n) for n in range(20)))]).cases
    profile = load_profile(name)
    made = build_sft_rows(cases, prompts=profile)
    prefix = profile.settings.assistant_prefix
    assert (len(made.train), len(made.val), made.left_out) == (54, 6, {})
    for row in made.train + made.val:
        *prompt, answer = row["messages"]
        role, category = Role(row["game_role"]), Category(row["category"])
        of = pair(int(row["vignette_id"].rpartition("-")[2]))
        note = of[
            "incorrect_note" if category.seed_label is Label.HARMFUL else "correct_note"
        ].strip()
        assert prompt == profile.messages(role, category, note)
        # The prefix is part of the answer here and of the prompt in self-play: the tokens are the
        # same.
        turn = answer["content"].removeprefix(prefix)
        assert prefix + turn == answer["content"]
        if role is Role.ATTACKER:
            attack = profile.parser.attack(turn, prefix)
            assert attack.note == of["incorrect_note"].strip() and attack.reasoning
            continue
        read = profile.parser.assessment(turn, prefix)
        assert read.verdict is category.seed_label and read.reasoning and not read.violations
        if read.verdict is Label.HARMFUL and profile.parser.locates:
            assert (read.sentence, read.correction) == (
                of["error_sentence"],
                of["corrected_sentence"],
            )


def test_an_edit_is_planned_in_the_words_that_change(write_pairs: Any) -> None:
    """Where the reasoning named the number alone, models wrote the sentence as it was."""
    wrong, right = "It is flu, and he rests.", "It is gout, and he rests."
    notes = {"incorrect_note": f"Fever. {wrong} Well.", "correct_note": f"Fever. {right} Well."}
    row = pair(3, **notes, error_sentence=wrong, corrected_sentence=right)
    profile = load_profile("edits")
    made = build_sft_rows(read_files([write_pairs(row)]).cases, prompts=profile, val_fraction=0)
    [answer] = [
        row["messages"][-1]["content"] for row in made.train if row["game_role"] == "attacker"
    ]
    read = profile.parser.attack(answer, "", {0: "Fever.", 1: right, 2: "Well."})
    assert read.edit == SentenceEdit(number=1, old=right, new=wrong)
    assert read.reasoning and read.reasoning.startswith('In sentence 1 I change "gout," to "flu,".')


def test_mistakes_are_said_in_one_sentence(tmp_path: Path, write_pairs: Any) -> None:
    pairs = write_pairs(*(pair(n) for n in range(20)))
    uw = write_pairs(*(pair(n, note_id=f"uw-train-{n}") for n in range(20)), name="uw.jsonl")
    for arguments, part in (
        (["--input", pairs, "--val-fraction", "2"], "--val-fraction is 2.0"),
        (["--input", uw], "--i-have-the-uw-agreement"),
    ):
        assert_one_sentence(run("sft_to_parquet", *arguments, "--output", tmp_path / "out"), part)
    assert not (tmp_path / "out").exists()
