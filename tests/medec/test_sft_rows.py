"""Warm-start conversations: in the game's own format, in the splits of self-play, and read back by
the profile's parser.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from medec.builders import assert_one_sentence, error_row, pair, run
from note_files import SAMPLE

from medserl_agentloop.data.sft import build_sft_rows
from medserl_agentloop.games.medical.case import Category, Label, Role
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import SentenceEdit

MIX = ("--mix", "vanilla_benign=1,vanilla_harmful=1")


@pytest.fixture
def taught(tmp_path: Path) -> Any:
    """Converts files of notes, and makes conversations of the rows."""

    def taught(*paths: Path, profile: str = "medserl", **options: Any) -> Any:
        inputs = [word for path in paths for word in ("--input", path)]
        more = [word for name, value in options.items() for word in (f"--{name}", value)]
        folder = tmp_path / "play"
        done = run("medec_to_parquet", *inputs, *(more or MIX), "--output", folder)
        assert done.exit_code == 0, done.output
        made, left_out = build_sft_rows(folder, load_profile(profile))
        return made["train"] + made["val"], left_out

    return taught


def test_a_case_keeps_the_split_that_it_has_in_self_play(tmp_path: Path) -> None:
    data = ("--input", SAMPLE, "--output", tmp_path / "play", "--seed", 9)
    assert run("medec_to_parquet", *data).exit_code == 0
    arguments = ("--input", tmp_path / "play", "--output", tmp_path)
    assert run("sft_to_parquet", *arguments).exit_code == 0
    indices = []
    for name in ("train", "val"):
        played = pq.read_table(tmp_path / "play" / f"{name}.parquet").to_pylist()
        taught = pq.read_table(tmp_path / f"sft_{name}.parquet").to_pylist()
        cases = {row["extra_info"]["vignette_id"] for row in played}
        assert {row["vignette_id"] for row in taught} <= cases
        assert {row["split"] for row in taught} == {name}
        indices += [row["index"] for row in taught]
    assert indices == list(range(3 * 160))


def test_unteachable_cases_are_left_out_and_counted(
    taught: Any, write_pairs: Any, write_csv: Any
) -> None:
    long = " ".join(f"Word {n}." for n in range(30))
    odd = pair(3, correct_note=f"{pair(3)['correct_note']} {long}")
    rows = [error_row(0, Corrected_Text="NA"), error_row(2, Error_Type="dosage")]
    rows += [error_row(4, Corrected_Sentence="NA")]
    same = pair(1, incorrect_note=pair(1)["correct_note"].upper())
    files = [write_pairs(odd, same, *(pair(n) for n in range(10, 30))), write_csv(*rows)]
    made, left_out = taught(*files, mix="vanilla_benign=1", **{"val-fraction": 0})
    assert left_out == {
        "cases whose two notes differ in letter case or white space only": 1,
        "attacks that change more than the game's limits allow": 1,
        "cases without one of the error types or without the two sentences": 2,
    }
    assert Counter(row["game_role"] for row in made) == {"attacker": 20, "assessor": 42}


@pytest.mark.parametrize(
    ("opening", "wrong", "role"),
    [
        ("Fever.", "The </think> sign is gout.", "assessor"),
        ("<note> of today:", "It is gout.", "attacker"),
        ("Seen <think> and </answer> and </note> and {{ x }} in it.", "It is gout.", ""),
    ],
)
def test_text_that_the_format_cannot_hold_is_refused_with_its_case(
    taught: Any, write_pairs: Any, opening: str, wrong: str, role: str
) -> None:
    """Where escaping is not possible, the case is named instead of taught wrongly; other tags stay
    text.
    """
    notes = {"incorrect_note": f"{opening} {wrong}", "correct_note": f"{opening} It is flu."}
    odd = pair(3, **notes, error_sentence=wrong, corrected_sentence="It is flu.")
    path = write_pairs(odd, *(pair(n) for n in range(10, 20)))
    if role:
        with pytest.raises(ValueError, match=f"case 'ms-train-3': the {role}'s answer "):
            taught(path)
    else:
        assert any(opening in row["messages"][0]["content"] for row in taught(path)[0])


@pytest.mark.parametrize("name", ["baseline", "classic", "medserl"])
def test_every_profile_can_be_taught_in_its_own_format(
    taught: Any, name: str, write_pairs: Any
) -> None:
    profile = load_profile(name)
    made, left_out = taught(write_pairs(*(pair(n) for n in range(20))), profile=name)
    prefix = profile.settings.assistant_prefix
    assert (len(made), left_out) == (60, {})
    for row in made:
        *prompt, answer = row["messages"]
        role, category = Role(row["game_role"]), Category(row["category"])
        of = pair(int(row["vignette_id"].rpartition("-")[2]))
        key = "incorrect_note" if category.seed_label is Label.HARMFUL else "correct_note"
        assert prompt == profile.messages(role, category, of[key].strip())
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
            expected = (of["error_sentence"], of["corrected_sentence"])
            assert (read.sentence, read.correction) == expected


def test_an_edit_is_planned_in_the_words_that_change(taught: Any, write_pairs: Any) -> None:
    """Where the reasoning named the number alone, models wrote the sentence as it was."""
    wrong, right = "It is flu, and he rests.", "It is gout, and he rests."
    notes = {"incorrect_note": f"Fever. {wrong} Well.", "correct_note": f"Fever. {right} Well."}
    row = pair(3, **notes, error_sentence=wrong, corrected_sentence=right)
    made, _ = taught(write_pairs(row), profile="edits")
    [answer] = [row["messages"][-1]["content"] for row in made if row["game_role"] == "attacker"]
    parser = load_profile("edits").parser
    read = parser.attack(answer, "", {0: "Fever.", 1: right, 2: "Well."})
    assert read.edit == SentenceEdit(number=1, old=right, new=wrong)
    assert read.reasoning and read.reasoning.startswith('In sentence 1 I change "gout," to "flu,".')


def test_a_folder_of_something_else_is_named(tmp_path: Path) -> None:
    result = run("sft_to_parquet", "--input", tmp_path, "--output", tmp_path / "out")
    assert_one_sentence(result, "train.parquet: cannot be read as parquet")
    assert not (tmp_path / "out").exists()
