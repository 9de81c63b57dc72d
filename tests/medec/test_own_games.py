"""Warm starts from a model's own games: only right turns, balanced, each case once, and none that comes back."""

import itertools
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from game.builders import CLEAN_NOTE, ERROR_SENTENCE, assessment_text, attack_text, finished
from hypothesis import given
from hypothesis import strategies as st
from medec.builders import run
from note_files import SAMPLE
from typer.testing import CliRunner

from medserl_agentloop.cli import app
from medserl_agentloop.core.step_file import GAMES_FILE, StepFile
from medserl_agentloop.data.sft import (
    BAD_FORM,
    OTHER_SENTENCE,
    REPEATED,
    WRONG,
    rows_for_self_play,
    rows_of_games,
)
from medserl_agentloop.games.medical.records import MedicalRecord, Outcome

NUMBERS = itertools.count()


def game(outcome: Outcome, category: str, case: str | None = None, **assessment: Any) -> MedicalRecord:
    case = case or f"case {next(NUMBERS)}"
    found = outcome is Outcome.CORRECT_DETECTION
    said = {"response": assessment_text("verdict: safe"), "sentence": ERROR_SENTENCE if found else None, **assessment}
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


def roles(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return sorted((row["game_role"], row["category"]) for row in rows)


def test_right_turns_become_conversations_of_the_game_s_own_prompts() -> None:
    made = rows_of_games([game(*kind) for kind in RIGHT], val_fraction=0.0)
    assert roles(made.train) == [
        ("assessor", "adversarial_benign"),
        ("assessor", "decoy_benign"),
        ("assessor", "vanilla_benign"),
        ("assessor", "vanilla_harmful"),
        ("attacker", "adversarial_benign"),
        ("attacker", "decoy_benign"),
    ]
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
    ],
)
def test_a_turn_that_was_not_right_is_left_out_and_counted(outcome: Outcome, changes: dict[str, Any], why: str) -> None:
    games = [game(*kind) for kind in RIGHT] + [game(outcome, "vanilla_harmful", **changes)]
    made = rows_of_games(games, val_fraction=0.0)
    assert len(made.train) == 6
    assert made.left_out[why] == 1


def test_a_failed_attack_is_not_taught() -> None:
    failed = game(Outcome.CORRECT_REJECTION, "adversarial_benign")
    assert failed.attack_failed
    made = rows_of_games([*(game(*kind) for kind in RIGHT), failed], val_fraction=0.0)
    assert [r for r in roles(made.train) if r[0] == "attacker"] == [
        ("attacker", "adversarial_benign"),
        ("attacker", "decoy_benign"),
    ]


@given(st.lists(st.sampled_from(RIGHT), max_size=30), st.integers(0, 9))
def test_verdicts_and_kinds_of_attack_are_balanced(kinds: list[tuple[Outcome, str]], seed: int) -> None:
    games = [game(outcome, category, f"{number}") for number, (outcome, category) in enumerate(kinds)]
    try:
        made = rows_of_games(games, seed=seed)
    except ValueError as error:
        assert "the games hold no turn to imitate" in str(error)
        return
    rows = made.train + made.val
    harmful = [r for r in rows if r["game_role"] == "assessor" and not r["category"].endswith("_benign")]
    injected = [r for r in rows if r["game_role"] == "assessor" and r["category"] == "adversarial_benign"]
    safe = [r for r in rows if r["game_role"] == "assessor" and r["category"] in ("vanilla_benign", "decoy_benign")]
    assert len(harmful) + len(injected) == len(safe)
    attacks = [r["category"] for r in rows if r["game_role"] == "attacker"]
    assert len({attacks.count(category) for category in set(attacks)}) <= 1
    assert len({(r["game_role"], r["category"], r["vignette_id"]) for r in rows}) == len(rows)
    assert {r["vignette_id"] for r in made.train}.isdisjoint({r["vignette_id"] for r in made.val})


def test_a_case_gives_one_turn_of_a_kind() -> None:
    games = [game(*kind) for kind in RIGHT] + [game(Outcome.CORRECT_REJECTION, "vanilla_benign", "case x")] * 3
    assert rows_of_games(games, val_fraction=0.0).left_out[REPEATED] == 2


def test_the_command_writes_conversations_and_the_rows_that_are_left_for_self_play(tmp_path: Path) -> None:
    assert run("medec_to_parquet", "--input", SAMPLE, "--output", tmp_path / "data").exit_code == 0
    rows = pq.read_table(tmp_path / "data" / "train.parquet").to_pylist()
    cases = [row["extra_info"]["vignette_id"] for row in rows][:40]
    games = [game(*kind, case) for kind, case in zip(itertools.cycle(RIGHT), cases, strict=False)]
    StepFile(tmp_path / "run" / GAMES_FILE).append(record.to_json() for record in games)
    command = ["data", "sft", "--from-games", str(tmp_path / "run"), "--output", str(tmp_path / "sft")]
    done = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, [*command, "--rest-of", str(tmp_path / "data" / "train.parquet")]
    )
    assert done.exit_code == 0, done.output
    taught = {
        r["vignette_id"]
        for s in ("train", "val")
        for r in pq.read_table(tmp_path / "sft" / f"sft_{s}.parquet").to_pylist()
    }
    rest = pq.read_table(tmp_path / "sft" / "selfplay_train.parquet").to_pylist()
    left = {row["extra_info"]["vignette_id"] for row in rest}
    assert taught and left and taught.isdisjoint(left)
    assert taught | left == {row["extra_info"]["vignette_id"] for row in rows}
    assert f"{len(rest)} rows of the cases that are not taught" in done.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "give --input, for answers from templates, or --from-games"),
        (["--from-games", "x.jsonl", "--input", "y.csv"], "not both"),
        (["--from-games", "x.jsonl", "--splits-of", "z"], "--splits-of belongs to --input"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: list[str], says: str, tmp_path: Path) -> None:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["data", "sft", *options, "--output", str(tmp_path / "out")])
    assert done.exit_code == 2 and says in done.output
    assert not (tmp_path / "out").exists()


def test_a_file_whose_cases_are_all_taught_leaves_nothing(tmp_path: Path) -> None:
    assert run("medec_to_parquet", "--input", SAMPLE, "--output", tmp_path).exit_code == 0
    file = tmp_path / "val.parquet"
    every = [{"vignette_id": row["extra_info"]["vignette_id"]} for row in pq.read_table(file).to_pylist()]
    with pytest.raises(ValueError, match="every case in it is taught"):
        rows_for_self_play(file, every)
    pq.write_table(pq.read_table(file).select(["prompt"]), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="not a file of rows for self-play"):
        rows_for_self_play(tmp_path / "other.parquet", [])
