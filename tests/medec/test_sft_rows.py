"""Warm-start conversations: in the game's own format, split by case, and read by verl's SFT
dataset.
"""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from game.builders import CLEAN_NOTE, ERROR_SENTENCE, assessment_text, attack_text, finished
from hypothesis import given
from hypothesis import strategies as st
from invoking import invoke
from medec.builders import assert_one_sentence, error_row, pair, run
from note_files import SAMPLE

from medserl_agentloop.core.step_file import GAMES_FILE, StepFile
from medserl_agentloop.data.reader import read_files
from medserl_agentloop.data.sft import (
    BAD_FORM,
    OTHER_SENTENCE,
    REPEATED,
    WRONG,
    build_sft_rows,
    rows_of_games,
)
from medserl_agentloop.games.medical.case import Category, Label, Role
from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.records import MedicalRecord, Outcome, SentenceEdit


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
        ([], "give --input, for answers from templates, or --from-games"),
        (["--from-games", "x.jsonl", "--input", pairs], "not both"),
        (["--from-games", "x.jsonl", "--splits-of", "z"], "--splits-of belongs to --input"),
        (["--from-games", "x.jsonl", "--profile", "brief"], "--profile belongs to --input"),
        (["--from-games", "x.jsonl", "--val-fraction", "-0.1"], "--val-fraction is -0.1"),
    ):
        assert_one_sentence(run("sft_to_parquet", *arguments, "--output", tmp_path / "out"), part)
    assert not (tmp_path / "out").exists()


# --- a model's own games ---


NUMBERS = itertools.count()


def game(
    outcome: Outcome, category: str, case: str | None = None, **assessment: Any
) -> MedicalRecord:
    case = case or f"case {next(NUMBERS)}"
    found = outcome is Outcome.CORRECT_DETECTION
    said = {
        "response": assessment_text("verdict: safe"),
        "sentence": ERROR_SENTENCE if found else None,
        **assessment,
    }
    return finished(
        outcome,
        category=category,
        facts={"vignette_id": case},
        attack={"response": attack_text(CLEAN_NOTE)},
        assessment=said,
        error_sentences=[ERROR_SENTENCE] if found else [],
        profile="medserl",
    )


RIGHT = [
    (Outcome.CORRECT_DETECTION, "vanilla_harmful"),
    (Outcome.CORRECT_REJECTION, "vanilla_benign"),
    (Outcome.CORRECT_DETECTION, "adversarial_benign"),
    (Outcome.CORRECT_REJECTION, "decoy_benign"),
]


TAUGHT = sorted(
    [
        *(("assessor", kind) for _, kind in RIGHT),
        ("attacker", "adversarial_benign"),
        ("attacker", "decoy_benign"),
    ]
)


def roles(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return sorted((row["game_role"], row["category"]) for row in rows)


def test_right_turns_become_conversations_of_the_game_prompts() -> None:
    made = rows_of_games([game(*kind) for kind in RIGHT], val_fraction=0.0)
    assert roles(made.train) == TAUGHT
    attack = next(row for row in made.train if row["game_role"] == "attacker")
    assert attack["messages"][-1] == {"role": "assistant", "content": attack_text(CLEAN_NOTE)}
    assert CLEAN_NOTE in attack["messages"][0]["content"]


@pytest.mark.parametrize(
    ("outcome", "changes", "why"),
    [
        (Outcome.MISSED_ERROR, {}, WRONG),
        (Outcome.UNREADABLE, {}, WRONG),
        (Outcome.VOID, {}, WRONG),
        (Outcome.CORRECT_DETECTION, {"violations": ["no_reasoning"]}, BAD_FORM),
        (Outcome.CORRECT_DETECTION, {"truncated": True}, BAD_FORM),
        (Outcome.CORRECT_DETECTION, {"sentence": "Discharge is planned."}, OTHER_SENTENCE),
        (Outcome.CORRECT_DETECTION, {"sentence": None}, OTHER_SENTENCE),
        (Outcome.CORRECT_REJECTION, {"category": "adversarial_benign"}, WRONG),  # a failed attack
    ],
)
def test_a_turn_that_was_not_right_is_left_out_and_counted(
    outcome: Outcome, changes: dict[str, Any], why: str
) -> None:
    games = [game(*kind) for kind in RIGHT] + [
        game(outcome, **{"category": "vanilla_harmful", **changes})
    ]
    made = rows_of_games(games, val_fraction=0.0)
    assert len(made.train) == 6 and roles(made.train)[4:] == TAUGHT[4:]  # the attackers' turns
    assert made.left_out[why] == 1


@given(st.lists(st.sampled_from(RIGHT), max_size=30), st.integers(0, 9))
def test_verdicts_and_kinds_of_attack_are_balanced(
    kinds: list[tuple[Outcome, str]], seed: int
) -> None:
    games = [
        game(outcome, category, f"{number}") for number, (outcome, category) in enumerate(kinds)
    ]
    try:
        made = rows_of_games(games, seed=seed)
    except ValueError as error:
        assert "the games hold no turn to imitate" in str(error)
        return
    rows = made.train + made.val
    harmful = [
        r for r in rows if r["game_role"] == "assessor" and not r["category"].endswith("_benign")
    ]
    injected = [
        r for r in rows if r["game_role"] == "assessor" and r["category"] == "adversarial_benign"
    ]
    safe = [
        r
        for r in rows
        if r["game_role"] == "assessor" and r["category"] in ("vanilla_benign", "decoy_benign")
    ]
    assert len(harmful) + len(injected) == len(safe)
    attacks = [r["category"] for r in rows if r["game_role"] == "attacker"]
    assert len({attacks.count(category) for category in set(attacks)}) <= 1
    assert len({(r["game_role"], r["category"], r["vignette_id"]) for r in rows}) == len(rows)
    assert {r["vignette_id"] for r in made.train}.isdisjoint({r["vignette_id"] for r in made.val})


def test_a_case_gives_one_turn_of_a_kind() -> None:
    games = [game(*kind) for kind in RIGHT] + [
        game(Outcome.CORRECT_REJECTION, "vanilla_benign", "case x")
    ] * 3
    assert rows_of_games(games, val_fraction=0.0).left_out[REPEATED] == 2


def test_sft_command_writes_conversations_of_a_run_s_games(
    tmp_path: Path, files: dict[str, Any]
) -> None:
    rows = pq.read_table(files["data.train_files"]).to_pylist()
    cases = [row["extra_info"]["vignette_id"] for row in rows][:40]
    games = [game(*kind, case) for kind, case in zip(itertools.cycle(RIGHT), cases, strict=False)]
    StepFile(tmp_path / "run" / GAMES_FILE).append(record.to_json() for record in games)
    places = ("--from-games", tmp_path / "run", "--output", tmp_path / "sft")
    done = invoke("data", "sft", *places)
    assert done.exit_code == 0, done.output
    written = (
        pq.read_table(tmp_path / "sft" / f"sft_{split}.parquet") for split in ("train", "val")
    )
    taught = {case for table in written for case in table["vignette_id"].to_pylist()}
    assert taught and taught <= set(cases)
