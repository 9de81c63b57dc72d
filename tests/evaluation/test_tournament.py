"""Games between frozen players, ``medserl tournament`` with what a killed one has left, and what
the standings say.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from evaluation.conftest import run_at, write_rows
from evaluation.test_play import good_player
from game.builders import finished
from invoking import invoke
from serving import MODEL, ChatServer
from typer.testing import Result

from experiments.learning.measure import held_out_cases, spec_of
from medserl_agentloop.evaluation.local_models import load_player
from medserl_agentloop.evaluation.play import play_match
from medserl_agentloop.evaluation.tournament import SkillChange, changes, entries, shares
from medserl_agentloop.games.medical.case import Category, GameSpec, Role
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.records import MedicalRecord, Outcome, read_games
from medserl_agentloop.paths import resource
from medserl_agentloop.scoring.metrics import share_difference

ORACLE = "medserl_agentloop.games.clinic:OracleJudge"
NOVICE, TINY = (str(resource(f"assets/{name}")) for name in ("novice", "tiny_player"))
SHORT = ("--set", "budget.attacker_reasoning=40", "--set", "budget.assessor=60")


def specs(count: int) -> list[GameSpec]:
    """As many cases, each untouched with and without its error, and as a clean note to attack."""
    kinds = (Category.ADVERSARIAL_BENIGN, Category.VANILLA_BENIGN, Category.VANILLA_HARMFUL)
    return [
        spec_of(case, kind, n)
        for n, case in enumerate(held_out_cases(count, seed=5))
        for kind in kinds
    ]


def test_a_match_repeats_itself_and_a_turn_without_room_is_cut_off() -> None:
    def play(seed: int, most: int = 200) -> list[Any]:
        budgets: Any = {Role.ATTACKER: most, Role.ASSESSOR: most}
        config = MedicalConfig(judge=ORACLE)
        match = play_match(
            player, player, specs(2), config, budgets=budgets, temperature=1.0, seed=seed
        )
        return [turn for record in asyncio.run(match) for turn in record.turns]

    player = load_player(Path(TINY))
    assert play(1) == play(1) != play(2)
    assert all(turn.truncated and turn.tokens == 3 for turn in play(1, most=3))


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two cases: each to attack, and untouched with and without its error."""
    return write_rows(specs(2), tmp_path_factory.mktemp("notes") / "notes.parquet")


def held(output: Path, notes: Path, *players: str, more: tuple[str, ...] = ()) -> Result:
    options = ("--data", notes, "--games", 6, "--profile", "brief", "--judge", ORACLE, "-o", output)
    return invoke("tournament", *players, *options, *SHORT, *more)


def records(output: Path) -> list[MedicalRecord]:
    return list(read_games(output / "games.jsonl"))


@pytest.fixture(scope="module")
def played(notes: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    output = tmp_path_factory.mktemp("tournament") / "out"
    return output, held(output, notes, NOVICE, TINY)


def test_every_attacker_meets_every_assessor_with_the_same_attacks(
    played: tuple[Path, Result],
) -> None:
    output, done = played
    assert done.exit_code == 0, done.output
    games = records(output)
    attacked = [game for game in games if game.attack is not None]
    # Two notes to attack in four pairings, and four untouched ones once for each assessor.
    assert len(attacked) == 2 * 4 and len(games) == 2 * 4 + 4 * 2
    assert all(
        game.rewards and (game.attack is not None) == game.category.has_attack for game in games
    )
    said: dict[tuple[str, str], set[str]] = {}
    for game in attacked:
        assert game.attack is not None
        said.setdefault((game.players["attacker"], game.uid), set()).add(game.attack.response)
    assert len(said) == 4 and all(len(responses) == 1 for responses in said.values())
    untouched = {game.players.get("assessor") for game in games if game.attack is None}
    assert untouched == {"novice", "tiny_player"}
    results = json.loads((output / "tournament.json").read_text())
    assert results["settings"]["players"].keys() == {"novice", "tiny_player"}
    assert results["void"] == 0 and results["changes"] == {}
    table = pd.read_csv(output / "tournament.csv")
    assert len(table) == len(results["shares"])
    assert table[table.measure == "success"].games.tolist() == [2] * 4


def test_killed_tournament_goes_on_after_its_last_whole_pairing(
    played: tuple[Path, Result], notes: Path, tmp_path: Path
) -> None:
    whole = played[0]
    lines = (whole / "games.jsonl").read_bytes().splitlines(keepends=True)
    kept = b"".join(lines[:15])  # all but the last game of the last pairing
    (tmp_path / "games.jsonl").write_bytes(kept + lines[15][:40])
    settings = json.loads((whole / "tournament.json").read_text())["settings"]
    (tmp_path / "tournament.json").write_text(json.dumps({"settings": settings}))
    done = held(tmp_path, notes, NOVICE, TINY)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "games.jsonl").read_bytes().startswith(b"".join(lines[:12]))
    assert [game.spec for game in records(tmp_path)] == [game.spec for game in records(whole)]


def test_a_served_model_plays_too_and_no_answer_is_void(
    server: ChatServer, notes: Path, tmp_path: Path
) -> None:
    server.answer = lambda role, prompt: (
        400 if len(server.requests) == 1 else good_player(role, prompt)
    )
    players = (NOVICE, f"served={MODEL}@{server.url}")
    done = held(tmp_path / "out", notes, *players)
    assert done.exit_code == 0, done.output
    games = records(tmp_path / "out")
    assert {name for game in games for name in game.players.values()} == {"novice", "served"}
    assert sum(game.is_void for game in games) == 1 and "void: 1 of 16 games" in done.output
    server.info = {"weight_version": "step 2", "is_generation": True}
    done = held(tmp_path / "out", notes, *players)
    assert done.exit_code == 2 and "holds a tournament with other settings (players)" in done.output


def test_a_tournament_refuses_two_players_of_one_name(notes: Path, tmp_path: Path) -> None:
    done = held(tmp_path / "out", notes, NOVICE, NOVICE)
    assert done.exit_code == 2 and "called novice" in done.output
    assert not (tmp_path / "out").exists()


def run_of(folder: Path, notes: Path, **node: Any) -> Path:
    """A run of the novice's that has two checkpoints."""
    node |= {"profile": "brief", "judge": ORACLE}
    start = {"model": {"path": NOVICE}}
    return run_at(folder, 2, selfplay=node, data={"val_files": str(notes)}, actor_rollout_ref=start)


def test_a_run_is_its_checkpoints_and_says_profile_judge_and_notes(
    notes: Path, tmp_path: Path
) -> None:
    gone = tmp_path / "gone.parquet"
    run = run_of(tmp_path / "run", gone)
    (run / "global_step_10" / "actor").mkdir(parents=True)
    (run / "global_step_3").mkdir()  # its weights were deleted
    found = entries(f"mine={run}")
    assert [entry.name for entry in found] == ["mine/0", "mine/1", "mine/2", "mine/10"]
    assert found[0].place == NOVICE
    (run / "global_step_10" / "actor").rmdir()
    (run / "global_step_1" / "actor").unlink()
    command = ("tournament", run, "--games", 3, *SHORT)
    done = invoke(*command)
    assert done.exit_code == 2 and "name the notes with --data" in " ".join(done.output.split())
    gone.write_bytes(notes.read_bytes())
    done = invoke(*command)
    assert done.exit_code == 0, done.output
    settings = json.loads((run / "tournament" / "tournament.json").read_text())["settings"]
    assert settings["selfplay"].items() >= {"profile": "brief", "judge": ORACLE}.items()


def test_progress_is_a_tournament_between_the_ends_of_a_run(notes: Path, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", notes, budget={"attacker_reasoning": 40, "assessor": 60})
    done = invoke("progress", run, "--games", 6)
    assert done.exit_code == 0 and "valid errors found, %" in done.output, done.output
    last = done.output.splitlines()[-1]
    assert last.startswith("run, first against last: errors found, untouched ")
    assert "no difference shown" in last  # the two are the same player
    changed = json.loads((run / "progress" / "2" / "tournament.json").read_text())["changes"]
    assert changed["run"][0]["measure"] == "errors found, untouched"
    played = records(run / "progress" / "2")
    assert {game.players["assessor"] for game in played} == {"run/0", "run/2"}
    assert "lacks a checkpoint" in invoke("progress", run_at(tmp_path / "none", 0)).output


def game(attacker: str, assessor: str, outcome: Outcome, uid: int, **changes: Any) -> MedicalRecord:
    return finished(
        outcome, players={"attacker": attacker, "assessor": assessor}, uid=str(uid), **changes
    )


def alone(
    assessor: str, outcome: Outcome, uid: int, category: str = "vanilla_benign"
) -> MedicalRecord:
    """A game on an untouched note."""
    return finished(outcome, category=category, players={"assessor": assessor}, uid=str(uid))


def match(attacker: str, assessor: str, won: int, lost: int) -> list[MedicalRecord]:
    outcomes = [Outcome.MISSED_ERROR] * won + [Outcome.CORRECT_DETECTION] * lost
    return [game(attacker, assessor, outcome, uid) for uid, outcome in enumerate(outcomes)]


def count(found: pd.DataFrame, measure: str, attacker: str = "", assessor: str = "") -> Any:
    of = found.set_index(["measure", "attacker", "assessor"])[["hits", "games"]]
    return tuple(of.loc[measure, attacker, assessor])


def test_an_invalid_attack_is_a_failed_one_and_no_chance_for_the_assessor() -> None:
    games = match("a", "x", won=3, lost=5) + match("a", "y", won=1, lost=7)
    for assessor in ("x", "y"):
        games.append(game("a", assessor, Outcome.INVALID_ATTACK, 8))
    found = shares(games)
    assert count(found, "detection", "a", "x") == (5, 8)
    assert count(found, "success", "a", "x") == (3, 9)
    assert count(found, "valid", "a") == (8, 9)  # the same attacks met both assessors


def test_false_alarms_are_of_correct_notes_untouched_or_validly_reworded() -> None:
    decoy = {"category": "decoy_benign"}
    games = [
        *match("a", "x", won=1, lost=1),
        game("a", "x", Outcome.FALSE_POSITIVE, 2, **decoy),
        game("a", "x", Outcome.CORRECT_REJECTION, 3, **decoy),
        game("a", "x", Outcome.MISSED_ERROR, 4, **decoy),  # the rewording put an error in
        alone("x", Outcome.FALSE_POSITIVE, 5),
        alone("x", Outcome.CORRECT_DETECTION, 6, "vanilla_harmful"),
    ]
    found = shares(games)
    assert count(found, "false alarms, decoys", assessor="x") == (1, 2)
    assert count(found, "valid decoys", "a") == (2, 3)
    assert count(found, "false alarms, untouched", assessor="x") == (1, 1)
    assert count(found, "errors found, untouched", assessor="x") == (1, 1)


def test_changes_are_between_the_first_and_last_player_of_a_run() -> None:
    won = {("1", "1"): 30, ("1", "2"): 10, ("2", "1"): 35, ("2", "2"): 25}
    games = [g for (a, x), n in won.items() for g in match(a, x, n, 40 - n)]
    games += [alone("1", Outcome.FALSE_POSITIVE, uid) for uid in range(40)]
    games += [alone("2", Outcome.CORRECT_REJECTION, uid) for uid in range(40)]
    found = {change.measure: change for change in changes(shares(games), "1", "2")}
    assert found.keys() == {"false alarms, untouched", "detection", "success"}
    assert (found["detection"].before, found["detection"].after) == ((15, 80), (45, 80))
    assert (found["success"].before, found["success"].after) == ((40, 80), (60, 80))
    alarms = str(found["false alarms, untouched"])
    assert alarms.startswith("false alarms, untouched 100 → 0 % (better by 100 points, ")
    assert str(found["success"]).startswith("attacks that succeed 50 → 75 % (better by 25 points")
    pairs = ((15, 80), (16, 80)), ((60, 80), (10, 80))
    same, worse = (str(SkillChange("detection", *pair, share_difference(*pair))) for pair in pairs)
    assert same.endswith("19 → 20 % (no difference shown)") and "worse by 62 points" in worse
    assert changes(shares(games), "1", "1") == []
